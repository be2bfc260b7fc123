"""Merging folders: several nodes, copies, damage, foreign files, other versions; stored evidence."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from evidence_builder import Rank, batches_of, sharded, write_job, write_rank, write_run

from ddp_audit.collect import evidence as store
from ddp_audit.collect.evidence import EvidenceError
from ddp_audit.collect.merge import merge
from ddp_audit.journal import MAGIC
from ddp_audit.judge import judge
from ddp_audit.records import Evidence, Verdict
from ddp_audit.render import text

DEAD_PID = 2**22 + 5  # above the largest number a process can have here


def small(world: int = 2) -> list[Rank]:
    return sharded(40 * world, world, 2, 4)


def same(one: Evidence, other: Evidence) -> bool:
    """Equal in every byte."""
    return one.sha256 == other.sha256 and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in store.TABLES
    )


def test_tables_are_sorted_and_whole(tmp_path: Path) -> None:
    found = merge([write_job(tmp_path, small())])
    assert [journal.rank for journal in found.journals] == [0, 1]
    assert found.ranks_expected == 2
    assert len(found.batches) == 40
    assert found.steps_key.tolist() == sorted(found.steps_key.tolist())
    row = found.lists[0]
    assert found.list_values[row["offset"] : row["offset"] + row["length"]].tolist() == small()[0].epochs[0][0]
    assert not found.running
    assert found.notes == ()


def test_order_of_files_does_not_matter(tmp_path: Path) -> None:
    first = merge([write_job(tmp_path / "a", small(3))])
    other = tmp_path / "b"
    write_run(other)
    for rank in (2, 0, 1):
        write_rank(other, rank, 3, small(3)[rank])
    assert same(first, merge([other]))


def test_nodes_of_one_job_in_folders_of_their_own(tmp_path: Path) -> None:
    ranks = [replace(r, host=f"node{k // 2}") for k, r in enumerate(small(4))]
    whole = merge([write_job(tmp_path / "whole", ranks)])
    nodes = [tmp_path / "n0", tmp_path / "n1"]
    for node, folder in enumerate(nodes):
        write_run(folder)
        for rank in (2 * node, 2 * node + 1):
            write_rank(folder, rank, 4, ranks[rank])
    merged = merge(nodes)
    assert same(whole, merged)
    assert same(whole, merge(nodes[::-1]))
    assert [journal.host for journal in merged.journals] == ["host0", "host0", "host1", "host1"]


def test_nodes_that_could_not_agree_on_a_run_id(tmp_path: Path) -> None:
    ranks = small(4)
    for node, folder in enumerate((tmp_path / "n0", tmp_path / "n1")):
        write_run(folder, run_id=f"id{node}", start=900.0 + node)
        for rank in (2 * node, 2 * node + 1):
            write_rank(folder, rank, 4, replace(ranks[rank], run_id=f"id{node}"))
    found = merge([tmp_path / "n1", tmp_path / "n0"])
    assert [journal.rank for journal in found.journals] == [0, 1, 2, 3]
    assert found.command.run_id == "id0"


def test_two_jobs_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, run_id=name)
        for rank in range(2):
            write_rank(tmp_path / name, rank, 2, replace(small()[rank], run_id=name, pid=10 * ord(name) + rank))
    with pytest.raises(EvidenceError, match=r"are two jobs \(both hold rank \d\)"):
        merge([tmp_path / "a", tmp_path / "b"])


def test_copies_of_a_journal_count_once(tmp_path: Path) -> None:
    folder = write_job(tmp_path / "a", small())
    shutil.copytree(folder, tmp_path / "b")
    assert same(merge([folder]), merge([folder, tmp_path / "b"]))


def test_the_longer_copy_is_taken(tmp_path: Path) -> None:
    folder = write_job(tmp_path / "a", small())
    shutil.copytree(folder, tmp_path / "b")
    for path in (tmp_path / "b" / "journal").glob("rank00001*.journal"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    found = merge([tmp_path / "b", folder])
    assert len(found.steps) == 40
    assert len(merge([tmp_path / "b"]).steps) < 40


def test_every_cut_of_a_journal_can_be_read(tmp_path: Path) -> None:
    """Whatever a SIGKILL leaves, what came before is used and the note names the file."""
    folder = write_job(tmp_path, small())
    path = next((folder / "journal").glob("rank00001*.journal"))
    data = path.read_bytes()
    for size in random.Random(0).sample(range(len(MAGIC), len(data)), 25):
        path.write_bytes(data[:size])
        found = merge([folder])
        assert len(found.journals) in (1, 2)
        assert found.ranks_expected == 2
        audit = judge(found, created=0.0)
        assert not [item for item in audit.checks if item.outcome == "error"]
        assert audit.verdict is not Verdict.FAIL


def test_damage_in_the_middle_is_named(tmp_path: Path) -> None:
    folder = write_job(tmp_path, small())
    path = next((folder / "journal").glob("rank00001*.journal"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    found = merge([folder])
    assert any(path.name in note and "cut or damaged" in note for note in found.notes)
    assert found.journals[1].cut


def test_a_missing_rank_is_no_pass(tmp_path: Path) -> None:
    folder = write_job(tmp_path, small(4))
    for path in (folder / "journal").glob("rank0000[23]*"):
        path.unlink()
    audit = judge(merge([folder]), created=0.0)
    assert audit.ranks_missing == (2, 3)
    assert audit.verdict is Verdict.INCONCLUSIVE
    assert audit.headline == "2 of 4 ranks reported; ranks 2 and 3 are missing"
    assert audit.effective_gpus is None
    assert audit.core_unanswered


def test_the_launcher_may_know_of_more_ranks(tmp_path: Path) -> None:
    assert merge([write_job(tmp_path, small(), launcher_ranks=8)]).ranks_expected == 8


def test_foreign_and_empty_files_are_named(tmp_path: Path) -> None:
    folder = write_job(tmp_path, small())
    reference = merge([folder])
    journal = folder / "journal"
    (journal / "notes.txt").write_text("hello")
    (journal / "rank00007-r0-1-ab.journal").write_bytes(b"")
    (journal / "rank00008-r0-1-ab.journal").write_bytes(b"something else")
    (journal / "sub").mkdir()
    found = merge([folder])
    assert len(found.journals) == 2
    assert found.ranks_expected == reference.ranks_expected
    assert [note.split()[0] for note in found.notes] == [
        "notes.txt",
        "rank00007-r0-1-ab.journal",
        "rank00008-r0-1-ab.journal",
    ]


def test_a_journal_of_another_run_is_left_out(tmp_path: Path) -> None:
    folder = write_job(tmp_path, small())
    write_rank(folder, 0, 2, replace(small()[0], run_id="older", pid=77), tag="cd")
    found = merge([folder])
    assert len(found.journals) == 2
    assert any("belongs to another run" in note for note in found.notes)


def test_a_process_without_proof_has_no_journal(tmp_path: Path) -> None:
    """A journal without a start record proves no rank."""
    folder = write_job(tmp_path, small())
    path = folder / "journal" / "rank00005-r0-9-ab.journal"
    path.write_bytes(MAGIC)
    found = merge([folder])
    assert len(found.journals) == 2
    assert any("no start record" in note for note in found.notes)


def test_a_killed_rank_is_not_running(tmp_path: Path) -> None:
    ranks = [replace(r, ended=False, pid=DEAD_PID + k) for k, r in enumerate(small())]
    assert not merge([write_job(tmp_path / "dead", ranks)]).running
    ranks = [replace(r, ended=False, pid=os.getpid()) for r in small()]
    assert merge([write_job(tmp_path / "alive", ranks)]).running


# --------------------------------------------------------------------------- attempts


def test_restarts_and_groups_made_anew_are_attempts(tmp_path: Path) -> None:
    folder = write_job(tmp_path, small())
    for rank in range(2):
        write_rank(folder, rank, 2, replace(small()[rank], restart=1, pid=500 + rank, start=2000.0))
    audit = judge(merge([folder]), created=0.0)
    assert [(a.restart, a.num_common_steps, a.judged) for a in audit.attempts] == [(0, 20, False), (1, 20, True)]


def test_an_attempt_of_few_steps_is_passed_over(tmp_path: Path) -> None:
    folder = write_job(tmp_path, small())
    for rank in range(2):
        short = replace(small()[rank], epochs=[small()[rank].epochs[0][:7]], restart=1, pid=500 + rank, start=2000.0)
        write_rank(folder, rank, 2, short)
    audit = judge(merge([folder]), created=0.0)
    assert [(a.restart, a.judged) for a in audit.attempts] == [(0, True), (1, False)]


def test_a_group_made_anew_in_the_same_process(tmp_path: Path) -> None:
    ranks = [replace(r, generations=(0, 1)) for r in small()]
    audit = judge(merge([write_job(tmp_path, ranks)]), created=0.0)
    assert [(a.generation, a.num_common_steps, a.judged) for a in audit.attempts] == [(0, 10, False), (1, 10, True)]
    assert audit.num_steps == 10


# --------------------------------------------------------------------------- stored evidence


def test_stored_evidence_gives_the_same_audit(tmp_path: Path) -> None:
    found = merge([write_job(tmp_path, small())])
    store.save(found, tmp_path)
    loaded = store.load(tmp_path)
    assert isinstance(loaded.batches, np.memmap)
    assert loaded.journals == found.journals
    assert loaded.command == found.command
    assert judge(loaded, created=0.0) == judge(found, created=0.0)
    assert judge(store.load(tmp_path / "evidence"), created=0.0) == judge(found, created=0.0)


def test_stored_evidence_can_be_merged_again(tmp_path: Path) -> None:
    folder = write_job(tmp_path, small())
    found = merge([folder])
    store.save(found, folder)
    shutil.rmtree(folder / "journal")
    assert same(found, merge([folder]))
    (folder / "run.json").unlink()
    assert same(found, merge([folder]))


def test_saving_again_replaces_the_whole(tmp_path: Path) -> None:
    first = merge([write_job(tmp_path, small())])
    store.save(first, tmp_path)
    store.save(first, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evidence", "journal", "run.json"]
    assert store.load(tmp_path).sha256 == first.sha256


# --------------------------------------------------------------------------- bad input: one clear line each


def stored(tmp_path: Path) -> Path:
    folder = write_job(tmp_path, small())
    place = store.save(merge([folder]), folder)
    shutil.rmtree(folder / "journal")
    (folder / "run.json").unlink()
    return place


def one_line(error: pytest.ExceptionInfo[EvidenceError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_folder_without_evidence(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError) as error:
        merge([tmp_path])
    assert "holds no evidence" in one_line(error)
    with pytest.raises(EvidenceError, match="is no folder"):
        merge([tmp_path / "absent"])
    with pytest.raises(EvidenceError, match="no evidence"):
        store.load(tmp_path)
    with pytest.raises(EvidenceError, match="no folder given"):
        merge([])


@pytest.mark.parametrize("version", ["1.1", "2.0"])
def test_newer_evidence_names_the_version_needed(tmp_path: Path, version: str) -> None:
    place = stored(tmp_path)
    meta = json.loads((place / "meta.json").read_text())
    (place / "meta.json").write_text(json.dumps({**meta, "version": version}))
    with pytest.raises(EvidenceError, match=f"install a ddp-audit that reads evidence {version}") as error:
        merge([tmp_path])
    one_line(error)


def test_a_newer_journal_names_the_format_needed(tmp_path: Path) -> None:
    folder = write_job(tmp_path, small())
    path = next((folder / "journal").glob("*.journal"))
    path.write_bytes(path.read_bytes().replace(MAGIC, b"ddp-audit journal 2\n", 1))
    with pytest.raises(EvidenceError, match="journal format 2, this ddp-audit reads format 1"):
        merge([folder])


@pytest.mark.parametrize("name", ["meta.json", "run.json"])
def test_cut_json(tmp_path: Path, name: str) -> None:
    place = stored(tmp_path) if name == "meta.json" else write_job(tmp_path, small())
    (place / name).write_text((place / name).read_text()[:-20])
    with pytest.raises(EvidenceError, match="cut or damaged JSON") as error:
        merge([tmp_path])
    assert name in one_line(error)


def test_changed_tables_are_noticed(tmp_path: Path) -> None:
    place = stored(tmp_path)
    path = place / "list_values.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(EvidenceError, match="does not match its own checksum"):
        merge([tmp_path])
    path.unlink()
    with pytest.raises(EvidenceError, match="missing or damaged"):
        merge([tmp_path])


def test_a_job_of_which_no_rank_was_seen(tmp_path: Path) -> None:
    write_run(tmp_path, zero_reason="torch was never imported", launcher_ranks=2)
    audit = judge(merge([tmp_path]), created=0.0)
    assert audit.verdict is Verdict.INCONCLUSIVE
    assert audit.ranks_seen == 0
    assert audit.headline == "No rank was seen: torch was never imported"
    assert text.render(audit, color=False).count("torch was never imported") == 1
    assert audit.effective_gpus_why == "no rank was seen"


def test_lists_of_a_lost_segment_are_missing_not_wrong(tmp_path: Path) -> None:
    folder = write_job(tmp_path, [replace(r, epochs=[batches_of(range(80), 4)]) for r in small()])
    for path in (folder / "journal").glob("*.lists*"):
        path.unlink()
    audit = judge(merge([folder]), created=0.0)
    found = {item.id: item for item in audit.checks}
    assert found["DDP101"].outcome == "fail"  # the digests of the index lists are in the rows
    assert found["DDP103"].outcome == "inconclusive"
