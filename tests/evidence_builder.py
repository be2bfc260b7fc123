"""Builds real journals from a short description of a job, so that checks are tested on what merge gives.

A job is ranks x epochs x batches of sample indices; every rank writes its journal with
``JournalWriter``, and ``Job.evidence`` merges the folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ddp_audit.checks.streams import mix
from ddp_audit.collect.merge import merge
from ddp_audit.journal import (
    BATCH_ROW,
    BATCH_STRUCT,
    FORWARD_ROW,
    FORWARD_STRUCT,
    STEP_ROW,
    STEP_STRUCT,
    JournalWriter,
    file_name,
    frame,
    list_frame,
)
from ddp_audit.judge import judge
from ddp_audit.records import (
    NO_STEP,
    BatchFlag,
    CommandInfo,
    Evidence,
    Finding,
    ForwardFlag,
    IterationInfo,
    ListKind,
    LoaderInfo,
    Location,
    MeshInfo,
    ParametersInfo,
    SamplerInfo,
    StepFlag,
    WrapperInfo,
)

Batches = Sequence[Sequence[int]]
Epochs = Sequence[Batches]

DISTRIBUTED = SamplerInfo(class_name="DistributedSampler", shuffle=True, drop_last=False, seed=0, set_epoch=True)
RANDOM = SamplerInfo(class_name="RandomSampler", replacement=False)
SEQUENTIAL = SamplerInfo(class_name="SequentialSampler")
BATCHED = SamplerInfo(class_name="BatchSampler", drop_last=False)


def content(index: int, salt: int = 0) -> int:
    """Digest of the sample at ``index`` of the data set ``salt``."""
    return int(mix(np.array([index * 1000003 + salt + 1], dtype=np.uint64))[0])


def digest(values: Sequence[int]) -> int:
    """Digest of a list, in order; never 0."""
    total = 1
    for value in values:
        total = int(mix(np.array([(total * 31 + value) % 2**64], dtype=np.uint64))[0])
    return total or 1


@dataclass
class Rank:
    """One rank of a job. ``epochs`` are what its loop got from its training loader."""

    epochs: Epochs = ()
    samplers: tuple[SamplerInfo, ...] = (BATCHED, DISTRIBUTED)
    dataset_length: int | None = None
    dataset_class: str | None = "Rows"
    dataset_digest: int | None = 77
    dataset_iterable: bool = False
    loader_length: int | None = None
    batch_size: int | None = None
    drop_last: bool | None = False
    num_workers: int = 0
    class_names: tuple[str, ...] = ("DataLoader",)
    family: str = "dataloader"
    frameworks: tuple[str, ...] = ()
    location: Location | None = field(default_factory=lambda: Location(file="train.py", line=41))
    new_loader_each_epoch: bool = False
    finished: bool = True
    index: bool = True  # L1
    content: bool = True  # L2
    content_salt: int = 0  # another number: other data under the same indices
    windowed: bool = False
    whole_batches: int = 8  # of windowed epochs, batches hashed in full
    forward: bool = False  # L3
    forward_samples: Callable[[Sequence[int]], Sequence[int]] = lambda samples: samples
    resized: bool = False  # what the model gets has no size of the batch
    recorded: bool = False
    workers: Callable[[int], int] = lambda ordinal: -1
    wrapper: str | None = "ddp"
    group_ranks: tuple[int, ...] | None = None
    group: bool = True
    generations: tuple[int, ...] = (0,)
    model_mesh: MeshInfo | None = None
    model_dims: tuple[int, ...] = ()
    layout: int = 5
    num_dtensors: int = 0
    initial: int = 11
    grads: Callable[[int], int] = lambda step: 100 + step
    params: Callable[[int], int] = lambda step: 1000 + step
    single_grads: Callable[[int], Sequence[int]] | None = None
    final: int | None = None
    forwards_per_step: int = 1
    num_other_collectives: int = 0
    other_frameworks: tuple[str, ...] = ()
    optimizer_class: str = "AdamW"
    accumulate: int = 1
    shuffle_per_epoch: bool = True
    set_epoch_calls: int = 1
    world: int | None = None
    ended: bool = True
    steps: int | None = None  # with no epochs: steps taken
    restart: int = 0
    pid: int | None = None
    start: float = 1000.0
    run_id: str = "abc"
    host: str = "h"
    rng: tuple[int, int, int] | None = None


def write_rank(folder: Path, rank: int, world: int, spec: Rank, tag: str = "ab") -> Path:
    """Write the journal of one rank; returns its main file."""
    pid = spec.pid if spec.pid is not None else 100 + rank
    writer = JournalWriter(folder / "journal", file_name(rank, spec.restart, pid, tag))
    writer.event(
        "start",
        {
            "rank": rank,
            "world_size": spec.world or world,
            "local_rank": rank,
            "restart": spec.restart,
            "pid": pid,
            "host_key": spec.host,
            "start": spec.start + rank / 100,
            "proof": "group",
            "torch": "2.13.0",
            "python": "3.11.2",
            "hash_name": "xxh3_64",
            "launcher": "torchrun",
            "other_frameworks": list(spec.other_frameworks),
            "run_id": spec.run_id,
            "form": "supervise",
        },
    )
    if spec.group:
        for generation in spec.generations:
            writer.event(
                "group",
                {"generation": generation, "backend": "gloo", "world_size": world, "rank": rank, "time": spec.start},
            )
    if spec.wrapper is not None:
        writer.event(
            "wrapper",
            asdict(
                WrapperInfo(
                    wrapper=0,
                    kind=spec.wrapper,
                    module_class="Net",
                    group_ranks=spec.group_ranks if spec.group_ranks is not None else tuple(range(world)),
                    mesh=None,
                    num_parameters=4,
                    num_trainable=4,
                    num_buffers=0,
                    find_unused_parameters=False,
                    broadcast_buffers=True,
                    location=Location(file="train.py", line=30),
                )
            ),
        )
    writer.event("device", {"device": "cpu", "device_uuid": None})
    writer.event(
        "parameters",
        asdict(
            ParametersInfo(
                optimizer=0,
                class_name=spec.optimizer_class,
                num_parameters=4,
                layout_digest=spec.layout,
                values_digest=spec.initial,
                num_replicated=4 - spec.num_dtensors,
                num_dtensors=spec.num_dtensors,
                model_mesh=spec.model_mesh,
                model_dims=spec.model_dims,
                num_unwrapped=0,
            )
        ),
    )
    state = _Writer(writer, spec)
    for number, batches in enumerate(spec.epochs):
        loader = number if spec.new_loader_each_epoch else 0
        if loader == number:
            writer.event("loader", asdict(_loader(spec, loader, batches)))
        samplers = tuple(replace(s, epoch=number if s.set_epoch else None) for s in spec.samplers)
        writer.event(
            "iteration",
            asdict(
                IterationInfo(
                    iteration=number,
                    loader=loader,
                    samplers=samplers,
                    dataset_epoch=None,
                    num_set_epoch_calls=spec.set_epoch_calls,
                    rng_digests=spec.rng,
                )
            ),
        )
        state.epoch(number, batches)
        writer.event(
            "iteration_end",
            {
                "iteration": number,
                "finished": spec.finished,
                "num_batches": len(batches),
                "num_samples": sum(len(batch) for batch in batches),
                "index_digest": None,
                "content_digest": None,
                "lists_dropped": False,
            },
        )
    for _ in range(spec.steps or 0):
        state.step([])
    writer.event("final", {"final_params": spec.final, "num_other_collectives": spec.num_other_collectives})
    if spec.ended:
        writer.event("end", {"time": spec.start + 100})
    writer.close()
    return writer.path


def _loader(spec: Rank, loader: int, batches: Batches) -> LoaderInfo:
    return LoaderInfo(
        loader=loader,
        family=spec.family,
        class_names=spec.class_names,
        location=spec.location,
        site_ordinal=loader,
        before_group=False,
        dataset_class=spec.dataset_class,
        dataset_length=spec.dataset_length,
        dataset_digest=spec.dataset_digest,
        dataset_iterable=spec.dataset_iterable,
        length=spec.loader_length,
        batch_size=spec.batch_size if spec.batch_size is not None else max((len(b) for b in batches), default=None),
        drop_last=spec.drop_last,
        num_workers=spec.num_workers,
        persistent_workers=None,
        in_order=None,
        frameworks=spec.frameworks,
    )


class _Writer:
    """Rows of one rank in the order in which the hooks write them."""

    def __init__(self, writer: JournalWriter, spec: Rank) -> None:
        self.writer, self.spec = writer, spec
        self.serial = 0
        self.round = 0

    def _next(self) -> int:
        self.serial += 1
        return self.serial - 1

    def epoch(self, iteration: int, batches: Batches) -> None:
        pending: list[tuple[int, int, Sequence[int]]] = []
        for ordinal, batch in enumerate(batches):
            pending.append((iteration, ordinal, batch))
            if len(pending) == self.spec.accumulate:
                self.step(pending)
                pending = []
        if pending:
            self._batches(pending, NO_STEP)

    def _batches(self, pending: Sequence[tuple[int, int, Sequence[int]]], step: int) -> None:
        spec = self.spec
        for iteration, ordinal, batch in pending:
            serial = self._next()
            flags = BatchFlag.TRAIN_LAST
            samples = [content(index, spec.content_salt) for index in batch]
            if spec.index:
                flags |= BatchFlag.HAS_INDEX
                self.writer.lists(list_frame(serial, ListKind.INDEX, np.array(batch, dtype="<i8").tobytes()))
            if spec.content:
                flags |= BatchFlag.HAS_DIGESTS
                self.writer.lists(list_frame(serial, ListKind.DIGEST, np.array(samples, dtype="<u8").tobytes()))
                if not spec.windowed or ordinal < spec.whole_batches:
                    flags |= BatchFlag.WHOLE
                if spec.windowed:
                    flags |= BatchFlag.WINDOWED
                    if ordinal < spec.whole_batches:
                        whole = np.array([value ^ 12345 for value in samples], dtype="<u8")
                        self.writer.lists(list_frame(serial, ListKind.WHOLE, whole.tobytes()))
            row = BATCH_STRUCT.pack(
                serial,
                step,
                iteration,
                ordinal,
                len(batch),
                50,
                int(flags),
                spec.workers(ordinal),
                digest(samples) if spec.content else 0,
                digest(batch) if spec.index else 0,
            )
            self.writer.rows(frame(BATCH_ROW, row))

    def step(self, pending: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        spec = self.spec
        self._batches(pending, self.round)
        used = [index for _, _, batch in pending for index in batch]
        if spec.recorded:
            serial = self._next()
            self.writer.lists(list_frame(serial, ListKind.RECORDED, np.array(used, dtype="<i8").tobytes()))
            row = (serial, self.round, 0, int(ForwardFlag.RECORDED), 0, len(used), 0, 0)
            self.writer.rows(frame(FORWARD_ROW, FORWARD_STRUCT.pack(*row)))
        if spec.forward:
            serial = self._next()
            fed = [content(index, spec.content_salt) for index in spec.forward_samples(used)]
            self.writer.lists(list_frame(serial, ListKind.INPUT, np.array(fed, dtype="<u8").tobytes()))
            flags = ForwardFlag.GRAD | ForwardFlag.SYNC | ForwardFlag.HAS_DIGESTS | ForwardFlag.WHOLE
            flags |= ForwardFlag.RESIZED if spec.resized else ForwardFlag(0)
            row = (serial, self.round, 0, int(flags), 0, len(fed), 100, digest(fed))
            self.writer.rows(frame(FORWARD_ROW, FORWARD_STRUCT.pack(*row)))
        serial = self._next()
        generation = spec.generations[min(len(spec.generations) - 1, self.round // 10)]
        flags = StepFlag.HAS_PARAMS | StepFlag.HAS_GRADS | StepFlag.ALL_STEPPED
        if spec.single_grads is not None:
            values = np.array(spec.single_grads(self.round), dtype="<u8")
            self.writer.lists(list_frame(serial, ListKind.GRADS, values.tobytes()))
        row = STEP_STRUCT.pack(
            serial,
            self.round,
            0,
            generation,
            int(flags),
            spec.accumulate,
            spec.forwards_per_step,
            spec.forwards_per_step if spec.wrapper else 0,
            0.1,
            spec.params(self.round),
            spec.grads(self.round),
            0,
            spec.start + self.round * 0.01,
            1000,
            2000,
            3000,
            500,
            40,
        )
        self.writer.rows(frame(STEP_ROW, row))
        self.round += 1


def write_run(folder: Path, **fields: Any) -> None:
    """The folder's ``run.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    given = {"run_id": "abc", "form": "supervise", "tool_version": "0.1.0", "start": 999.0, **fields}
    command = CommandInfo(**given)
    (folder / "run.json").write_text(json.dumps(asdict(command)))


