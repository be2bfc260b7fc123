"""Journals of all ranks, restarts and nodes of one job -> ``Evidence``.

The same journals give the same bytes, in whatever order files or folders are met.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_audit.collect import evidence as store
from ddp_audit.collect.evidence import EvidenceError, decode, read_json, seal
from ddp_audit.journal import MAGIC, NAME, JournalContent, read_journal
from ddp_audit.records import (
    BATCH,
    EVIDENCE_VERSION,
    FORWARD,
    LIST,
    STEP,
    CommandInfo,
    Evidence,
    GroupInfo,
    HookState,
    IterationInfo,
    JournalInfo,
    LoaderInfo,
    ParametersInfo,
    WrapperInfo,
)
from ddp_audit.settings import JOURNAL_FOLDER

__all__ = ["EvidenceError", "merge"]

RUN_FILE = "run.json"
_MAGIC_STEM = MAGIC.rsplit(b" ", 1)[0] + b" "


@dataclass(slots=True)
class _Part:
    """One journal on its way into the tables."""

    info: JournalInfo  # ``journal`` and ``host`` are set at the end
    host_key: str
    run_id: str
    origin: Path
    batches: npt.NDArray[Any]
    forwards: npt.NDArray[Any]
    steps: npt.NDArray[Any]
    list_serials: npt.NDArray[np.uint32]
    list_kinds: npt.NDArray[np.uint8]
    list_lengths: npt.NDArray[np.uint32]
    list_values: npt.NDArray[np.uint64]

    @property
    def size(self) -> int:
        """Rows held; of two copies of a journal the longer one is the newer one."""
        return len(self.batches) + len(self.forwards) + len(self.steps) + len(self.list_values)


@dataclass(slots=True)
class _Source:
    """What one folder gave."""

    folder: Path
    command: CommandInfo | None
    parts: list[_Part]
    notes: list[str] = field(default_factory=list)
    ranks_expected: int | None = None


# --------------------------------------------------------------------------- one journal


def _latest(items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """The last value per key, in order of the first sight of the key."""
    found: dict[Any, Any] = {}
    for key, value in items:
        found[key] = value
    return found


def _part(content: JournalContent, notes: list[str]) -> _Part | None:
    """A journal's events as records. ``None`` when it holds no start event: nothing proves its rank."""
    name = content.path.name
    records: dict[str, list[Any]] = {
        "loader": [],
        "iteration": [],
        "wrapper": [],
        "parameters": [],
        "group": [],
        "hook": [],
    }
    kinds: dict[str, type[Any]] = {
        "loader": LoaderInfo,
        "iteration": IterationInfo,
        "wrapper": WrapperInfo,
        "parameters": ParametersInfo,
        "group": GroupInfo,
        "hook": HookState,
    }
    start: dict[str, Any] | None = None
    device: dict[str, Any] = {}
    final: dict[str, Any] = {}
    ends: dict[int, dict[str, Any]] = {}
    destroyed: dict[int, float] = {}
    stopped_at: int | None = None
    end: float | None = None
    num_unreadable = 0
    for event in content.events:
        kind = event.get("event")
        try:
            if kind == "start":
                start = start or event
            elif kind == "device":
                device = event
            elif kind == "final":
                final = event
            elif kind == "stopped":
                stopped_at = int(event["step"])
            elif kind == "end":
                end = float(event["time"])
            elif kind == "group_destroyed":
                destroyed[int(event["generation"])] = float(event["time"])
            elif kind == "iteration_end":
                ends[int(event["iteration"])] = event
            elif kind in kinds:
                records[str(kind)].append(decode(kinds[str(kind)], event))
        except (KeyError, TypeError, ValueError):
            num_unreadable += 1
    if start is None:
        notes.append(f"{name} has no start record and is left out.")
        return None
    if num_unreadable:
        notes.append(f"{name}: {num_unreadable} records could not be understood and are left out.")
    if content.cut:
        notes.append(f"{name} is cut or damaged in the middle; what came before is used.")
    iterations: list[IterationInfo] = []
    for iteration in _latest((i.iteration, i) for i in records["iteration"]).values():
        closing = ends.get(iteration.iteration)
        if closing is not None:
            iteration = replace(
                iteration,
                ended=True,
                finished=bool(closing.get("finished")),
                num_batches=int(closing.get("num_batches") or 0),
                num_samples=int(closing.get("num_samples") or 0),
                index_digest=closing.get("index_digest") or None,
                content_digest=closing.get("content_digest") or None,
                lists_dropped=bool(closing.get("lists_dropped")),
            )
        elif (num_batches := int(np.sum(content.batches["iteration"] == iteration.iteration))) > iteration.num_batches:
            # the process died inside the iteration: its rows are all there is
            iteration = replace(iteration, num_batches=num_batches)
        iterations.append(iteration)
    groups = [
        replace(group, destroyed=destroyed.get(group.generation, group.destroyed))
        for group in _latest((g.generation, g) for g in records["group"]).values()
    ]
    try:
        info = JournalInfo(
            journal=0,
            file=name,
            rank=int(start["rank"]),
            world_size=max(int(start["world_size"]), *(g.world_size for g in groups), 1),
            local_rank=start.get("local_rank"),
            restart=int(start.get("restart") or 0),
            pid=int(start["pid"]),
            host="",
            start=float(start["start"]),
            proof=str(start.get("proof", "")),
            torch=str(start.get("torch", "")),
            python=str(start.get("python", "")),
            hash_name=str(start.get("hash_name", "")),
            device=str(device.get("device") or "unknown"),
            device_uuid=device.get("device_uuid"),
            other_frameworks=tuple(str(item) for item in start.get("other_frameworks") or ()),
            launcher=start.get("launcher"),
            groups=tuple(groups),
            loaders=tuple(_latest((x.loader, x) for x in records["loader"]).values()),
            iterations=tuple(iterations),
            wrappers=tuple(_latest((x.wrapper, x) for x in records["wrapper"]).values()),
            parameters=tuple(_latest((x.optimizer, x) for x in records["parameters"]).values()),
            hook_states=tuple(_latest((x.hook, x) for x in records["hook"]).values()),
            num_other_collectives=int(final.get("num_other_collectives") or 0),
            final_params=final.get("final_params") or None,
            stopped_at=stopped_at,
            ended=end is not None,
            cut=content.cut,
            capped=any(i.lists_dropped for i in iterations) or bool(final.get("capped")),
            end=end,
        )
    except (KeyError, TypeError, ValueError) as error:
        notes.append(f"{name}: its start record is damaged ({error}); it is left out.")
        return None
    keys = np.array(content.list_keys, dtype=np.int64).reshape(-1, 3)
    return _Part(
        info=info,
        host_key=str(start.get("host_key", "")),
        run_id=str(start.get("run_id") or ""),
        origin=content.path,
        batches=content.batches[np.argsort(content.batches["serial"], kind="stable")],
        forwards=content.forwards[np.argsort(content.forwards["serial"], kind="stable")],
        steps=content.steps[np.argsort(content.steps["serial"], kind="stable")],
        list_serials=keys[:, 0].astype(np.uint32),
        list_kinds=keys[:, 1].astype(np.uint8),
        list_lengths=keys[:, 2].astype(np.uint32),
        list_values=content.list_values,
    )


