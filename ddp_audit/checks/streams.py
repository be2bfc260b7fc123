"""What the checks look at: the judged attempt, as streams of samples per replica.

A ``View`` is made once per audit and shared by all checks; its parts are worked out when first
asked for. Nothing here decides whether something is wrong.

Shape suffixes: R replicas, S steps, B samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_audit.checks.layout import Layout, find_layout
from ddp_audit.collect.duplicates import Coverage, coverage, distinct, window_counts
from ddp_audit.records import (
    NO_STEP,
    Attempt,
    BatchFlag,
    Evidence,
    ForwardFlag,
    IterationInfo,
    JournalInfo,
    Level,
    ListKind,
    LoaderInfo,
    Location,
    SamplerInfo,
    StepFlag,
    U64Array,
)

MIN_STEPS = 8  # fewer equal steps also happen by chance in tiny data sets
MAX_WINDOW_SAMPLES = 4_000_000  # samples looked at for step overlap; above it steps are taken evenly spaced
LAGS = range(1, 9)  # unequal steps that give the chance overlap
SIGNIFICANT_Z = 4.0  # an excess over chance below this many standard errors is chance: 1 in 30 000
TRAIN = BatchFlag.TRAIN_LAST | BatchFlag.TRAIN_CO


def mix(values: npt.NDArray[Any]) -> U64Array:
    """The splitmix64 finaliser: equal in, equal out; sums of it tell sets apart."""
    z = values.astype(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def spans(offsets: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Positions of all words of lists that begin at ``offsets``, one list after another."""
    lengths = lengths.astype(np.int64)
    begin = np.repeat(offsets.astype(np.int64) - (np.cumsum(lengths) - lengths), lengths)
    return begin + np.arange(int(lengths.sum()), dtype=np.int64)