def write_job(folder: Path, ranks: Sequence[Rank], **run: Any) -> Path:
    """Folder of a whole job."""
    write_run(folder, **run)
    for rank, spec in enumerate(ranks):
        write_rank(folder, rank, len(ranks), spec)
    return folder


def evidence(folder: Path, ranks: Sequence[Rank], **run: Any) -> Evidence:
    """Journals of ``ranks``, merged."""
    return merge([write_job(folder, ranks, **run)])


def batches_of(indices: Sequence[int], size: int, drop_last: bool = False) -> list[list[int]]:
    """Cut a list of indices into batches."""
    found = [list(indices[k : k + size]) for k in range(0, len(indices), size)]
    if drop_last and found and len(found[-1]) < size:
        found.pop()
    return found


def permutation(length: int, seed: int) -> list[int]:
    """A fixed order of ``range(length)``."""
    return [int(k) for k in np.random.default_rng(seed).permutation(length)]


def distributed(
    length: int, rank: int, world: int, epoch: int, *, seed: int = 0, shuffle: bool = True, drop_last: bool = False
) -> list[int]:
    """What ``DistributedSampler`` deals to a rank."""
    order = permutation(length, seed * 1000 + epoch) if shuffle else list(range(length))
    if drop_last:
        order = order[: length // world * world]
    else:
        order += order[: -length % world]
    return order[rank::world]


def sampler(length: int, rank: int, world: int, **fields: Any) -> SamplerInfo:
    """The facts that a ``DistributedSampler`` shows."""
    per_rank = -(-length // world)
    given = {"num_replicas": world, "rank": rank, "num_samples": per_rank, "total_size": per_rank * world, **fields}
    return replace(DISTRIBUTED, **given)


def sharded(
    length: int = 160, world: int = 2, num_epochs: int = 3, size: int = 8, *, reshuffle: bool = True, **fields: Any
) -> list[Rank]:
    """A healthy job with ``DistributedSampler``."""
    return [
        Rank(
            epochs=[
                batches_of(distributed(length, rank, world, epoch if reshuffle else 0), size)
                for epoch in range(num_epochs)
            ],
            samplers=(BATCHED, sampler(length, rank, world)),
            dataset_length=length,
            **fields,
        )
        for rank in range(world)
    ]


def finding(folder: Path, ranks: Sequence[Rank], check: str, **run: Any) -> Finding:
    """What one check says about a job."""
    audit = judge(evidence(folder, ranks, **run), created=0.0)
    return next(item for item in audit.checks if item.id == check)
