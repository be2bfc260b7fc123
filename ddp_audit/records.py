"""The records that cross room borders: what was seen, and what was judged.

Everything here is frozen. This module imports nothing of ours and, besides the standard
library, only numpy, so that it can be loaded inside a rank.

Shape suffixes: R ranks, S steps, B samples of a batch, E epochs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, IntFlag, StrEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

SCHEMA_VERSION = "1.0"
EVIDENCE_VERSION = "1.0"

U64Array: TypeAlias = npt.NDArray[np.uint64]
Table: TypeAlias = npt.NDArray[np.void]
"""A structured array; the dtypes are ``BATCH``, ``FORWARD``, ``STEP`` and ``LIST`` below."""


# --------------------------------------------------------------------------- words


class Outcome(StrEnum):
    """How one check ended."""

    FAIL = "fail"
    PASS = "pass"
    INCONCLUSIVE = "inconclusive"
    NOT_APPLICABLE = "not_applicable"
    ERROR = "error"


class Severity(StrEnum):
    """How much a finding weighs."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Verdict(StrEnum):
    """The verdict over the whole job."""

    FAIL = "fail"
    WARN = "warn"
    INCONCLUSIVE = "inconclusive"
    PASS = "pass"


class Level(StrEnum):
    """What a data verdict rests on."""

    L1 = "L1"  # sample index
    L2 = "L2"  # content at the loader
    L3 = "L3"  # inputs of the wrapped model's forward
    L4 = "L4"  # local gradient before reduction


# --------------------------------------------------------------------------- binary rows


class BatchFlag(IntFlag):
    """Bits of ``BATCH['flags']``."""

    TRAIN_LAST = 1  # the newest loader to deliver before a backward of this step
    TRAIN_CO = 2  # delivered before that backward, but another loader delivered later
    NOGRAD = 4  # delivered while gradients were switched off
    HAS_INDEX = 8  # a LIST row of kind INDEX belongs to it
    HAS_DIGESTS = 16  # a LIST row of kind DIGEST belongs to it
    WINDOWED = 32  # its sample digests cover windows, not all bytes
    WHOLE = 64  # ``content`` is a hash of every byte
    OPAQUE = 128  # it holds parts that could not be hashed


class ForwardFlag(IntFlag):
    """Bits of ``FORWARD['flags']``."""

    GRAD = 1  # gradients were on
    SYNC = 2  # the wrapper would reduce gradients in the backward (not under no_sync)
    HAS_DIGESTS = 4
    WINDOWED = 8
    WHOLE = 16
    OPAQUE = 32
    RECORDED = 64  # not a forward: ids given by ddp_audit.record_samples (a LIST of kind INDEX)
    RESIZED = 128  # no input has as many numbers per sample as any part of the batches delivered before it


class StepFlag(IntFlag):
    """Bits of ``STEP['flags']``."""

    HAS_PARAMS = 1
    HAS_GRADS = 2
    HAS_LOCAL_GRAD = 4
    ALL_STEPPED = 8  # every optimizer seen in the first 3 rounds has stepped since the last such row


class ListKind(IntEnum):
    """What a LIST row holds; ``serial`` names the row of BATCH, FORWARD or STEP it belongs to."""

    INDEX = 1  # int64 dataset indices of a BATCH, in batch order (stored as uint64)
    DIGEST = 2  # one digest per sample of a BATCH (windowed above the size limit)
    WHOLE = 3  # one digest per sample of a BATCH over all bytes; only beside WINDOWED digests
    INPUT = 4  # one digest per sample of a FORWARD
    RECORDED = 5  # ids of a FORWARD row with flag RECORDED
    GRADS = 6  # one digest per (chosen) parameter's gradient at a STEP


NO_STEP = 0xFFFF_FFFF