@dataclass(slots=True)
class Lists:
    """Sample lists of one journal by kind."""

    values: U64Array
    by_kind: Mapping[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]]

    def find(
        self, serials: npt.NDArray[Any], kind: ListKind
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Per serial: is there a list, its offset, its length."""
        known = self.by_kind.get(int(kind))
        if known is None or not len(serials):
            zeros = np.zeros(len(serials), dtype=np.int64)
            return np.zeros(len(serials), dtype=np.bool_), zeros, zeros
        names, offsets, lengths = known
        at = np.minimum(np.searchsorted(names, serials.astype(np.int64)), len(names) - 1)
        there = names[at] == serials
        return there, offsets[at], np.where(there, lengths[at], 0)


@dataclass(slots=True)
class Stream:
    """What one rank, or one replica, consumed, by optimizer step.

    Attributes:
        steps: int64, shape (S,); relative to the start of the attempt, ascending.
        order_S: uint64; digest of the samples in order.
        whole_S: bool; ``order_S`` rests on every byte (always so for indices).
        opaque_S: bool; some part of a batch could not be read.
        num_S: int64; samples as delivered, 0 = unknown.
        window: int64; position in ``steps`` of each sample of ``samples``.
        samples: uint64; only of steps whose lists are complete.
        listed_S: bool; the step's samples are in ``samples``.
        set_S: uint64; digest of the samples whatever their order; only where ``listed_S``.
    """

    steps: npt.NDArray[np.int64]
    order_S: U64Array
    whole_S: npt.NDArray[np.bool_]
    opaque_S: npt.NDArray[np.bool_]
    num_S: npt.NDArray[np.int64]
    window: npt.NDArray[np.int64]
    samples: U64Array
    listed_S: npt.NDArray[np.bool_]
    set_S: U64Array

    def __len__(self) -> int:
        return len(self.steps)


def _stream(
    steps: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    digests: U64Array,
    whole: npt.NDArray[np.bool_],
    opaque: npt.NDArray[np.bool_],
    nums: npt.NDArray[np.int64],
    found: tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64], npt.NDArray[np.int64]],
    values: U64Array,
) -> Stream:
    """Rows (batches or forwards, in order of delivery) -> one entry per step."""
    order = np.argsort(steps, kind="stable")
    steps, slots, digests, nums = steps[order], slots[order], digests[order], nums[order]
    whole, opaque = whole[order], opaque[order]
    there, offsets, lengths = found[0][order], found[1][order], found[2][order]
    names, first, inverse, counts = np.unique(steps, return_index=True, return_inverse=True, return_counts=True)
    num_steps = len(names)
    place = np.arange(len(steps)) - np.repeat(first, counts)  # position of the row inside its step
    salt = mix(slots.astype(np.uint64) * _GOLDEN)  # the same index of two loaders is two samples
    salt[slots == 0] = 0
    ordered = mix(digests ^ salt) + (place.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    order_S = np.zeros(num_steps, dtype=np.uint64)
    np.add.at(order_S, inverse, mix(ordered))
    taken = np.ones(num_steps, dtype=np.bool_)
    np.logical_and.at(taken, inverse, digests != 0)
    whole_S = np.ones(num_steps, dtype=np.bool_)
    np.logical_and.at(whole_S, inverse, whole)
    opaque_S = np.zeros(num_steps, dtype=np.bool_)
    np.logical_or.at(opaque_S, inverse, opaque)
    listed_S = np.ones(num_steps, dtype=np.bool_)
    np.logical_and.at(listed_S, inverse, there)
    num_S = np.bincount(inverse, weights=nums, minlength=num_steps).astype(np.int64)
    keep = listed_S[inverse] & taken[inverse]
    kept_lengths = np.where(keep, lengths, 0)
    samples = values[spans(offsets, kept_lengths)]
    sample_salt = np.repeat(salt, kept_lengths)
    samples = np.where(sample_salt == 0, samples, mix(samples ^ sample_salt))
    window = np.repeat(inverse, kept_lengths)
    set_S = np.zeros(num_steps, dtype=np.uint64)
    np.add.at(set_S, window, mix(samples))
    renumber = np.cumsum(taken) - 1
    return Stream(
        steps=names[taken],
        order_S=order_S[taken],
        whole_S=whole_S[taken],
        opaque_S=opaque_S[taken],
        num_S=num_S[taken],
        window=renumber[window],
        samples=samples,
        listed_S=listed_S[taken],
        set_S=set_S[taken],
    )


@dataclass(eq=False)
class RankView:
    """One rank in the judged attempt."""

    info: JournalInfo
    generation: int
    base_step: int
    batches: npt.NDArray[Any]
    forwards: npt.NDArray[Any]
    steps: npt.NDArray[Any]
    lists: Lists
    iterations: Mapping[int, IterationInfo]
    loaders: Mapping[int, LoaderInfo]
    training: tuple[int, ...]  # training iterations in order of the first batch
    slot_keys: Mapping[int, tuple[Any, ...]]  # training iteration -> its loader's key
    slots: dict[int, int] = field(default_factory=dict)  # training iteration -> slot, common to all ranks
    _streams: dict[Level, Stream] = field(default_factory=dict)

    def relative(self, steps: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Steps counted from the start of the attempt."""
        return steps.astype(np.int64) - self.base_step

    def training_rows(self) -> npt.NDArray[Any]:
        """Rows of BATCH that a backward and a step followed."""
        rows = self.batches
        chosen = (rows["step"] != NO_STEP) & ((rows["flags"] & int(TRAIN)) != 0)
        chosen &= np.isin(rows["iteration"], self.training)
        found: npt.NDArray[Any] = rows[chosen]
        return found

    def slot_of(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """The training loader's number, per row."""
        names = np.array(sorted(self.slots), dtype=np.int64)
        if not len(names):
            return np.zeros(len(rows), dtype=np.int64)
        numbers = np.array([self.slots[int(name)] for name in names], dtype=np.int64)
        return numbers[np.minimum(np.searchsorted(names, rows["iteration"]), len(names) - 1)]

    def stream(self, level: Level) -> Stream:
        """What this rank consumed, at ``level``."""
        if level not in self._streams:
            self._streams[level] = self._make_stream(level)
        return self._streams[level]

    def _make_stream(self, level: Level) -> Stream:
        if level is Level.L1:
            recorded = self.forwards[(self.forwards["flags"] & int(ForwardFlag.RECORDED)) != 0]
            recorded = recorded[recorded["step"] != NO_STEP]
            if len(recorded):
                return self._recorded(recorded)
        if level is Level.L3:
            rows = self.forwards
            flags = rows["flags"]
            rows = rows[
                (rows["step"] != NO_STEP)
                & ((flags & int(ForwardFlag.GRAD)) != 0)
                & ((flags & int(ForwardFlag.RECORDED)) == 0)
            ]
            flags = rows["flags"]
            return _stream(
                self.relative(rows["step"]),
                np.zeros(len(rows), dtype=np.int64),
                rows["content"].astype(np.uint64),
                ((flags & int(ForwardFlag.WINDOWED)) == 0) | ((flags & int(ForwardFlag.WHOLE)) != 0),
                (flags & int(ForwardFlag.OPAQUE)) != 0,
                rows["num_samples"].astype(np.int64),
                self.lists.find(rows["serial"], ListKind.INPUT),
                self.lists.values,
            )
        rows = self.training_rows()
        flags = rows["flags"]
        by_index = level is Level.L1
        return _stream(
            self.relative(rows["step"]),
            self.slot_of(rows),
            rows["index" if by_index else "content"].astype(np.uint64),
            np.ones(len(rows), dtype=np.bool_)
            if by_index
            else ((flags & int(BatchFlag.WINDOWED)) == 0) | ((flags & int(BatchFlag.WHOLE)) != 0),
            np.zeros(len(rows), dtype=np.bool_) if by_index else (flags & int(BatchFlag.OPAQUE)) != 0,
            rows["num_samples"].astype(np.int64),
            self.lists.find(rows["serial"], ListKind.INDEX if by_index else ListKind.DIGEST),
            self.lists.values,
        )

    def _recorded(self, rows: npt.NDArray[Any]) -> Stream:
        """Ids that the job itself named."""
        there, offsets, lengths = self.lists.find(rows["serial"], ListKind.RECORDED)
        rows, offsets, lengths = rows[there], offsets[there], lengths[there]
        ids = self.lists.values[spans(offsets, lengths)]
        starts = np.cumsum(lengths) - lengths
        place = np.arange(len(ids)) - np.repeat(starts, lengths)
        digests = np.zeros(len(rows), dtype=np.uint64)
        terms = mix(mix(ids) + (place.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
        np.add.at(digests, np.repeat(np.arange(len(rows)), lengths), terms)
        flat = np.ones(len(rows), dtype=np.bool_)
        return _stream(
            self.relative(rows["step"]),
            np.zeros(len(rows), dtype=np.int64),
            np.maximum(digests, np.uint64(1)),
            flat,
            ~flat,
            lengths,
            (flat, offsets, lengths),
            self.lists.values,
        )

    @cached_property
    def _by_iteration(self) -> tuple[npt.NDArray[Any], Mapping[int, tuple[int, int]]]:
        """Rows of BATCH, one iteration after another, and where each begins and ends."""
        return _grouped(self.batches)

    def rows_of(self, iteration: int) -> npt.NDArray[Any]:
        """Rows of one iteration, in order of their serial numbers."""
        rows, where = self._by_iteration
        begin, end = where.get(iteration, (0, 0))
        return rows[begin:end]

    @cached_property
    def steps_taken(self) -> npt.NDArray[np.int64]:
        """Relative numbers of this rank's optimizer steps, ascending, each once."""
        return np.unique(self.relative(self.steps["step"]))


# --------------------------------------------------------------------------- epochs


@dataclass(slots=True)
class Epoch:
    """One iteration of a training loader on one rank.

    Attributes:
        complete: the loop got every batch of the loader.
        samples: uint64, in order of delivery; ``None`` when a list is missing or there is none.
        workers: int64, loader worker of each sample; -1 unknown.
        ordinals: int64, batch of each sample.
        order: digest over all batches in order; ``None`` when one is missing.
        whole: every digest covers all bytes.
    """

    rank: int
    slot: int
    iteration: IterationInfo
    loader: LoaderInfo | None
    complete: bool
    num_batches: int
    num_samples: int
    first_step: int | None
    last_step: int | None
    samples: U64Array | None
    workers: npt.NDArray[np.int64]
    ordinals: npt.NDArray[np.int64]
    order: int | None
    whole: bool

    @property
    def last_batch(self) -> U64Array:
        """Samples of the last batch: padding can only lie there, or wrap into it."""
        if self.samples is None or not len(self.samples):
            return np.empty(0, dtype=np.uint64)
        last: U64Array = self.samples[self.ordinals == self.ordinals.max()]
        return last


def _complete(iteration: IterationInfo, loader: LoaderInfo | None, num_batches: int) -> bool:
    """Some loops take ``len(loader)`` batches and never ask for the one that is not there."""
    length = loader.length if loader is not None else None
    return iteration.finished or (length is not None and length > 0 and num_batches >= length)


def _grouped(batches: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Mapping[int, tuple[int, int]]]:
    rows = batches[np.argsort(batches["iteration"], kind="stable")]
    numbers, first, counts = np.unique(rows["iteration"], return_index=True, return_counts=True)
    where = {int(n): (int(a), int(a + c)) for n, a, c in zip(numbers, first, counts, strict=True)}
    return rows, where


def epoch_of(view: RankView, number: int, level: Level, *, with_samples: bool = True) -> Epoch:
    """Iteration ``number`` of a rank, with its samples at ``level`` (L1 or L2) where they are asked for."""
    info = view.iterations[number]
    loader = view.loaders.get(info.loader)
    rows = view.rows_of(number)
    rows = rows[np.argsort(rows["ordinal"], kind="stable")]
    by_index = level is Level.L1
    digests = rows["index" if by_index else "content"].astype(np.uint64)
    there, offsets, lengths = view.lists.find(rows["serial"], ListKind.INDEX if by_index else ListKind.DIGEST)
    num_batches = max(info.num_batches, len(rows))
    all_rows = len(rows) == num_batches and num_batches > 0
    listed = with_samples and all_rows and bool(there.all())
    order: int | None = None
    if all_rows and bool((digests != 0).all()):
        place = np.arange(1, len(rows) + 1, dtype=np.uint64) * _GOLDEN
        order = int(np.sum(mix(mix(digests) + place), dtype=np.uint64))
    used = rows["step"][rows["step"] != NO_STEP]
    flags = rows["flags"]
    return Epoch(
        rank=view.info.rank,
        slot=view.slots.get(number, 0),
        iteration=info,
        loader=loader,
        complete=_complete(info, loader, num_batches),
        num_batches=num_batches,
        num_samples=max(info.num_samples, int(rows["num_samples"].sum())),
        first_step=int(used.min()) if len(used) else None,
        last_step=int(used.max()) if len(used) else None,
        samples=view.lists.values[spans(offsets, lengths)] if listed else None,
        workers=np.repeat(rows["worker"].astype(np.int64), lengths) if listed else np.empty(0, np.int64),
        ordinals=np.repeat(rows["ordinal"].astype(np.int64), lengths) if listed else np.empty(0, np.int64),
        order=order,
        whole=by_index
        or bool((((flags & int(BatchFlag.WINDOWED)) == 0) | ((flags & int(BatchFlag.WHOLE)) != 0)).all()),
    )


# --------------------------------------------------------------------------- attempts


def _launches(journals: Sequence[JournalInfo]) -> dict[int, int]:
    """Journal -> number of the launch: the same rank and restart a second time is another launch."""
    seen: dict[tuple[int, int], int] = {}
    launch: dict[int, int] = {}
    for info in sorted(journals, key=lambda item: (item.start, item.journal)):
        key = (info.rank, info.restart)
        launch[info.journal] = seen.get(key, 0)
        seen[key] = launch[info.journal] + 1
    return launch


def _rows_of(evidence: Evidence, name: str, journal: int) -> npt.NDArray[Any]:
    """Rows of a journal; tables are sorted by journal, whose numbers follow the rank."""
    keys = getattr(evidence, f"{name}_key")[:, 1]
    begin, end = np.searchsorted(keys, [journal, journal + 1])
    rows: npt.NDArray[Any] = getattr(evidence, name)[begin:end]
    return rows


def _lists_of(evidence: Evidence, journal: int) -> Lists:
    names = evidence.lists["journal"]
    begin, end = np.searchsorted(names, [journal, journal + 1])
    mine = evidence.lists[begin:end]
    by_kind = {}
    for kind in np.unique(mine["kind"]):
        rows = mine[mine["kind"] == kind]
        by_kind[int(kind)] = (
            rows["serial"].astype(np.int64),
            rows["offset"].astype(np.int64),
            rows["length"].astype(np.int64),
        )
    return Lists(values=evidence.list_values, by_kind=by_kind)


def _training_iterations(batches: npt.NDArray[Any]) -> tuple[int, ...]:
    """An iteration trains when a batch of it was the newest before a backward, or a helper of
    that in two steps (or in the one step that a single batch can have)."""
    found: list[tuple[int, int]] = []
    sorted_rows, where = _grouped(batches)
    for number, (begin, end) in where.items():
        rows = sorted_rows[begin:end]
        flags = rows["flags"]
        with_co = len(np.unique(rows["step"][(flags & int(BatchFlag.TRAIN_CO)) != 0]))
        if (flags & int(BatchFlag.TRAIN_LAST)).any() or with_co >= 2 or (with_co == 1 and len(rows) == 1):
            found.append((int(rows["serial"].min()), number))
    return tuple(number for _, number in sorted(found))


def _slot_keys(
    batches: npt.NDArray[Any],
    training: Sequence[int],
    iterations: Mapping[int, IterationInfo],
    loaders: Mapping[int, LoaderInfo],
) -> dict[int, tuple[Any, ...]]:
    """Which training iterations are epochs of one loader.

    Loaders built at one place, each used up before the next begins, are epochs of one loader that
    is built anew; when they alternate, or read another data set, they are loaders of their own.
    """
    by_site: dict[tuple[Any, ...], list[int]] = {}
    for number in training:
        loader = loaders.get(iterations[number].loader)
        place = loader.location if loader is not None else None
        by_site.setdefault((place.file, place.line) if place is not None else ("", 0), []).append(number)
    keys: dict[int, tuple[Any, ...]] = {}
    sorted_rows, where = _grouped(batches)
    for site, numbers in by_site.items():
        serials = {n: sorted_rows["serial"][slice(*where[n])] for n in numbers}
        sequence = [iterations[n].loader for n in numbers]
        blocks = [name for k, name in enumerate(sequence) if k == 0 or sequence[k - 1] != name]
        apart = all(
            sequence[k] == sequence[k - 1] or serials[a].max() < serials[b].min()
            for k, (a, b) in enumerate(pairwise(numbers), start=1)
        )
        rebuilt = len(blocks) == len(set(blocks)) and apart
        kinds: list[tuple[Any, ...]] = []
        for number in numbers:
            loader = loaders.get(iterations[number].loader)
            data = (loader.dataset_class, loader.dataset_length) if loader is not None else (None, None)
            kind = data if rebuilt else (*data, iterations[number].loader)
            if kind not in kinds:
                kinds.append(kind)
            keys[number] = (*site, kinds.index(kind))
    return keys


def _number_slots(ranks: Iterable[RankView]) -> None:
    """Give the training loaders of all ranks common numbers: by place, else by order."""
    reference: list[tuple[Any, ...]] | None = None
    for view in ranks:
        mine = list(dict.fromkeys(view.slot_keys[number] for number in view.training))
        if reference is None:
            reference = mine
        number_of = {key: reference.index(key) for key in mine if key in reference}
        free = [k for k in range(len(reference) + len(mine)) if k not in number_of.values()]
        for key in mine:
            if key not in number_of:
                number_of[key] = free.pop(0)
        view.slots = {number: number_of[view.slot_keys[number]] for number in view.training}


# --------------------------------------------------------------------------- groups


@dataclass(eq=False)
class EpochSet:
    """One complete epoch of one training loader over all replicas of a group."""

    number: int
    slot: int
    parts: tuple[Epoch, ...]  # one per replica
    length: int | None  # of the data set, where every replica says the same
    padding: int  # further reads that known or likely padding explains
    padding_known: bool
    step: int | None
    by_content: bool = False  # samples are told apart by content: rows that are equal in the data look alike

    @property
    def samples(self) -> list[U64Array]:
        """Per replica; empty where a list is missing."""
        return [part.samples if part.samples is not None else np.empty(0, np.uint64) for part in self.parts]

    @cached_property
    def counts(self) -> Coverage:
        """Who read what."""
        return coverage(self.samples, pairs=False)


@dataclass(slots=True)
class StepShare:
    """Overlap inside optimizer steps, chance taken off."""

    fraction: float
    num_steps: int
    overlap: int
    chance: float
    total: int


@dataclass(eq=False)
class Group:
    """Replicas whose gradients belong together."""

    view: View
    replicas: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return tuple(sorted(rank for replica in self.replicas for rank in replica))

    @property
    def readers(self) -> tuple[RankView, ...]:
        """The first rank of each replica."""
        return tuple(self.view.ranks[replica[0]] for replica in self.replicas)

    # ---- level

    def _streams(self, level: Level) -> tuple[Stream, ...]:
        return tuple(_joined([self.view.ranks[rank].stream(level) for rank in replica]) for replica in self.replicas)

    @cached_property
    def by_level(self) -> Mapping[Level, tuple[Stream, ...]]:
        """Streams of all replicas at each data level."""
        return {level: self._streams(level) for level in (Level.L1, Level.L2, Level.L3)}

    @cached_property
    def index_space(self) -> tuple[bool | None, str]:
        """Does index k mean the same sample on all replicas? ``None`` = cannot be told."""
        return _index_space(self)

    @cached_property
    def stable_content(self) -> bool:
        """On every replica an index that came again gave the same content again: no augmentation."""
        return all(_digests_by_index(reader)[2] for reader in self.readers)

    @cached_property
    def level(self) -> tuple[Level | None, str | None]:
        """The level the data checks rest on, or why there is none."""
        if self.unknown is not None:
            return None, self.unknown
        level, why = self._level()
        if level in (Level.L1, Level.L2) and self._remade(level):
            return None, (
                "the ranks get equal batches and feed the model other inputs of another size: parts of each sample, "
                "or what is generated from it. Name the axes, for instance --mesh cp=2, or call "
                "ddp_audit.record_samples(ids) with what counts as a sample"
            )
        return level, why

    @cached_property
    def unknown(self) -> str | None:
        """Why it cannot be told which ranks hold copies of the model; ``None`` = it can."""
        if self.view.layout.unknown is not None:
            return self.view.layout.unknown
        level = self._level()[0]
        if level is not None and self._split_by_hand(level):
            return (
                "ranks that read the same data start from different parameters, have no wrapper and talk to each "
                "other: this may be a model split by hand; name the axes, for instance --mesh tp=2"
            )
        return None

    def _split_by_hand(self, level: Level) -> bool:
        """Looks like parts of one model: ranks with equal data and unequal parameters and gradients, which talk.

        Only some ranks need to read alike: a model in two parts, copied twice, is two such pairs.
        """
        infos = [reader.info for reader in self.readers]
        if len(infos) < 2 or any(info.wrappers or not info.num_other_collectives for info in infos):
            return False
        together = self.alike(level)
        return bool(together) and all(self._parts([infos[n] for n in members]) for members in together)

    def alike(self, level: Level) -> list[list[int]]:
        """Positions of replicas that have the same samples at every common step, where there are several."""
        streams = self.by_level[level]
        steps = _common(streams)
        if not len(steps):
            return []
        alike: dict[bytes, list[int]] = {}
        for number, stream in enumerate(streams):
            alike.setdefault(stream.order_S[np.searchsorted(stream.steps, steps)].tobytes(), []).append(number)
        return [members for members in alike.values() if len(members) > 1]

    @property
    def all_alike(self) -> bool:
        """All replicas have the same samples at every common step."""
        level = self.level[0]
        return level is not None and [len(members) for members in self.alike(level)] == [len(self.replicas)]

    def _remade(self, level: Level) -> bool:
        """Ranks that read alike feed the model inputs that differ, and are no batch of the loader by their size.

        Context parallelism and generation look so. Noise on equal batches keeps the size: that is a fault.
        """
        streams = self.by_level[Level.L3]
        steps = _common(streams)
        together = self.alike(level)
        if not together or len(steps) < MIN_STEPS:
            return False
        for members in together:
            orders = [streams[n].order_S[np.searchsorted(streams[n].steps, steps)] for n in members]
            if any(bool((one == other).any()) for one, other in combinations(orders, 2)):
                return False
            for number in members:
                rows = self.readers[number].forwards
                rows = rows[np.isin(self.readers[number].relative(rows["step"]), steps)]
                rows = rows[(rows["flags"] & int(ForwardFlag.HAS_DIGESTS)) != 0]
                if not bool(((rows["flags"] & int(ForwardFlag.RESIZED)) != 0).all()):
                    return False
        return True

    def _parts(self, members: Sequence[JournalInfo]) -> bool:
        """They start from different parameters, and share no gradients as unlike copies would."""
        first = [info.parameters[0].values_digest if info.parameters else None for info in members]
        if None in first or len(set(first)) == 1:
            return False
        ranks = [info.rank for info in members]
        gradients = [self.view.sync.gradients(ranks, number) for number in self.view.sync.optimizers(ranks)]
        return not any(2 * int(compared.equal_S.sum()) > len(compared.steps) for compared in gradients)

    def _level(self) -> tuple[Level | None, str | None]:
        counts = {level: len(_common(streams)) for level, streams in self.by_level.items()}
        wanted = self.view.num_common_steps
        sliced = self._sliced()
        if sliced and counts[Level.L3] >= min(MIN_STEPS, wanted):
            return Level.L3, None
        comparable, why = self.index_space
        if not sliced and counts[Level.L1] and counts[Level.L1] >= 0.9 * wanted and comparable:
            return Level.L1, None
        for level in (Level.L2, Level.L3):
            if level is Level.L2 and sliced:
                continue
            if counts[level] >= min(MIN_STEPS, max(1, wanted)):
                return level, None
        if counts[Level.L1] and not comparable:
            return None, why
        best = max((Level.L2, Level.L3), key=lambda item: counts[item])
        if counts[best]:
            return best, None
        return None, "no batch, index or model input was seen on every replica"

    def _sliced(self) -> bool:
        """The job cuts batches after the loader: the model gets clearly fewer samples than any loader gave."""
        for reader, narrow in zip(self.readers, self.by_level[Level.L3], strict=True):
            rows = reader.training_rows()
            rows = rows[np.isin(reader.relative(rows["step"]), narrow.steps)]
            used = int(narrow.num_S[np.isin(narrow.steps, reader.relative(rows["step"]))].sum())
            came = np.bincount(reader.slot_of(rows), weights=rows["num_samples"])
            came = came[came > 0]
            if used and len(came) and used <= 0.75 * float(came.min()):
                return True
        return False

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        """Streams at the chosen level; empty when there is none."""
        level = self.level[0]
        return () if level is None else self.by_level[level]

    @cached_property
    def common_steps(self) -> npt.NDArray[np.int64]:
        """Relative steps at which every replica has samples at the chosen level."""
        return _common(self.streams)

    # ---- epochs

    @cached_property
    def epoch_parts(self) -> tuple[tuple[Epoch, ...], ...]:
        """Per replica, its training iterations in order, at the chosen level (L1 where it is L3)."""
        level = self.level[0]
        if level is None or level is Level.L3:
            return tuple(() for _ in self.replicas)
        return tuple(tuple(epoch_of(reader, number, level) for number in reader.training) for reader in self.readers)

    @cached_property
    def epochs(self) -> tuple[EpochSet, ...]:
        """Epochs that every replica completed, with all sample lists."""
        level = self.level[0]
        if level is None:
            return ()
        found: list[EpochSet] = []
        for slot in sorted({part.slot for parts in self.epoch_parts for part in parts}):
            mine = [[part for part in parts if part.slot == slot] for parts in self.epoch_parts]
            for number in range(min(len(parts) for parts in mine)):
                row = tuple(parts[number] for parts in mine)
                if all(part.complete and part.samples is not None and len(part.samples) for part in row):
                    found.append(_epoch_set(number, slot, row, by_content=level is not Level.L1))
        if not found:
            found = list(_implicit_epochs(self))
        return tuple(found)

    @cached_property
    def samplers(self) -> tuple[SamplerInfo, ...]:
        """Sampler chain of the first training loader, as the first replica held it."""
        for reader in self.readers:
            for number in reader.training:
                return reader.iterations[number].samplers
        return ()

    @cached_property
    def with_replacement(self) -> bool:
        """Sampling with replacement, or without an end: no epoch can be judged."""
        if not self.epochs:
            return True
        for item in self.epochs:
            for part in item.parts:
                if any(s.replacement for s in part.iteration.samplers):
                    return True
                assert part.samples is not None
                repeats = len(part.samples) - len(distinct(part.samples))
                if repeats > max(len(part.last_batch), item.padding):
                    return True
        return False

    # ---- the measure

    @cached_property
    def step_share(self) -> StepShare | None:
        """``distinct_fraction`` over optimizer steps; ``None`` without comparable samples."""
        if len(self.replicas) == 1:
            return StepShare(fraction=1.0, num_steps=len(self.common_steps), overlap=0, chance=0.0, total=0)
        return _step_share(self)

    @cached_property
    def epoch_fraction(self) -> float | None:
        """``distinct_fraction`` over finished epochs; ``None`` where none can be judged."""
        if len(self.replicas) == 1:
            return 1.0
        if self.with_replacement:
            return None
        union = total = 0
        for item in self.epochs:
            counts = item.counts
            explained = explained_padding(item)
            overlap = max(0, counts.num_overlap - explained)
            union += counts.num_union
            total += counts.num_union + overlap
        return union / total if total else None

    @property
    def location(self) -> Location | None:
        """Where the training loader was built."""
        for reader in self.readers:
            for number in reader.training:
                loader = reader.loaders.get(reader.iterations[number].loader)
                if loader is not None and loader.location is not None:
                    return loader.location
        return None

    @property
    def loader(self) -> LoaderInfo | None:
        """The training loader of the first replica that has one."""
        for reader in self.readers:
            for number in reader.training:
                loader = reader.loaders.get(reader.iterations[number].loader)
                if loader is not None:
                    return loader
        return None

    def whole_agree(self, samples: Sequence[U64Array]) -> bool:
        """Do digests that cover windows only stand the test where all bytes were hashed too?

        True when no windowed digest is involved. Else, samples that two replicas share by their
        windowed digests and of which both have a whole one must agree, and there must be some.
        """
        level = self.level[0]
        if level is not Level.L2:
            return level is Level.L1 or all(bool(stream.whole_S.all()) for stream in self.streams)
        tables = [whole_table(reader) for reader in self.readers]
        if all(table is None for table in tables):
            return True
        agree = compared = 0
        for a in range(len(tables)):
            for b in range(a):
                left, right = tables[a], tables[b]
                if left is None or right is None:
                    continue
                shared, i, j = np.intersect1d(left[0], right[0], return_indices=True)
                shared_too = np.isin(shared, samples[a]) & np.isin(shared, samples[b])
                compared += int(shared_too.sum())
                agree += int((left[1][i] == right[1][j])[shared_too].sum())
        return compared > 0 and agree >= 0.95 * compared


def whole_table(view: RankView) -> tuple[U64Array, U64Array] | None:
    """Windowed digest -> whole digest, of samples that have both; ``None`` without windowed ones."""
    rows = view.batches[(view.batches["flags"] & int(BatchFlag.WINDOWED)) != 0]
    if not len(rows):
        return None
    a, a_at, a_len = view.lists.find(rows["serial"], ListKind.DIGEST)
    b, b_at, b_len = view.lists.find(rows["serial"], ListKind.WHOLE)
    both = a & b & (a_len == b_len)
    windowed = view.lists.values[spans(a_at[both], a_len[both])]
    whole = view.lists.values[spans(b_at[both], b_len[both])]
    windowed, first = np.unique(windowed, return_index=True)
    return windowed, whole[first]


def _joined(streams: Sequence[Stream]) -> Stream:
    """The ranks of one replica: samples of all, the order of the first that reads."""
    reading = [stream for stream in streams if len(stream)]
    if not reading:
        return streams[0]
    first = reading[0]
    different = [s for s in reading[1:] if not (len(s) == len(first) and bool((s.order_S == first.order_S).all()))]
    if not different:
        return first
    steps = np.unique(np.concatenate([first.steps, *(s.steps for s in different)]))
    full = [first, *different]
    order_S = np.zeros(len(steps), dtype=np.uint64)
    whole_S = np.ones(len(steps), dtype=np.bool_)
    opaque_S = np.zeros(len(steps), dtype=np.bool_)
    listed_S = np.ones(len(steps), dtype=np.bool_)
    num_S = np.zeros(len(steps), dtype=np.int64)
    windows, samples = [], []
    for stream in full:
        at = np.searchsorted(steps, stream.steps)
        order_S[at] += stream.order_S
        whole_S[at] &= stream.whole_S
        opaque_S[at] |= stream.opaque_S
        listed_S[at] &= stream.listed_S
        num_S[at] += stream.num_S
        windows.append(at[stream.window])
        samples.append(stream.samples)
    window, values = np.concatenate(windows), np.concatenate(samples)
    keep = listed_S[window]
    window, values = window[keep], values[keep]
    pairs = np.unique(np.stack([window.astype(np.uint64), values], axis=1), axis=0)
    window, values = pairs[:, 0].astype(np.int64), pairs[:, 1]
    set_S = np.zeros(len(steps), dtype=np.uint64)
    np.add.at(set_S, window, mix(values))
    return Stream(steps, order_S, whole_S, opaque_S, num_S, window, values, listed_S, set_S)


def _common(streams: Sequence[Stream]) -> npt.NDArray[np.int64]:
    if not streams:
        return np.empty(0, dtype=np.int64)
    steps = streams[0].steps
    for stream in streams[1:]:
        steps = np.intersect1d(steps, stream.steps)
    return steps


def _digests_by_index(view: RankView) -> tuple[U64Array, U64Array, bool]:
    """(index, content) of the first 64 batches that have both, and whether the same index always
    gave the same content on this rank (False also when no index came twice)."""
    flags = view.batches["flags"]
    both = (flags & int(BatchFlag.HAS_INDEX)) != 0
    both &= (flags & int(BatchFlag.HAS_DIGESTS)) != 0
    both &= np.isin(view.batches["iteration"], view.training)
    rows = view.batches[both]
    a, a_at, a_len = view.lists.find(rows["serial"], ListKind.INDEX)
    b, b_at, b_len = view.lists.find(rows["serial"], ListKind.DIGEST)
    good = np.flatnonzero(a & b & (a_len == b_len))[:64]
    index = view.lists.values[spans(a_at[good], a_len[good])]
    content = view.lists.values[spans(b_at[good], b_len[good])]
    names, first, counts = np.unique(index, return_index=True, return_counts=True)
    again = np.isin(index, names[counts > 1])
    same = content[first][np.searchsorted(names, index)] == content
    deterministic = bool(again.any()) and bool(same[again].all())
    return names, content[first], deterministic


def _index_space(group: Group) -> tuple[bool | None, str]:
    readers = [reader for reader in group.readers if reader.training]
    recorded = all(bool(((r.forwards["flags"] & int(ForwardFlag.RECORDED)) != 0).any()) for r in group.readers)
    if recorded:
        return True, ""  # the job names its samples itself
    if len(readers) < len(group.replicas):
        return None, "not every replica has a loader with indices"
    tables = [_digests_by_index(reader) for reader in readers]
    compared = equal = 0
    for a in range(len(tables)):
        for b in range(a):
            shared, i, j = np.intersect1d(tables[a][0], tables[b][0], return_indices=True)
            compared += len(shared)
            equal += int((tables[a][1][i] == tables[b][1][j]).sum())
    if compared and equal >= 0.5 * compared:
        return True, ""
    if compared and equal <= 0.1 * compared and all(table[2] for table in tables):
        return False, "the same index is another sample on each replica, and the content does not settle it"
    loaders = [r.loaders.get(r.iterations[r.training[0]].loader) for r in readers]
    first = loaders[0]
    if first is None or any(loader is None for loader in loaders):
        return None, "no facts about the data set were found"
    lengths = {loader.dataset_length for loader in loaders if loader is not None}
    if len(lengths) > 1:
        return False, "the replicas' data sets differ in length, so equal indices are different samples"
    names = {(loader.dataset_class, loader.dataset_digest) for loader in loaders if loader is not None}
    if len(names) == 1 and first.dataset_digest is not None:
        return True, ""
    if len({loader.dataset_digest for loader in loaders if loader is not None}) > 1:
        return None, "the replicas hold different data sets, or fields of their own, and the content does not settle it"
    if len(names) == 1 and _rank_aware(readers):
        return True, ""  # a sampler that deals indices out by rank presupposes one data set
    return None, "the data set shows nothing by which replicas could be compared"


def _rank_aware(readers: Sequence[RankView]) -> bool:
    """Every replica's sampler chain holds a rank of its own in a world of several."""
    ranks = []
    for reader in readers:
        chain = reader.iterations[reader.training[0]].samplers
        mine = [s.rank for s in chain if s.rank is not None and (s.num_replicas or 1) > 1]
        if not mine:
            return False
        ranks.append(mine[0])
    return len(set(ranks)) == len(ranks)


# --------------------------------------------------------------------------- epochs of a group


def _epoch_set(number: int, slot: int, parts: tuple[Epoch, ...], *, by_content: bool) -> EpochSet:
    lengths = {part.loader.dataset_length if part.loader is not None else None for part in parts}
    length = next(iter(lengths)) if len(lengths) == 1 else None
    largest = max(len(part.last_batch) for part in parts)
    padding, known = largest * len(parts), False
    for sampler in parts[0].iteration.samplers:
        if sampler.total_size is not None and sampler.num_replicas and length is not None:
            padding, known = max(0, sampler.total_size - length), True
    if any(s.even_batches for s in parts[0].iteration.samplers):
        padding, known = largest * len(parts), False
    return EpochSet(
        number=number,
        slot=slot,
        parts=parts,
        length=length,
        padding=padding,
        padding_known=known,
        step=parts[0].first_step,
        by_content=by_content,
    )


def _equal_rows(item: EpochSet) -> int:
    """Further reads that rows of equal content explain.

    Dealt out at random over R replicas, equal rows meet on two replicas R - 1 times as often as
    on one and the same; pairs beyond that are samples that were really read twice.
    """
    values = np.concatenate(item.samples)
    owners = np.repeat(np.arange(len(item.samples)), [len(part) for part in item.samples])
    order = np.lexsort((owners, values))
    values, owners = values[order], owners[order]
    fresh = np.ones(len(values), dtype=np.bool_)
    fresh[1:] = values[1:] != values[:-1]
    runs = np.ones(len(values), dtype=np.bool_)
    runs[1:] = fresh[1:] | (owners[1:] != owners[:-1])
    times = np.diff(np.append(np.flatnonzero(fresh), len(values))).astype(np.float64)
    times_own = np.diff(np.append(np.flatnonzero(runs), len(values))).astype(np.float64)
    inside = float((times_own * (times_own - 1) / 2).sum())
    across = float((times * (times - 1) / 2).sum()) - inside
    if across <= 0:
        return 0
    return int(item.counts.num_overlap * min(1.0, (len(item.samples) - 1) * inside / across))


def explained_padding(item: EpochSet) -> int:
    """Further reads of this epoch that padding explains.

    A known sampler pads by a known number. Otherwise only rows of the last batches can be padding,
    and only where no replica walks the whole set: then there is nothing to pad.
    """
    counts = item.counts
    explained = _equal_rows(item) if item.by_content else 0
    if item.padding_known:
        return min(counts.num_overlap, item.padding + explained)
    if int(counts.num_distinct_R.max()) >= 0.95 * counts.num_union:
        return 0
    for a, part in enumerate(item.parts):
        others = [s for b, s in enumerate(item.samples) if b != a]
        explained += int(np.isin(np.unique(part.last_batch), np.concatenate(others)).sum())
    return min(counts.num_overlap, explained)


def _blocks(values_SR: U64Array) -> list[U64Array]:
    """Equal blocks of rows, two or more, each of distinct samples, all of the same set; empty where there are none."""
    flat = values_SR.reshape(-1)
    _, first = np.unique(flat, return_index=True)
    again = np.ones(len(flat), dtype=np.bool_)
    again[first] = False
    if not again.any():
        return []
    size, rest = divmod(int(np.flatnonzero(again)[0]), values_SR.shape[1])
    if rest or size < MIN_STEPS or len(values_SR) < 2 * size:
        return []
    blocks = [values_SR[k : k + size] for k in range(0, len(values_SR) - size + 1, size)]
    reference = np.sort(blocks[0], axis=None)
    return blocks if all(np.array_equal(np.sort(block, axis=None), reference) for block in blocks) else []


def _implicit_epochs(group: Group) -> Iterable[EpochSet]:
    """Hand-written loops have no iterator that ends: find epochs in the stream itself.

    Where each replica's stream falls into two or more blocks of equal length, each of distinct
    samples and all of the same set, the blocks are epochs. Where no replica repeats itself like
    that, but all replicas together do (shards that change from epoch to epoch), likewise.
    """
    if group.level[0] is None or len(group.common_steps) < MIN_STEPS:
        return
    values_R: list[U64Array] = []
    for stream in group.streams:
        if not bool(stream.listed_S.all()) or not bool(stream.whole_S.all()) or not len(stream.samples):
            return
        values_R.append(stream.samples[np.argsort(stream.window, kind="stable")])
    apart = [_blocks(values[:, None]) for values in values_R]
    if all(apart):
        blocks = [[block[:, 0] for block in mine] for mine in apart]
    elif len({len(values) for values in values_R}) == 1:
        together = _blocks(np.stack(values_R, axis=1))
        blocks = [[block[:, replica] for block in together] for replica in range(len(values_R))]
    else:
        return
    if not blocks[0]:
        return
    sizes = {len(mine[0]) for mine in blocks}
    if len(sizes) != 1:
        return
    for number in range(min(len(mine) for mine in blocks)):
        parts = []
        for replica, mine in zip(group.replicas, blocks, strict=True):
            values = mine[number]
            order = int(np.sum(mix(values + np.arange(len(values), dtype=np.uint64) * _GOLDEN), dtype=np.uint64))
            parts.append(
                Epoch(
                    rank=replica[0],
                    slot=0,
                    iteration=IterationInfo(
                        iteration=number,
                        loader=-1,
                        samplers=(),
                        dataset_epoch=None,
                        num_set_epoch_calls=0,
                        finished=True,
                    ),
                    loader=None,
                    complete=True,
                    num_batches=0,
                    num_samples=len(values),
                    first_step=None,
                    last_step=None,
                    samples=values,
                    workers=np.full(len(values), -1, dtype=np.int64),
                    ordinals=np.arange(len(values), dtype=np.int64),
                    order=order,
                    whole=True,
                )
            )
        yield EpochSet(number=number, slot=0, parts=tuple(parts), length=None, padding=0, padding_known=True, step=None)


# --------------------------------------------------------------------------- overlap by step


def _step_share(group: Group) -> StepShare | None:
    steps = group.common_steps
    if not len(steps):
        return None
    for stream in group.streams:
        steps = np.intersect1d(steps, stream.steps[stream.listed_S])
    if not len(steps):
        return None
    per_step = sum(int(stream.num_S.sum()) / max(1, len(stream)) for stream in group.streams)
    stride = max(1, int(np.ceil(len(steps) * per_step * (1 + len(LAGS)) / MAX_WINDOW_SAMPLES)))
    num = len(steps)
    own: list[tuple[npt.NDArray[np.int64], U64Array]] = []
    for stream in group.streams:
        at = np.full(len(stream), -1, dtype=np.int64)
        _, i, j = np.intersect1d(stream.steps, steps, return_indices=True)
        at[i] = j
        window = at[stream.window]
        keep = window >= 0
        own.append((window[keep], stream.samples[keep]))

    def overlap_at(lag: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        windows, samples = [], []
        for replica, (window, values) in enumerate(own):
            moved = (window + lag * replica) % num
            if stride > 1:
                keep = moved % stride == 0
                moved, values = moved[keep] // stride, values[keep]
            windows.append(moved)
            samples.append(values)
        return window_counts(windows, samples, -(-num // stride))

    union, total = overlap_at(0)
    overlap_S = total - union
    if not int(total.sum()):
        return None
    overlap = int(overlap_S.sum()) - _step_padding(group, steps, overlap_S, stride)
    chance = 0.0
    if overlap and num > len(LAGS):
        # chance only counts where unequal steps are other samples: not for one batch over and over
        chance = float(np.median([int((t - u).sum()) for u, t in map(overlap_at, LAGS)]))
    if chance and (overlap - chance) < SIGNIFICANT_Z * np.sqrt(max(chance, 1.0)):
        excess = 0.0
    else:
        # on a scale where chance is no loss, and equal batches on all replicas are the whole loss
        most = int(total.sum()) * (1.0 - 1.0 / len(group.replicas))
        excess = max(0.0, overlap - chance)
        excess *= most / (most - chance) if most > chance else 1.0
        excess = min(excess, most)
    return StepShare(
        fraction=1.0 - excess / int(total.sum()),
        num_steps=len(union),
        overlap=max(0, overlap),
        chance=chance,
        total=int(total.sum()),
    )


def _step_padding(group: Group, steps: npt.NDArray[np.int64], overlap_S: npt.NDArray[np.int64], stride: int) -> int:
    """Overlap in the last step of finished epochs that known padding explains."""
    if stride > 1:
        return 0
    explained = 0
    base = group.readers[0].base_step
    for item in group.epochs:
        last = item.parts[0].last_step
        if not item.padding_known or last is None or item.padding == 0:
            continue
        at = int(np.searchsorted(steps, last - base))
        if at < len(steps) and steps[at] == last - base:
            explained += min(int(overlap_S[at]), item.padding)
    return explained


# --------------------------------------------------------------------------- the view


class View:
    """The judged attempt of one job."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self._launch = _launches(evidence.journals)
        self._keys = self._attempt_keys()
        self._chosen = self._choose()

    # ---- attempts

    def _attempt_keys(self) -> list[tuple[int, int, int]]:
        """(launch, restart, generation) of each attempt, in order of time."""
        starts: dict[tuple[int, int], float] = {}
        generations: dict[tuple[int, int], set[int]] = {}
        for info in self.evidence.journals:
            key = (self._launch[info.journal], info.restart)
            starts[key] = min(starts.get(key, info.start), info.start)
            stepped = {int(g) for g in np.unique(_rows_of(self.evidence, "steps", info.journal)["generation"])}
            generations.setdefault(key, set()).update(stepped)
        ordered = sorted(starts, key=lambda key: (starts[key], key))
        return [(*key, generation) for key in ordered for generation in sorted(generations[key] or {0})]

    def _members(self, key: tuple[int, int, int]) -> list[JournalInfo]:
        launch, restart, generation = key
        found = []
        for info in self.evidence.journals:
            if self._launch[info.journal] != launch or info.restart != restart:
                continue
            steps = _rows_of(self.evidence, "steps", info.journal)
            if not len(steps) or bool((steps["generation"] == generation).any()):
                found.append(info)
        return found

    def _num_common(self, key: tuple[int, int, int]) -> int:
        common: npt.NDArray[Any] | None = None
        for info in self._members(key):
            steps = _rows_of(self.evidence, "steps", info.journal)
            mine = np.unique(steps["step"][steps["generation"] == key[2]].astype(np.int64))
            mine = mine - (mine.min() if len(mine) and key[2] else 0)
            common = mine if common is None else np.intersect1d(common, mine)
        return 0 if common is None else len(common)

    def _choose(self) -> tuple[int, int, int] | None:
        enough = [key for key in self._keys if self._num_common(key) >= MIN_STEPS]
        if enough:
            return enough[-1]
        return self._keys[-1] if self._keys else None

    @cached_property
    def attempts(self) -> tuple[Attempt, ...]:
        """All attempts; one is marked as judged."""
        return tuple(
            Attempt(
                restart=key[1],
                generation=key[2],
                ranks=tuple(sorted({info.rank for info in self._members(key)})),
                num_common_steps=self._num_common(key),
                judged=key == self._chosen,
            )
            for key in self._keys
        )

    # ---- ranks

    @cached_property
    def ranks(self) -> Mapping[int, RankView]:
        """The ranks of the judged attempt, ascending."""
        if self._chosen is None:
            return {}
        views = {info.rank: self._rank_view(info, self._chosen[2]) for info in self._members(self._chosen)}
        views = dict(sorted(views.items()))
        _number_slots(views.values())
        return views

    def _rank_view(self, info: JournalInfo, generation: int) -> RankView:
        steps = _rows_of(self.evidence, "steps", info.journal)
        serials = steps["serial"].astype(np.int64)
        mine = steps[steps["generation"] == generation]

        def during(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
            """Rows belong to the generation of the step that follows them."""
            if not len(steps) or bool((steps["generation"] == generation).all()):
                return rows
            at = np.minimum(np.searchsorted(serials, rows["serial"].astype(np.int64)), len(steps) - 1)
            kept: npt.NDArray[Any] = rows[steps["generation"][at] == generation]
            return kept

        batches = during(_rows_of(self.evidence, "batches", info.journal))
        iterations = {item.iteration: item for item in info.iterations}
        for number in np.unique(batches["iteration"]):  # an event may be lost with a damaged frame
            iterations.setdefault(
                int(number),
                IterationInfo(iteration=int(number), loader=-1, samplers=(), dataset_epoch=None, num_set_epoch_calls=0),
            )
        loaders = {item.loader: item for item in info.loaders}
        training = _training_iterations(batches)
        return RankView(
            info=info,
            generation=generation,
            base_step=int(mine["step"].min()) if len(mine) and generation else 0,
            batches=batches,
            forwards=during(_rows_of(self.evidence, "forwards", info.journal)),
            steps=mine,
            lists=_lists_of(self.evidence, info.journal),
            iterations=iterations,
            loaders=loaders,
            training=training,
            slot_keys=_slot_keys(batches, training, iterations, loaders),
        )

    @cached_property
    def world_size(self) -> int | None:
        """Ranks that the job was to have."""
        return self.evidence.ranks_expected

    @cached_property
    def ranks_missing(self) -> tuple[int, ...]:
        """Expected ranks without a journal in the judged attempt."""
        return tuple(rank for rank in range(self.world_size or 0) if rank not in self.ranks)

    @cached_property
    def num_common_steps(self) -> int:
        """Optimizer steps that all ranks of the attempt took."""
        return 0 if self._chosen is None else self._num_common(self._chosen)

    @cached_property
    def base_step(self) -> int:
        """What to add to a relative step to name it as the first rank counted it."""
        return next((view.base_step for view in self.ranks.values()), 0)

    @cached_property
    def layout(self) -> Layout:
        """Which ranks are replicas, and which share gradients."""
        return find_layout(
            {rank: view.info for rank, view in self.ranks.items()}, self.evidence.command.mesh, self.world_size
        )

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The data groups of the attempt."""
        return tuple(Group(self, replicas) for replicas in self.layout.groups)

    @cached_property
    def data_groups(self) -> tuple[Group, ...]:
        """Groups of two or more replicas: only there can data be wrongly split."""
        return tuple(group for group in self.groups if len(group.replicas) > 1)

    @cached_property
    def sync(self) -> Sync:
        """Gradients and parameters at common optimizer steps."""
        return Sync(self)

    def hook_off(self, *names: str) -> str | None:
        """Why one of these hooks is off on some rank; ``None`` when none is."""
        for view in self.ranks.values():
            for state in view.info.hook_states:
                if state.hook in names:
                    return f"hook {state.hook} is off on rank {view.info.rank}: {state.reason}"
        return None


# --------------------------------------------------------------------------- gradients and parameters


@dataclass(slots=True)
class Compared:
    """Digests of one optimizer at steps that several ranks took.

    Attributes:
        steps: int64, shape (S,), relative.
        values_RS: uint64, shape (R, S); rows follow ``ranks``.
    """

    ranks: tuple[int, ...]
    steps: npt.NDArray[np.int64]
    values_RS: U64Array

    @property
    def equal_S(self) -> npt.NDArray[np.bool_]:
        """All ranks have the same digest at the step."""
        same: npt.NDArray[np.bool_] = (self.values_RS == self.values_RS[:1]).all(axis=0)
        return same


class Sync:
    """Comparison of gradients and parameters over ranks."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._aligned: dict[tuple[int, ...], int | None] = {}

    def optimizers(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Numbers of the optimizers that every one of ``ranks`` stepped."""
        common: set[int] | None = None
        for rank in ranks:
            mine = {int(number) for number in np.unique(self.view.ranks[rank].steps["optimizer"])}
            common = mine if common is None else common & mine
        return tuple(sorted(common or ()))

    def compare(self, column: str, flag: StepFlag, ranks: Sequence[int], optimizer: int) -> Compared:
        """``column`` of STEP at the steps where all ``ranks`` have it."""
        found: list[tuple[npt.NDArray[np.int64], U64Array]] = []
        for rank in ranks:
            view = self.view.ranks[rank]
            rows = view.steps
            rows = rows[(rows["optimizer"] == optimizer) & ((rows["flags"] & int(flag)) != 0) & (rows[column] != 0)]
            steps, first = np.unique(view.relative(rows["step"]), return_index=True)
            found.append((steps, rows[column][first].astype(np.uint64)))
        common = found[0][0] if found else np.empty(0, np.int64)
        for steps, _ in found[1:]:
            common = np.intersect1d(common, steps)
        limit = self.aligned_until(ranks)
        if limit is not None:
            common = common[common < limit]
        values = np.stack([v[np.searchsorted(s, common)] for s, v in found]) if found else np.empty((0, 0), np.uint64)
        return Compared(tuple(ranks), common, values)

    def gradients(self, ranks: Sequence[int], optimizer: int) -> Compared:
        """Digests of the gradients that the optimizer used."""
        return self.compare("grads", StepFlag.HAS_GRADS, ranks, optimizer)

    def parameters(self, ranks: Sequence[int], optimizer: int) -> Compared:
        """Digests of the parameters after the step."""
        return self.compare("params", StepFlag.HAS_PARAMS, ranks, optimizer)

    def equal_share(self, ranks: Sequence[int], optimizer: int, steps: npt.NDArray[np.int64]) -> float | None:
        """Mean share of single gradients that are equal on all ranks; ``None`` without such lists."""
        shares: list[float] = []
        for step in steps[:64]:
            parts = []
            for rank in ranks:
                view = self.view.ranks[rank]
                rows = view.steps[(view.relative(view.steps["step"]) == step) & (view.steps["optimizer"] == optimizer)]
                there, at, length = view.lists.find(rows["serial"], ListKind.GRADS)
                if not len(rows) or not there[0]:
                    break
                parts.append(view.lists.values[int(at[0]) : int(at[0] + length[0])])
            if len(parts) == len(ranks) and parts and len({len(part) for part in parts}) == 1 and len(parts[0]):
                table = np.stack(parts)
                shares.append(float((table == table[:1]).all(axis=0).mean()))
        return float(np.mean(shares)) if shares else None

    def aligned_until(self, ranks: Sequence[int]) -> int | None:
        """``_aligned_until``, worked out once per set of ranks."""
        key = tuple(ranks)
        if key not in self._aligned:
            self._aligned[key] = self._aligned_until(key)
        return self._aligned[key]

    def _aligned_until(self, ranks: Sequence[int]) -> int | None:
        """First relative step from which step numbers of ranks no longer name the same update.

        Where one rank runs out of batches earlier than another (Join), its next step belongs to
        the next epoch while the others are still in this one. ``None`` = always aligned.
        """
        limit: int | None = None
        counts: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
        for rank in ranks:
            view = self.view.ranks[rank]
            seen: dict[int, int] = {}
            for number in view.training:
                slot = view.slots[number]
                order = seen.get(slot, 0)
                seen[slot] = order + 1
                rows = view.rows_of(number)
                used = rows["step"][rows["step"] != NO_STEP]
                if len(used):
                    span = len(np.unique(used)), int(view.relative(used).max()) + 1
                    counts.setdefault((slot, order), {})[rank] = span
        for spans_of in counts.values():
            if len(spans_of) == len(ranks) and len({count for count, _ in spans_of.values()}) > 1:
                end = min(end for _, end in spans_of.values())
                limit = end if limit is None else min(limit, end)
        return limit
