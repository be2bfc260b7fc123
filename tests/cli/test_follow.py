"""The follower reads what the journal writer writes, piece by piece."""

from __future__ import annotations

from pathlib import Path

from ddp_audit import journal
from ddp_audit.cli import follow


def test_the_format_is_the_journals() -> None:
    assert follow.MAGIC == journal.MAGIC
    assert follow.HEAD.format == journal.HEAD.format
    assert follow.EVENT == journal.EVENT
    assert follow.NAME.pattern == journal.NAME.pattern


def test_events_come_once_and_whole(tmp_path: Path) -> None:
    name = journal.file_name(3, 0, 42, "ab")
    writer = journal.JournalWriter(tmp_path, name)
    folder = follow.FolderFollower(tmp_path)
    (one,) = folder.look()
    assert (one.rank, one.pid) == (3, 42)
    assert folder.look() == []
    assert one.events() == []
    writer.event("start", {"rank": 3})
    writer.rows(journal.frame(journal.STEP_ROW, bytes(journal.STEP_STRUCT.size)))
    assert one.events() == [{"event": "start", "rank": 3}]
    cut = journal.frame(journal.EVENT, b'{"event":"end"}')
    writer.rows(cut[:12])
    assert one.events() == []
    writer.rows(cut[12:])
    assert one.events() == [{"event": "end"}]
    writer.close()


def test_no_folder(tmp_path: Path) -> None:
    assert follow.FolderFollower(tmp_path / "no").look() == []