# --------------------------------------------------------------------------- one folder


def _read_journals(folder: Path, source: _Source) -> None:
    for path in sorted(folder.iterdir()):
        if path.suffix.startswith(".lists") and NAME.match(path.stem + ".journal"):
            continue
        if not path.is_file():
            continue
        if not NAME.match(path.name):
            source.notes.append(f"{path.name} in the journal folder is not ours and is left out.")
            continue
        try:
            content = read_journal(path)
            if content is None:
                head = path.read_bytes()[: len(MAGIC) + 8]
                if head.startswith(_MAGIC_STEM):
                    version = head[len(_MAGIC_STEM) :].split(b"\n")[0].decode("ascii", "replace")
                    raise EvidenceError(
                        f"{path} was written in journal format {version}, this ddp-audit reads format 1; "
                        f"install a ddp-audit that reads format {version}"
                    )
                word = "is empty" if not head else "does not begin like a journal"
                source.notes.append(f"{path.name} {word} and is left out.")
                continue
        except OSError as error:
            source.notes.append(f"{path.name} cannot be read ({error.strerror}) and is left out.")
            continue
        part = _part(content, source.notes)
        if part is not None:
            source.parts.append(part)


def _split(evidence: Evidence, place: Path) -> list[_Part]:
    """A stored evidence as parts again, one per journal."""
    parts: list[_Part] = []
    for info in evidence.journals:
        rows = {
            name: np.array(getattr(evidence, name)[getattr(evidence, f"{name}_key")[:, 1] == info.journal])
            for name in ("batches", "forwards", "steps")
        }
        lists = np.array(evidence.lists[evidence.lists["journal"] == info.journal])
        parts.append(
            _Part(
                info=info,
                host_key=f"{evidence.sha256}:{info.host}",
                run_id=evidence.command.run_id,
                origin=place,
                batches=rows["batches"],
                forwards=rows["forwards"],
                steps=rows["steps"],
                list_serials=lists["serial"],
                list_kinds=lists["kind"],
                list_lengths=lists["length"],
                list_values=np.asarray(evidence.list_values)[_spans(lists["offset"], lists["length"])],
            )
        )
    return parts


