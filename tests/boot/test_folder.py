"""The output folder: private, never losing earlier evidence, one for all ranks of a node."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ddp_audit.boot import folder as folders
from ddp_audit.boot.folder import FolderError, launch_identity, open_folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opened(out: Path | None, run_id: str = "aa", **more: Any) -> Path:
    values: dict[str, Any] = {"start": time.time(), "shared": False, "run": {"run_id": run_id}, **more}
    return open_folder(out, run_id=run_id, **values)


def test_the_default_is_private_and_the_newest_is_latest(here: Path) -> None:
    start = time.time()
    first = opened(None, start=start)
    second = opened(None, "bb", start=start)
    assert first.parent == second.parent == here / "ddp-audit-out"
    assert first.name == folders.stamp(start)
    assert second.name == f"{first.name}-2"
    assert (here / "ddp-audit-out" / "latest").resolve() == second
    for path in (first, here / "ddp-audit-out"):
        assert path.stat().st_mode & 0o777 == 0o700
        assert (path / ".gitignore").read_text() == "*\n"
    assert json.loads((second / "run.json").read_text()) == {"run_id": "bb"}


def test_earlier_evidence_is_moved(here: Path) -> None:
    out = opened(here / "out")
    (out / "journal" / "rank00000-r0-1-aa.journal").write_text("one")
    (out / "audit.json").write_text("{}")
    (out / "mine.txt").write_text("a file of the user's")
    opened(here / "out", "bb")
    (previous,) = (out / "previous").iterdir()
    assert sorted(os.listdir(previous)) == ["audit.json", "journal", "run.json"]
    assert (previous / "journal" / "rank00000-r0-1-aa.journal").read_text() == "one"
    assert (out / "mine.txt").exists()
    assert os.listdir(out / "journal") == []
    (out / "audit.json").write_text("{}")
    opened(here / "out", "cc")
    assert len(list((out / "previous").iterdir())) == 2


def test_a_folder_of_the_users_is_left_alone(here: Path) -> None:
    (here / "out").mkdir(mode=0o755)
    (here / "out" / "notes.txt").write_text("x")
    opened(here / "out")
    assert (here / "out").stat().st_mode & 0o777 == 0o755
    assert not (here / "out" / ".gitignore").exists()


def _rank(out: str, number: int, queue: Any) -> None:
    folder = open_folder(Path(out), run_id="bb", start=0.0, shared=True, run={"first": number})
    (folder / "journal" / f"{number}").write_text("")
    queue.put(str(folder))


def test_one_of_many_tidies(here: Path) -> None:
    out = opened(here / "out")
    (out / "journal" / "old").write_text("")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    ranks = [context.Process(target=_rank, args=(str(out), n, queue)) for n in range(8)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(20)
    assert {queue.get(timeout=5) for _ in ranks} == {str(out)}
    assert sorted(os.listdir(out / "journal")) == [str(n) for n in range(8)]
    assert len(list((out / "previous").iterdir())) == 1


def test_a_restart_keeps_what_is_there(here: Path) -> None:
    out = opened(here / "out", shared=True)
    (out / "journal" / "first").write_text("")
    opened(here / "out", shared=True, restarted=True)
    assert os.listdir(out / "journal") == ["first"]


def test_the_same_launcher_twice_is_two_launches(here: Path) -> None:
    """Two jobs started by one shell, one after the other, as plain processes with RANK set."""
    out = opened(here / "out", shared=True)
    (out / "journal" / "first").write_text("")
    folders.mark_ended(out, "aa")
    opened(here / "out", shared=True)
    assert os.listdir(out / "journal") == []
    opened(here / "out", shared=True)
    assert len(list((out / "previous").iterdir())) == 1


def test_one_that_died_without_a_word_is_taken_for_dead_later(here: Path) -> None:
    out = opened(here / "out", shared=True)
    (out / "journal" / "first").write_text("")
    long_ago = time.time() - 10 * folders.STALE
    os.utime(out / ".run-aa", (long_ago, long_ago))
    folders.sign_of_life(out)
    opened(here / "out", shared=True)
    assert os.listdir(out / "journal") == ["first"]
    os.utime(out / ".alive", (long_ago, long_ago))
    opened(here / "out", shared=True)
    assert os.listdir(out / "journal") == []


def test_ranks_agree_on_the_default_folder(here: Path) -> None:
    """Their clocks may disagree by a second at the border of two."""
    one = opened(None, "ab12cd34", shared=True, start=1000.0)
    two = opened(None, "ab12cd34", shared=True, start=1001.0)
    assert one == two


def test_nothing_writable(here: Path) -> None:
    (here / "file").write_text("")
    with pytest.raises(FolderError):
        opened(here / "file" / "out")


def test_ranks_of_one_launch_have_one_id() -> None:
    env = {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "h", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    first = launch_identity({**env, "MASTER_PORT": "1", "RANK": "0"})
    other = launch_identity({**env, "MASTER_PORT": "2", "RANK": "1"})
    assert first[0] == other[0]
    assert first[1] == pytest.approx(other[1], abs=1)
    assert first[0] != launch_identity({**env, "TORCHELASTIC_RUN_ID": "y"})[0]


def test_nodes_of_one_launch_have_one_id(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "h", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "2"}
    one = launch_identity({**env, "WORLD_SIZE": "4"})[0]
    monkeypatch.setattr(folders.os, "getppid", lambda: 1)
    assert launch_identity({**env, "WORLD_SIZE": "4"})[0] == one
    assert launch_identity({**env, "WORLD_SIZE": "4", "MASTER_PORT": "2"})[0] != one


def test_write_atomic_leaves_the_old_file(here: Path) -> None:
    folders.write_atomic(here / "x", b"1")
    (here / "d").mkdir()
    with pytest.raises(OSError):
        folders.write_atomic(here / "d" / "no" / "x", b"2")
    assert (here / "x").read_bytes() == b"1"
    assert sorted(os.listdir(here)) == ["d", "x"]