BATCH = np.dtype(
    [
        ("serial", "<u4"),  # running number of the process, 0-based, shared with FORWARD and STEP
        ("step", "<u4"),  # first optimizer step after the delivery; NO_STEP when none came
        ("iteration", "<u4"),  # running number of iterators of this process, 0-based
        ("ordinal", "<u4"),  # position inside the iteration, 0-based, in order of delivery
        ("num_samples", "<u4"),  # 0 = unknown
        ("wait_us", "<u4"),  # time inside the iterator's __next__
        ("flags", "<u2"),
        ("worker", "<i2"),  # loader worker that made it; -1 = main process or unknown
        ("content", "<u8"),  # digest of the batch as delivered; 0 = not taken
        ("index", "<u8"),  # digest of its index list, in order; 0 = none
    ]
)
FORWARD = np.dtype(
    [
        ("serial", "<u4"),
        ("step", "<u4"),
        ("micro", "<u2"),  # position among the forwards of this step
        ("flags", "<u2"),
        ("wrapper", "<u2"),  # running number of the wrapper, 0-based
        ("num_samples", "<u4"),
        ("forward_us", "<u4"),
        ("content", "<u8"),
    ]
)
STEP = np.dtype(
    [
        ("serial", "<u4"),
        ("step", "<u4"),  # 0-based; several optimizers of one round share it
        ("optimizer", "<u2"),  # running number in order of the first step
        ("generation", "<u2"),  # how often init_process_group had been called before, less one, min 0
        ("flags", "<u2"),
        ("num_backwards", "<u2"),  # backward calls since the previous step
        ("num_forwards", "<u2"),  # wrapped forwards under grad since the previous step
        ("num_sync_forwards", "<u2"),  # of these, with gradient reduction on
        ("learning_rate", "<f8"),  # of the first parameter group
        ("params", "<u8"),  # digest of parameter samples after the step
        ("grads", "<u8"),  # digest of gradient samples as the optimizer used them
        ("local_grad", "<u8"),  # L4: digest of local gradients before reduction
        ("time", "<f8"),  # seconds since the epoch, at the end of the step
        ("data_us", "<u4"),
        ("forward_us", "<u4"),
        ("backward_us", "<u4"),
        ("optimizer_us", "<u4"),
        ("probe_us", "<u4"),  # the probe's own time since the previous step
    ]
)
LIST = np.dtype(
    [
        ("rank", "<u4"),
        ("journal", "<u4"),
        ("serial", "<u4"),
        ("kind", "<u1"),
        ("offset", "<u8"),  # into ``Evidence.list_values``
        ("length", "<u4"),
    ]
)