def _read_folder(folder: Path) -> _Source:
    if not folder.is_dir():
        raise EvidenceError(f"{folder} is no folder; name the output folder of 'ddp-audit probe'")
    journals = folder / JOURNAL_FOLDER
    source = _Source(folder=folder, command=None, parts=[])
    run_file = folder / RUN_FILE
    if run_file.is_file():
        raw = read_json(run_file)
        if isinstance(raw, dict) and "evidence_version" in raw:
            store.check_version(str(raw["evidence_version"]), run_file)
        try:
            source.command = decode(CommandInfo, raw)
        except (TypeError, ValueError) as error:
            raise EvidenceError(
                f"{run_file} lacks a field or holds a wrong one ({error}); run the job again"
            ) from error
    if journals.is_dir():
        _read_journals(journals, source)
    elif any(NAME.match(path.name) for path in folder.iterdir()):
        _read_journals(folder, source)
    if not source.parts and store.find(folder) is not None:
        stored = store.load(folder)
        source.parts = _split(stored, folder)
        source.command = source.command or stored.command
        source.notes += stored.notes
        source.ranks_expected = stored.ranks_expected
    if not source.parts and source.command is None:
        raise EvidenceError(
            f"{folder} holds no evidence of a job; name the output folder of 'ddp-audit probe' (it holds run.json)"
        )
    return source


# --------------------------------------------------------------------------- the job


def _spans(offsets: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Positions of all words of lists that begin at ``offsets``, one list after another."""
    lengths = lengths.astype(np.int64)
    total = int(lengths.sum())
    begin = np.repeat(offsets.astype(np.int64) - (np.cumsum(lengths) - lengths), lengths)
    return begin + np.arange(total, dtype=np.int64)


def _command(sources: Sequence[_Source], parts: Sequence[_Part]) -> CommandInfo:
    """The command of the job; what several nodes' files say differently is taken from the earliest."""
    commands = [source.command for source in sources if source.command is not None]
    if not commands:
        first = min(parts, key=lambda part: (part.info.start, part.info.file))
        return CommandInfo(run_id=first.run_id, form="rank", tool_version="", start=first.info.start)
    command = min(commands, key=lambda item: (item.start, item.run_id))
    asked = [item.launcher_ranks for item in commands if item.launcher_ranks is not None]
    return replace(command, launcher_ranks=max(asked) if asked else None)


def _same_job(parts: list[_Part], command: CommandInfo, sources: Sequence[_Source], notes: list[str]) -> list[_Part]:
    """Leave out journals of another run that lie in the same folder.

    Nodes that could not agree on a run id write under ids of their own; a journal counts as
    another job's only when its rank and restart are also held by the job in question.

    Raises:
        EvidenceError: two folders are two jobs.
    """
    ids = {source.command.run_id for source in sources if source.command is not None}
    if not ids:
        common = Counter(part.run_id for part in parts).most_common()
        ids = {min(name for name, count in common if count == common[0][1])} if common else set()
    held = {(part.info.rank, part.info.restart): part for part in parts if part.run_id == command.run_id}
    kept: list[_Part] = []
    for part in parts:
        twin = held.get((part.info.rank, part.info.restart))
        if part.run_id == command.run_id or twin is None:
            kept.append(part)
        elif len(sources) > 1 and part.run_id in ids and part.info.file != twin.info.file:
            raise EvidenceError(
                f"{part.origin.parent} and {twin.origin.parent} are two jobs (both hold rank {part.info.rank}); "
                "name the folders of one job only"
            )
        elif part.info.file != twin.info.file:
            notes.append(f"{part.info.file} belongs to another run and is left out.")
    return kept


def _once(parts: Iterable[_Part]) -> list[_Part]:
    """Each journal once, the longest copy of it; journals as such before stored evidence."""
    best: dict[str, _Part] = {}
    for part in parts:
        other = best.get(part.info.file)
        rank = (part.size, ":" not in part.host_key, part.host_key)
        if other is None or rank > (other.size, ":" not in other.host_key, other.host_key):
            best[part.info.file] = part
    return sorted(best.values(), key=lambda p: (p.info.rank, p.info.restart, p.info.start, p.info.file))


def _keyed(parts: Sequence[_Part], name: str, dtype: np.dtype[Any]) -> tuple[Any, npt.NDArray[np.uint32]]:
    tables = [getattr(part, name) for part in parts]
    rows = np.concatenate([*tables, np.empty(0, dtype)]).astype(dtype, copy=False)
    counts = [len(table) for table in tables]
    ranks = np.repeat(np.array([part.info.rank for part in parts], dtype=np.uint32), counts)
    numbers = np.repeat(np.arange(len(parts), dtype=np.uint32), counts)
    return rows, np.stack([ranks, numbers], axis=1)


def _lists(parts: Sequence[_Part]) -> tuple[Any, npt.NDArray[np.uint64]]:
    rows: list[npt.NDArray[Any]] = [np.empty(0, LIST)]
    values: list[npt.NDArray[np.uint64]] = [np.empty(0, np.uint64)]
    offset = 0
    for number, part in enumerate(parts):
        lengths = part.list_lengths.astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        order = np.lexsort((part.list_kinds, part.list_serials))
        row = np.empty(len(order), LIST)
        row["rank"], row["journal"] = part.info.rank, number
        row["serial"], row["kind"] = part.list_serials[order], part.list_kinds[order]
        row["length"] = lengths[order]
        row["offset"] = offset + np.cumsum(lengths[order]) - lengths[order]
        rows.append(row)
        values.append(part.list_values[_spans(starts[order], lengths[order])])
        offset += int(lengths.sum())
    return np.concatenate(rows), np.concatenate(values)


def _with_hosts(parts: Sequence[_Part]) -> None:
    """Hosts by alias, host0 holding the lowest rank; the key itself stays in the journal."""
    aliases: dict[str, str] = {}
    for number, part in enumerate(parts):
        alias = aliases.setdefault(part.host_key, f"host{len(aliases)}")
        part.info = replace(part.info, journal=number, host=alias)


def _alive(pid: int) -> bool:
    """Whether a process of that number lives on this machine: a rank that did not end and is gone was killed."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # it lives, but is another user's
    return True


def merge(folders: Sequence[Path]) -> Evidence:
    """Read the folders of one job.

    Args:
        folders: output folders of ``probe`` (one per node where nodes share no disk), or stored
            evidence.

    Returns:
        Evidence with its digest; what was missing, cut or foreign is in ``notes``. A folder of a
        job of which no rank was seen gives evidence without journals.

    Raises:
        EvidenceError: a folder holds no evidence, evidence of a newer version or cut JSON, or the
            folders are of different jobs.
    """
    if not folders:
        raise EvidenceError("no folder given; name the output folder of 'ddp-audit probe'")
    sources = [_read_folder(folder) for folder in folders]
    found = [part for source in sources for part in source.parts]
    notes = [note for source in sources for note in source.notes]
    command = _command(sources, found)
    parts = _once(_same_job(found, command, sources, notes))
    _with_hosts(parts)
    batches, batches_key = _keyed(parts, "batches", BATCH)
    forwards, forwards_key = _keyed(parts, "forwards", FORWARD)
    steps, steps_key = _keyed(parts, "steps", STEP)
    lists, list_values = _lists(parts)
    claims = [part.info.world_size for part in parts]
    claims += [source.ranks_expected for source in sources if source.ranks_expected is not None]
    if command.launcher_ranks is not None:
        claims.append(command.launcher_ranks)
    return seal(
        Evidence(
            version=EVIDENCE_VERSION,
            command=command,
            ranks_expected=max(claims) if claims else None,
            journals=tuple(part.info for part in parts),
            batches=batches,
            batches_key=batches_key,
            forwards=forwards,
            forwards_key=forwards_key,
            steps=steps,
            steps_key=steps_key,
            lists=lists,
            list_values=list_values,
            notes=tuple(sorted(set(notes))),
            running=any(not part.info.ended and _alive(part.info.pid) for part in parts),
        )
    )