# --------------------------------------------------------------------------- rare events


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A place in the user's code. ``file`` is relative to the working folder, or a bare name."""

    file: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerInfo:
    """One object of a sampler chain, as it held itself when iteration began.

    Fields are ``None`` where the object has no such attribute or it is no plain number.
    """

    class_name: str
    num_replicas: int | None = None
    rank: int | None = None
    seed: int | None = None
    epoch: int | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    replacement: bool | None = None
    num_samples: int | None = None
    total_size: int | None = None
    batch_size: int | None = None
    even_batches: bool | None = None
    split_batches: bool | None = None
    set_epoch: bool = False  # it has a set_epoch method
    seeded: bool | None = None  # it holds a generator of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderInfo:
    """A loader that was iterated. Facts as found; ``None`` where it could not be found."""

    loader: int  # running number of the process, 0-based, in order of the first iteration
    family: str  # dataloader | stateful_dataloader | nodes
    class_names: tuple[str, ...]  # the loader's class and its bases up to the library's
    location: Location | None
    site_ordinal: int  # how many loaders were built at this location before
    before_group: bool | None  # built before the process group existed
    dataset_class: str | None
    dataset_length: int | None
    dataset_digest: int | None  # of the dataset's own fields, see hooks/digest.py; None = opaque
    dataset_iterable: bool
    length: int | None  # len(loader), in batches
    batch_size: int | None
    drop_last: bool | None
    num_workers: int
    persistent_workers: bool | None
    in_order: bool | None
    frameworks: tuple[str, ...] = ()  # "accelerate", "lightning", … that wrapped it


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationInfo:
    """One iterator of a loader, from ``iter()`` to exhaustion, abandonment or the end."""

    iteration: int
    loader: int
    samplers: tuple[SamplerInfo, ...]  # outermost first, at the start
    dataset_epoch: int | None  # an ``epoch`` the dataset held at the start
    num_set_epoch_calls: int  # on any object of the chain, since the previous iteration began
    finished: bool = False  # StopIteration was reached
    ended: bool = False  # finished or known to be abandoned
    num_batches: int = 0
    num_samples: int = 0
    index_digest: int | None = None  # over all indices in order of delivery; None = no attributed index
    content_digest: int | None = None  # over all batch digests in order; None when one is missing
    lists_dropped: bool = False  # sample lists were given up for the disk cap
    rng_digests: tuple[int, int, int] | None = None  # torch, numpy, random at the start


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshInfo:
    """A device mesh as seen from one rank. ``ranks`` is flat, row-major over ``shape``."""

    shape: tuple[int, ...]
    dim_names: tuple[str, ...] | None
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperInfo:
    """A data-parallel wrapper around a model."""

    wrapper: int
    kind: str  # ddp | fsdp1 | fsdp2 | data_parallel
    module_class: str
    group_ranks: tuple[int, ...]  # global ranks whose gradients are shared
    mesh: MeshInfo | None
    num_parameters: int
    num_trainable: int
    num_buffers: int
    find_unused_parameters: bool | None
    broadcast_buffers: bool | None
    location: Location | None
    params_digest: int | None = None  # sampled fingerprint just after wrapping
    # DDP's own log at the end, means over the iterations it samples (every 100th), microseconds
    forward_us: int | None = None
    backward_us: int | None = None
    communication_us: int | None = None
    overlap_us: int | None = None  # part of the communication that backward compute hides


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametersInfo:
    """The parameters that an optimizer holds, at its first step, *before* it."""

    optimizer: int
    class_name: str
    num_parameters: int
    layout_digest: int  # shapes and dtypes of all parameters, in order
    values_digest: int | None  # every byte of the replicated parameters, before the first step
    num_replicated: int  # plain tensors and DTensors with only Replicate placements
    num_dtensors: int
    model_mesh: MeshInfo | None  # mesh of DTensor placements that no data wrapper explains
    model_dims: tuple[int, ...]  # dims of it that hold Shard or Partial placements
    num_unwrapped: int  # trainable parameters that no wrapper holds


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInfo:
    """A default process group that was created."""

    generation: int
    backend: str
    world_size: int
    rank: int
    time: float
    destroyed: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HookState:
    """A hook that is off or failed. ``reason`` never holds user data, only class names."""

    hook: str
    reason: str
    num_errors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalInfo:
    """One journal: one process that proved to be a rank."""

    journal: int  # index into Evidence.journals
    file: str
    rank: int
    world_size: int  # as the process knew it (group, else environment); 1 when alone
    local_rank: int | None
    restart: int  # TORCHELASTIC_RESTART_COUNT
    pid: int
    host: str  # alias: "host0", "host1", … in order of the lowest rank
    start: float
    proof: str  # group | wrapper | optimizer: how it proved to be a rank
    torch: str
    python: str
    hash_name: str
    device: str  # "cpu", "cuda:0", …
    device_uuid: str | None
    other_frameworks: tuple[str, ...]  # horovod, deepspeed, … that were imported
    launcher: str | None  # torchrun, slurm, mpi, …, from the environment
    groups: tuple[GroupInfo, ...] = ()
    loaders: tuple[LoaderInfo, ...] = ()
    iterations: tuple[IterationInfo, ...] = ()
    wrappers: tuple[WrapperInfo, ...] = ()
    parameters: tuple[ParametersInfo, ...] = ()
    hook_states: tuple[HookState, ...] = ()
    num_other_collectives: int = 0  # the job's own calls, DDP's and FSDP's aside
    final_params: int | None = None  # every byte of the replicated parameters at the end
    stopped_at: int | None = None  # step at which --steps or --abort-on ended it
    ended: bool = False  # its last record is the end record
    cut: bool = False  # it ends in the middle of a record
    capped: bool = False  # the disk cap was reached
    end: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandInfo:
    """What was asked for, from the folder's ``run.json``. No arguments, no names."""

    run_id: str
    form: str  # supervise | rank
    tool_version: str
    start: float
    mesh: tuple[tuple[str, int], ...] = ()
    every: int = 1
    steps: int | None = None
    collector: str = "auto"
    require: tuple[str, ...] = ()
    launcher_ranks: int | None = None  # ranks the launcher was asked for, where that could be read
    zero_reason: str | None = None  # why no rank was seen, when none was
    script: str | None = None  # base name of the script, where it could be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that was seen of one job, merged over its journals.

    The four tables are sorted by (rank, journal, serial); ``rank_of`` and ``journal_of`` are the
    columns beside each. Tables may be memory-mapped.

    Attributes:
        ranks_expected: world size of the job; ``None`` when nothing says.
        batches: rows of ``BATCH``; ``batches_key`` uint32, shape (rows, 2): rank and journal.
        forwards, steps: likewise.
        lists: rows of ``LIST``, sorted by (rank, journal, serial, kind).
        list_values: uint64, flat; a LIST row names its part by offset and length.
        notes: what was missing, cut or foreign when the folder was merged, one sentence each.
    """

    version: str
    command: CommandInfo
    ranks_expected: int | None
    journals: tuple[JournalInfo, ...]
    batches: Table
    batches_key: npt.NDArray[np.uint32]
    forwards: Table
    forwards_key: npt.NDArray[np.uint32]
    steps: Table
    steps_key: npt.NDArray[np.uint32]
    lists: Table
    list_values: U64Array
    notes: tuple[str, ...] = ()
    running: bool = False  # some rank had not ended when the folder was read
    sha256: str = ""


# --------------------------------------------------------------------------- judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckInfo:
    """What a check is: the text of ``explain`` and of the docs."""

    id: str
    kind: str
    severity: Severity
    title: str  # what is true when it passes
    failure_title: str
    why: str  # what the fault costs, one or two sentences
    explanation: str  # proof, limits, false alarms; several sentences
    needs: str  # evidence it needs: levels, steps, finished epochs
    fix: str  # smallest snippet or sentence
    broken: str  # example code
    fixed: str
    since: str = "0.1.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """How one check ended. ``measured`` and ``limit`` are in ``unit``.

    ``title``, ``why`` and ``needs`` are the check's own words (``CheckInfo``): the judge copies
    them here, because renderers know no checks.
    """

    id: str
    kind: str
    outcome: Outcome
    severity: Severity
    message: str
    cause: str | None = None
    caused_by: str | None = None
    ranks: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    measured: float | None = None
    limit: float | None = None
    unit: str | None = None
    levels: tuple[Level, ...] = ()
    location: Location | None = None
    fix: str | None = None
    why_inconclusive: str | None = None
    suppressed: str | None = None
    title: str | None = None  # failure_title when the outcome is fail, else title
    why: str | None = None
    needs: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One launch of the job: a restart, or a process group made anew in the same processes."""

    restart: int
    generation: int
    ranks: tuple[int, ...]
    num_common_steps: int
    judged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DataGroup:
    """Ranks that share gradients; each replica is the ranks that hold one copy of the model."""

    replicas: tuple[tuple[int, ...], ...]
    distinct_fraction_step: float | None
    distinct_fraction_epoch: float | None
    level: Level | None
    why_unknown: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One rank in the tables of the report."""

    rank: int
    host: str
    device: str
    num_steps: int
    num_epochs: int  # finished
    shard_length: int | None  # samples consumed in the first finished epoch
    num_samples: int  # consumed in training
    num_distinct: int | None
    loader_length: int | None  # batches
    data_share: float | None  # share of the step spent waiting for data
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What the plots draw: bounded, binned by the judge.

    Attributes:
        heat: rank x bin; number of the first rank that read the same batch at that step
            (own rank number = no other), -1 = nothing seen. At most 64 x 200.
        heat_steps: first step of each bin.
        overlap: rank x rank share of samples in common in the judged window, 0..1; NaN = unknown.
            At most 16 x 16, the worst ranks; ``overlap_ranks`` names them.
        shards: samples consumed per rank in the first finished epoch, else in all steps.
        shard_label: what ``shards`` counts.
        epoch_coverage: per judged epoch (distinct samples, dataset length or -1).
    """

    heat: tuple[tuple[int, ...], ...] = ()
    heat_ranks: tuple[int, ...] = ()
    heat_steps: tuple[int, ...] = ()
    overlap: tuple[tuple[float, ...], ...] = ()
    overlap_ranks: tuple[int, ...] = ()
    shards: tuple[int, ...] = ()
    shard_ranks: tuple[int, ...] = ()
    shard_label: str = ""
    dataset_length: int | None = None
    epoch_coverage: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What the probe cost, by its own clock; the worst rank."""

    mean_us_per_step: float | None
    share_of_step: float | None
    journal_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where an audit comes from. ``created`` is the only part that differs between renderings."""

    created: float
    start: float | None
    run_id: str
    torch: str
    backend: str
    python: str
    launcher: str
    hosts: tuple[str, ...]
    hash_name: str
    evidence_sha256: str
    evidence_version: str
    command: str  # the command that makes this page again
    notes: tuple[str, ...] = ()
    hook_states: tuple[HookState, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The judgement over one job."""

    tool_version: str
    verdict: Verdict
    headline: str
    world_size: int | None  # ranks expected
    ranks_seen: int
    ranks_missing: tuple[int, ...]
    replicas: int | None
    num_steps: int
    effective_gpus: float | None
    effective_gpus_measured: float | None
    effective_gpus_why: str | None  # why it is None
    distinct_fraction: float | None
    distinct_fraction_step: float | None
    distinct_fraction_epoch: float | None
    core_unanswered: tuple[str, ...]  # core questions without an answer, one sentence each
    checks: tuple[Finding, ...]
    attempts: tuple[Attempt, ...]
    groups: tuple[DataGroup, ...]
    ranks: tuple[RankSummary, ...]
    loaders: tuple[LoaderInfo, ...]  # of the training loaders, as the lowest rank saw them
    samplers: tuple[SamplerInfo, ...]  # of the judged training loader
    series: Series = field(default_factory=Series)
    overhead: Overhead
    provenance: Provenance
    running: bool = False
