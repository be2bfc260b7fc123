"""The process: what it is, what it has seen since the last optimizer step, and its journal.

A process is passive until it proves to be a rank: a process group, a data-parallel wrapper, or an
optimizer step. What it saw before is kept in a bounded buffer. A loader worker is silent for ever.
Nothing here refers strongly to an object of the user's.

Rows are held until the step that follows them; one step is one ``write(2)`` to the main file and
one to the list file.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import platform
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from ddp_audit import settings as options
from ddp_audit.hooks import digest, guard
from ddp_audit.hooks.guard import CLOCK, Hook, hook
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
from ddp_audit.records import NO_STEP, BatchFlag, ForwardFlag, HookState, ListKind, StepFlag

ALWAYS_STEPS = 32  # everything is taken at the first steps
MAX_PENDING = 4096  # batches without an optimizer step; more is an evaluation
MAX_PENDING_BYTES = 8 << 20
MAX_EARLY_BYTES = 8 << 20  # rows kept before the process has proven to be a rank
MAX_EARLY_EVENTS = 2000
LIST_STEPS = 8  # a write(2) costs as much as all else a step does
MAX_WAITING_LISTS = 64
BUDGET_NS = 100_000  # law 3
BUDGET_SHARE = 0.01
BUDGET_STEPS = 64
WRITE_STEPS = 16
WRITE_SECONDS = 0.05
MAX_BACKOFF = 12
U32 = 0xFFFF_FFFF
U16 = 0xFFFF

# Plain integers: arithmetic on IntFlag members costs a microsecond each.
NOGRAD = int(BatchFlag.NOGRAD)
TRAIN_LAST, TRAIN_CO = int(BatchFlag.TRAIN_LAST), int(BatchFlag.TRAIN_CO)
GRAD, SYNC = int(ForwardFlag.GRAD), int(ForwardFlag.SYNC)
HAS_PARAMS, HAS_GRADS = int(StepFlag.HAS_PARAMS), int(StepFlag.HAS_GRADS)
HAS_LOCAL_GRAD, ALL_STEPPED = int(StepFlag.HAS_LOCAL_GRAD), int(StepFlag.ALL_STEPPED)

_journal = hook("journal")
_channel = hook("channel")


def is_due(step: int, every: int = 1, backoff: int = 0) -> bool:
    """Whether the dear signals are taken at this step.

    The sets are nested powers of two, so two ranks that back off differently still share steps.
    """
    if step < ALWAYS_STEPS:
        return step % every == 0
    period = 16 if step < 512 else 64 if step < 8192 else 256
    period = max(period << backoff, 1 << (every - 1).bit_length())
    return step % period == 0


@dataclass(slots=True, eq=False)
class Iteration:
    """One iterator of a loader."""

    number: int
    loader: int
    expected: int | None = None  # batches of a whole epoch; frameworks stop there without StopIteration
    num_batches: int = 0
    num_samples: int = 0
    index_digest: int | None = None
    content_digest: int | None = 0
    lists_dropped: bool = False
    exhausted: bool = False
    ended: bool = False
    nograd: bool = False  # the last delivery was under no_grad
    nograd_forward: bool = False  # a wrapped forward under no_grad ran since
    mark: int = 0  # BatchFlag of training, since the last step


@dataclass(slots=True, eq=False)
class Batch:
    """One delivered batch, held until its step is known."""

    serial: int
    iteration: Iteration
    ordinal: int
    num_samples: int
    wait_us: int
    flags: int
    worker: int
    content: int
    indices: bytes | None = None  # int64, little-endian
    index: int = 0  # digest of ``indices``, made when the row is packed
    lists: list[tuple[ListKind, bytes]] = field(default_factory=list)
    sizes: frozenset[int] = frozenset()  # numbers per sample of its parts


@dataclass(slots=True, eq=False)
class Forward:
    """One forward of the outermost wrapper."""

    serial: int
    wrapper: int
    flags: int
    num_samples: int
    content: int = 0
    forward_us: int = 0
    lists: list[tuple[ListKind, bytes]] = field(default_factory=list)
    late: Callable[[bool], bool] | None = None  # fills content from the device; see device_digest
    late_at: tuple[int, int] = (0, 0)  # step and micro, while it waits for the device


@dataclass(slots=True, eq=False)
class Step:
    """What the optimizer hook knows of one step."""

    optimizer: int
    learning_rate: float
    params: int = 0
    grads: int = 0
    optimizer_us: int = 0
    grad_list: bytes = b""
    late: Callable[[bool], bool] | None = None


def _clip(value: float, top: int = U32) -> int:
    return 0 if value < 0 else min(int(value), top)


def host_key() -> str:
    """Hex digest of host name and boot id: tells hosts apart, names none."""
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return hashlib.blake2b(f"{socket.gethostname()} {boot}".encode(), digest_size=8).hexdigest()


LAUNCHERS = (
    ("TORCHELASTIC_RUN_ID", "torchrun"),
    ("OMPI_COMM_WORLD_RANK", "mpi"),
    ("PMI_RANK", "mpi"),
    ("SLURM_PROCID", "slurm"),
)
OTHER_FRAMEWORKS = (
    "horovod", "deepspeed", "mpi4py", "jax", "ray", "byteps", "colossalai", "megatron", "bagua", "hivemind",
    "fairscale",
)  # fmt: skip


def _number(*names: str) -> int | None:
    for name in names:
        with contextlib.suppress(KeyError, ValueError):
            return int(os.environ[name])
    return None


class Probe:
    """The one object that holds what this process knows."""

    def __init__(self) -> None:
        self.settings = options.from_environment()
        self.clear()
        self.generation_calls = 0

    def clear(self) -> None:
        """As at the start of a process; also in the child of a fork."""
        self.role = "undecided" if self.settings is not None else "off"
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.start_time = time.time()
        self.journal: JournalWriter | None = None
        self.channel: Any = None
        self.rank = 0
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.rows: list[bytes] = []
        self.lists: list[tuple[bytes, Iteration | None]] = []
        self.early_bytes = 0
        self.serial = 0
        self.pending: list[Batch] = []
        self.pending_bytes = 0
        self.forwards: list[Forward] = []
        self.unwritten: list[tuple[list[Batch], list[Forward], Step, int, int, tuple[Any, ...]]] = []
        self.written_at = 0.0
        self.data_ranks: tuple[int, ...] | None = None
        self.late: list[Forward | tuple[Step, int, int, tuple[Any, ...]]] = []
        self.waiting: list[tuple[Any, Any]] = []  # (arrived, then) of device_digest.when_arrived
        self.iterations: list[Iteration] = []
        self.num_iterations = 0
        self.dead: deque[Iteration] = deque()
        self.candidates: list[Iteration] = []
        self.newest: Iteration | None = None
        self.round = -1
        self.due_next = True  # ``due(round + 1)``, asked several times per step
        self.stepped: set[int] = set()
        self.first_optimizers: set[int] = set()
        self.since: set[int] = set()
        self.counted = 0
        self.num_backwards = 0
        self.num_forwards = 0
        self.num_sync_forwards = 0
        self.wait_ns = 0
        self.forward_ns = 0
        self.backward_ns = 0
        self.local_grad = 0
        self.spent_before = CLOCK.spent_ns
        self.window_start: tuple[float, int, int] | None = None
        self.backoff = 0
        self.stopped = False
        self.left = False
        self.final_params: int | None = None
        self.num_other_collectives = 0
        self.wrapper_seen = False
        self.last_content = 0
        self.at_exit: list[Callable[[], None]] = list(getattr(self, "at_exit", ()))

    # ------------------------------------------------------------- roles

    def become_worker(self) -> None:
        """A loader worker: silent for ever."""
        Hook.silent = True
        self.role = "worker"
        self.drop()

    def drop(self) -> None:
        """Forget all that was buffered."""
        self.events, self.rows, self.lists, self.pending, self.forwards = [], [], [], [], []
        self.unwritten = []

    def forked(self) -> None:
        """In the child of a fork: undecided again, with a lock of its own."""
        if self.settings is None:
            return
        journal = self.journal
        if journal is not None:
            with contextlib.suppress(OSError):
                journal.close()  # closes the child's copy of the descriptor only
        for call in _after_fork:
            with contextlib.suppress(Exception):
                call()
        self.clear()
        for item in guard.all_hooks():
            item.reported = 0

    def prove(self, proof: str) -> None:
        """This process is a rank: open its journal and write what was buffered.

        Args:
            proof: group, wrapper or optimizer.
        """
        if self.role != "undecided" or self.settings is None:
            return
        with self.lock:
            if self.role != "undecided":
                return
            self.role = "rank"
            self._open(proof)

    def _open(self, proof: str) -> None:
        settings = self.settings
        assert settings is not None
        torch = sys.modules["torch"]
        dist = sys.modules.get("torch.distributed")
        has_group = bool(dist is not None and dist.is_available() and dist.is_initialized())
        if has_group and dist is not None:
            rank, world = int(dist.get_rank()), int(dist.get_world_size())
        else:
            found = _number("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
            size = _number("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
            rank, world = (found, size) if found is not None and size is not None else (0, 1)
        self.rank = rank
        local_rank = _number("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
        restart = _number("TORCHELASTIC_RESTART_COUNT") or 0
        folder = settings.journal_folder
        opened = self._open_channel(rank, world, local_rank, restart, has_group)
        if opened is not None:
            folder = opened
        try:
            if _journal.broken:
                raise guard.BrokenForTestError
            tag = f"{host_key()[:4]}{int(self.start_time * 1000) & 0xFFFFFF:06x}"
            name = file_name(rank, restart, os.getpid(), tag)
            self.journal = JournalWriter(folder, name, settings.cap_bytes)
        except Exception as error:
            self._journal_failed(error)
            return
        launcher = next((word for name, word in LAUNCHERS if name in os.environ), None)
        fields = {
            "rank": rank,
            "world_size": world,
            "local_rank": local_rank,
            "restart": restart,
            "pid": os.getpid(),
            "host_key": host_key(),
            "start": self.start_time,
            "proof": proof,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "hash_name": digest.HASH_NAME,
            "launcher": launcher,
            "other_frameworks": [name for name in OTHER_FRAMEWORKS if name in sys.modules],
            "run_id": self.channel.run_id if self.channel is not None else settings.run_id,
            "form": settings.form,
        }
        self._write_event("start", fields)
        for name, values in self.events:
            self._write_event(name, values)
        self.events = []
        for item in guard.all_hooks():
            self.hook_changed(item)
        self.flush()
        self._register_exit()
        if rank == 0 and settings.form == "rank":
            with contextlib.suppress(Exception):
                from ddp_audit.boot.watch import start_watcher

                start_watcher(settings)

    def _open_channel(self, rank: int, world: int, local_rank: int | None, restart: int, has_group: bool) -> Any:
        try:
            if _channel.broken:
                raise guard.BrokenForTestError
            from ddp_audit.collect.channel import Identity, open_channel

            identity = Identity(
                rank=rank, world_size=world, local_rank=local_rank, restart=restart, has_group=has_group
            )
            assert self.settings is not None
            self.channel = open_channel(self.settings, identity)
            self.channel.data_ranks = self.data_ranks
            return self.channel.folder
        except Exception as error:
            _channel.failed(error)
            self.channel = None
            return None

    def _register_exit(self) -> None:
        """Both: multiprocessing children leave by ``os._exit`` and run no atexit functions."""
        from multiprocessing import util

        atexit.register(self.leave)
        util.Finalize(None, self.leave, exitpriority=10)

    # ------------------------------------------------------------- journal

    def _journal_failed(self, error: BaseException) -> None:
        """A full disk or a read-only folder: the job goes on, without a journal."""
        # First of all it is gone: noting the failure would write to it again.
        journal, self.journal = self.journal, None
        _journal.failed(error)
        _journal.off = True
        if journal is not None:
            with contextlib.suppress(OSError):
                journal.close()
        self.drop()

    def _write_event(self, name: str, fields: dict[str, Any]) -> None:
        if self.journal is None:
            return
        try:
            self.journal.event(name, fields)
        except OSError as error:
            self._journal_failed(error)

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """A rare event: written at once, or buffered until the process has proven to be a rank."""
        with self.lock:
            if self.role == "rank":
                self._write_event(name, fields)
            elif self.role == "undecided" and len(self.events) < MAX_EARLY_EVENTS:
                self.events.append((name, fields))

    def hook_changed(self, item: Hook) -> None:
        """Write the state of a hook that failed or is off."""
        if item.reason is None or self.role != "rank" or (item.reported and item.reported == item.num_errors):
            return
        item.reported = max(item.num_errors, 1)
        self.event("hook", asdict(HookState(hook=item.name, reason=item.reason, num_errors=item.num_errors)))

    def flush(self, with_lists: bool = True) -> None:
        """Hand buffered rows to the kernel.

        Args:
            with_lists: also the sample lists, which may lag a few steps behind their rows.
        """
        if self.unwritten:
            self._pack()
        if self.role != "rank":
            if self.early_bytes > MAX_EARLY_BYTES:
                self.rows, self.lists, self.early_bytes = [], [], 0
            return
        rows, self.rows = self.rows, []
        lists: list[tuple[bytes, Iteration | None]] = []
        if with_lists or len(self.lists) > MAX_WAITING_LISTS:
            lists, self.lists = self.lists, []
        self.early_bytes = 0
        if self.journal is None:
            return
        try:
            if lists and not self.journal.lists(b"".join([data for data, _ in lists])):
                for _, iteration in lists:
                    if iteration is not None:
                        iteration.lists_dropped = True
            if rows:
                self.journal.rows(b"".join(rows))
        except OSError as error:
            self._journal_failed(error)

    def _row(self, kind: int, payload: bytes) -> None:
        self.rows.append(frame(kind, payload))
        if self.role != "rank":
            self.early_bytes += len(payload)

    def _list(self, serial: int, kind: ListKind, values: bytes, iteration: Iteration | None = None) -> None:
        self.lists.append((list_frame(serial, kind, values), iteration))
        if self.role != "rank":
            self.early_bytes += len(values)

    def next_serial(self) -> int:
        """One running number for batches, forwards and steps."""
        number = self.serial
        self.serial += 1
        return number

    # ------------------------------------------------------------- schedule

    @property
    def every(self) -> int:
        """``--every``, at least 1."""
        return max(1, self.settings.every) if self.settings is not None else 1

    def due(self, step: int) -> bool:
        """Whether the dear signals are taken at this step on this rank."""
        return is_due(step, self.every, self.backoff)

    def _watch_budget(self, now: float) -> None:
        """Back off when the probe's own time outgrows law 3; never in the first steps."""
        before, self.window_start = self.window_start, (now, CLOCK.spent_ns, self.round)
        if before is None or self.round <= before[2]:
            return
        steps = self.round - before[2]
        spent = (CLOCK.spent_ns - before[1]) / steps
        budget = max(BUDGET_NS, BUDGET_SHARE * 1e9 * (now - before[0]) / steps)
        if spent > budget and self.backoff < MAX_BACKOFF:
            self.backoff += 1

    # ------------------------------------------------------------- batches

    def begin_iteration(self, loader: int, fields: dict[str, Any], expected: int | None = None) -> Iteration:
        """A new iterator delivers its first batch or is found empty.

        Args:
            fields: of ``IterationInfo`` besides ``iteration`` and ``loader``.
            expected: batches until it is exhausted, where that is known.
        """
        with self.lock:
            self.bury()
            iteration = Iteration(number=self.num_iterations, loader=loader, expected=expected)
            self.num_iterations += 1
            self.iterations.append(iteration)
            self.event("iteration", {**fields, "iteration": iteration.number, "loader": loader})
            if self.journal is not None:
                self.flush()  # lists of the epoch before belong to its segment
                if self.journal is not None:
                    self.journal.next_segment()
            return iteration

    def bury(self) -> None:
        """End the iterations whose iterator was collected."""
        while self.dead:
            self.end_iteration(self.dead.popleft())

    def end_iteration(self, iteration: Iteration) -> None:
        """An iterator is exhausted, abandoned or collected. Idempotent."""
        with self.lock:
            if iteration.ended or iteration not in self.iterations:
                return
            iteration.ended = True
            self.iterations.remove(iteration)
            if iteration.nograd or iteration.nograd_forward:
                self._release(iteration)
            self.flush()
            for batch in self.pending:
                if batch.iteration is iteration:
                    self._digest_indices(batch)  # read ahead: its step is still to come
            self.event(
                "iteration_end",
                {
                    "iteration": iteration.number,
                    "finished": iteration.exhausted or iteration.num_batches == iteration.expected,
                    "num_batches": iteration.num_batches,
                    "num_samples": iteration.num_samples,
                    "index_digest": iteration.index_digest,
                    "content_digest": iteration.content_digest if iteration.num_batches else None,
                    "lists_dropped": iteration.lists_dropped,
                },
            )

    def _release(self, iteration: Iteration) -> None:
        """Write the pending batches of an evaluation without a step."""
        keep: list[Batch] = []
        for batch in self.pending:
            if batch.iteration is iteration and not iteration.mark:
                self._write_batch(batch, NO_STEP)
            else:
                keep.append(batch)
        self.pending = keep
        self.flush()

    def deliver(self, iteration: Iteration, batch: Batch) -> None:
        """The loop got a batch."""
        with self.lock:
            if self.dead:
                self.bury()
            iteration.num_batches += 1
            iteration.num_samples += batch.num_samples
            if not batch.content:
                iteration.content_digest = None
            elif iteration.content_digest is not None:
                iteration.content_digest = (
                    digest.mix((iteration.content_digest * digest._C1 + batch.content) & digest.MASK) or 1
                )
            if self.candidates:
                for other in [c for c in self.candidates if c is not iteration]:
                    if other.exhausted or other.nograd or other.nograd_forward:
                        self.candidates.remove(other)
                        if other.nograd or other.nograd_forward:
                            self._release(other)
                if iteration in self.candidates:
                    self.candidates.remove(iteration)
            self.candidates.append(iteration)
            self.newest = iteration
            iteration.nograd = bool(batch.flags & NOGRAD)
            iteration.nograd_forward = False
            self.pending.append(batch)
            self.pending_bytes += 64 + (len(batch.indices) if batch.indices is not None else 0)
            for _, values in batch.lists:
                self.pending_bytes += len(values)
            if len(self.pending) > MAX_PENDING or self.pending_bytes > MAX_PENDING_BYTES:
                half = len(self.pending) // 2 + 1
                for old in self.pending[:half]:
                    self._write_batch(old, NO_STEP)
                del self.pending[:half]
                self.pending_bytes = sum(
                    64 + len(b.indices or b"") + sum(len(v) for _, v in b.lists) for b in self.pending
                )
                self.flush()

    @staticmethod
    def _digest_indices(batch: Batch) -> None:
        """Digest of a batch's indices, into the batch and its iteration; in order of delivery, once."""
        if batch.indices is not None and not batch.index:
            batch.index = digest.bytes_digest(batch.indices)
            iteration = batch.iteration
            iteration.index_digest = (
                digest.mix(((iteration.index_digest or 0) * digest._C1 + batch.index) & digest.MASK) or 1
            )

    def _write_batch(self, batch: Batch, step: int) -> None:
        self._digest_indices(batch)
        if batch.indices is not None:
            self._list(batch.serial, ListKind.INDEX, batch.indices, batch.iteration)
        self._row(
            BATCH_ROW,
            BATCH_STRUCT.pack(
                batch.serial,
                step,
                batch.iteration.number,
                batch.ordinal,
                batch.num_samples & U32,
                batch.wait_us,
                batch.flags,
                max(-1, min(batch.worker, 0x7FFF)),
                batch.content,
                batch.index,
            ),
        )
        for kind, values in batch.lists:
            self._list(batch.serial, kind, values, batch.iteration)

    def reads_apart_from(self, ranks: tuple[int, ...]) -> None:
        """A wrapper shares gradients over these ranks: they must read different samples."""
        self.data_ranks = ranks
        if self.channel is not None:
            self.channel.data_ranks = ranks

    # ------------------------------------------------------------- forward, backward

    def add_forward(self, forward: Forward) -> None:
        """A wrapped forward has begun."""
        with self.lock:
            self.forwards.append(forward)
            if forward.flags & GRAD:
                self.num_forwards += 1
                self.num_sync_forwards += bool(forward.flags & SYNC)
            else:
                for candidate in self.candidates:
                    candidate.nograd_forward = True
                if self.newest is not None and not self.candidates:
                    self.newest.nograd_forward = True
            if len(self.forwards) > MAX_PENDING:
                for old in self.forwards[: MAX_PENDING // 2]:
                    self._write_forward(old, NO_STEP, 0)
                del self.forwards[: MAX_PENDING // 2]
                self.flush()

    def _write_forward(self, forward: Forward, step: int, micro: int) -> None:
        if forward.late is not None and not forward.late(False):
            self.late.append(forward)
            forward.late_at = (step, micro)
            return
        self._row(
            FORWARD_ROW,
            FORWARD_STRUCT.pack(
                forward.serial,
                step,
                min(micro, U16),
                forward.flags,
                min(forward.wrapper, U16),
                forward.num_samples & U32,
                forward.forward_us,
                forward.content,
            ),
        )
        for kind, values in forward.lists:
            self._list(forward.serial, kind, values)

    def backward(self, spent_ns: int) -> None:
        """``torch.autograd.backward`` returned: what was delivered before it is training data."""
        self.num_backwards += 1
        self.backward_ns += spent_ns
        candidates = self.candidates
        if candidates:
            self.candidates = []
            candidates[-1].mark |= TRAIN_LAST
            for candidate in candidates[:-1]:
                candidate.mark |= TRAIN_CO
        elif self.newest is not None:
            self.newest.mark |= TRAIN_LAST

    # ------------------------------------------------------------- steps

    def open_round(self, optimizer: int) -> int:
        """The round that this optimizer's step belongs to; called before the step."""
        if self.round < 0 or optimizer in self.stepped:
            if self.round >= 0 and self.round < 3:
                self.counted = self.round + 1
                self.since = set()
            self.round += 1
            self.stepped = set()
        self.stepped.add(optimizer)
        return self.round

    def step(self, step: Step) -> None:
        """An optimizer stepped: write what belongs to the step.

        Raises:
            Nothing; the caller asks ``should_stop`` afterwards.
        """
        with self.lock:
            if self.role != "rank":
                self.prove("optimizer")
            if self.dead:
                self.bury()
            number = self.round
            pending, forwards = self.pending, self.forwards
            for batch in pending:
                batch.flags |= batch.iteration.mark
            self.last_content = 0
            if number < ALWAYS_STEPS:
                self.last_content = self._content_of(pending, forwards)
            for iteration in self.iterations:
                iteration.mark = 0
            for batch in pending:
                batch.iteration.mark = 0  # of iterations that have ended meanwhile
            self.pending, self.pending_bytes, self.forwards = [], 0, []
            complete = self._count(step.optimizer, number)
            now = time.time()
            spent = CLOCK.spent_ns
            serial = self.serial
            self.serial = serial + 1
            seen = (
                number,
                self.generation_calls - 1,
                complete,
                self.num_backwards,
                self.num_forwards,
                self.num_sync_forwards,
                now,
                self.wait_ns,
                self.forward_ns,
                self.backward_ns,
                spent - self.spent_before,
            )
            self.unwritten.append((pending, forwards, step, serial, self.local_grad, seen))
            self.spent_before = spent
            self.num_backwards = self.num_forwards = self.num_sync_forwards = 0
            self.wait_ns = self.forward_ns = self.backward_ns = 0
            self.local_grad = 0
            if self.waiting:
                self._ask_waiting()
            # Packing several steps at once costs a fraction of packing each in a cold cache. A job
            # that is killed loses at most its last 50 ms.
            if number < ALWAYS_STEPS or len(self.unwritten) >= WRITE_STEPS or now - self.written_at > WRITE_SECONDS:
                self.written_at = now
                self.flush(number % LIST_STEPS == 0 or number < ALWAYS_STEPS)
            if number >= ALWAYS_STEPS and not number % BUDGET_STEPS:
                self._watch_budget(now)
            self.due_next = self.due(number + 1)

    @staticmethod
    def _content_of(pending: list[Batch], forwards: list[Forward]) -> int:
        """Digest of what was read for this step, for the live warning; 0 = not taken."""
        marked = [b for b in pending if b.iteration.mark]
        contents = [b.content or (digest.bytes_digest(b.indices) if b.indices is not None else 0) for b in marked]
        if not contents:
            contents = [f.content for f in forwards if f.flags & GRAD and f.content]
        if not contents:
            return 0
        return contents[0] if len(contents) == 1 else digest.combine(contents)

    def _pack(self) -> None:
        """Make rows of the steps that wait for it."""
        unwritten, self.unwritten = self.unwritten, []
        for pending, forwards, step, serial, local_grad, seen in unwritten:
            number = seen[0]
            for batch in pending:
                self._write_batch(batch, number)
            for micro, forward in enumerate(forwards):
                self._write_forward(forward, number, micro)
            if step.late is not None and not step.late(False):
                self.late.append((step, serial, local_grad, seen))
            else:
                self._write_step(step, serial, local_grad, seen)
        if self.late:
            self._write_late(False)

    def _write_step(self, step: Step, serial: int, local_grad: int, seen: tuple[Any, ...]) -> None:
        number, generation, complete, num_backwards, num_forwards, num_sync_forwards, now, *times = seen
        wait, forward, backward, spent = (_clip(value / 1000) for value in times)
        flags = (
            (HAS_PARAMS if step.params else 0)
            | (HAS_GRADS if step.grads else 0)
            | (HAS_LOCAL_GRAD if local_grad else 0)
            | (ALL_STEPPED if complete else 0)
        )
        self._row(
            STEP_ROW,
            STEP_STRUCT.pack(
                serial,
                number,
                min(step.optimizer, U16),
                max(0, generation),
                flags,
                min(num_backwards, U16),
                min(num_forwards, U16),
                min(num_sync_forwards, U16),
                step.learning_rate,
                step.params,
                step.grads,
                local_grad,
                now,
                wait,
                forward,
                backward,
                step.optimizer_us,
                spent,
            ),
        )
        if step.grad_list:
            self._list(serial, ListKind.GRADS, step.grad_list)

    def _write_late(self, last: bool) -> None:
        """Write rows whose digests have come back from the device; at the end, all."""
        waiting, self.late = self.late, []
        for item in waiting:
            if isinstance(item, Forward):
                if item.late is not None and not item.late(last) and not last:
                    self.late.append(item)
                    continue
                item.late = None
                step, micro = item.late_at
                self._write_forward(item, step, micro)
            else:
                record, serial, local_grad, seen = item
                if record.late is not None and not record.late(last) and not last:
                    self.late.append(item)
                    continue
                self._write_step(record, serial, local_grad, seen)

    def _ask_waiting(self) -> None:
        """Events whose values come back from a device."""
        waiting, self.waiting = self.waiting, []
        for arrived, then in waiting:
            values = arrived(False)
            if values is None:
                self.waiting.append((arrived, then))
            else:
                then(values)

    def _count(self, optimizer: int, number: int) -> bool:
        """Whether a step in the sense of ``--steps`` is complete now."""
        if number < 3:
            self.first_optimizers.add(optimizer)
        self.since.add(optimizer)
        if not self.since >= self.first_optimizers:
            return False
        self.since = set()
        if number >= 3:
            self.counted += 1
        return True

    def should_stop(self) -> bool:
        """After each step: tell the channel how far this rank is, and whether all agreed to leave now."""
        channel = self.channel
        if channel is None:
            return False
        channel.step_done(self.round, self.last_content, self.counted)
        if channel.stop_at is None or self.stopped or self.counted < channel.stop_at:
            return False
        if not channel.confirm_stop(self.counted):
            return False
        self.stopped = True
        self.event("stopped", {"step": self.round})
        return True

    # ------------------------------------------------------------- leaving

    def leave(self) -> None:
        """Write what is left and close. Once per process."""
        if self.left or self.role != "rank" or os.getpid() != self.pid:
            return
        self.left = True
        for call in self.at_exit:
            with contextlib.suppress(Exception):
                call()
        path = self.journal.path if self.journal is not None else None
        try:
            with self.lock:
                self.bury()
                for iteration in list(self.iterations):
                    self.end_iteration(iteration)
                for batch in self.pending:
                    batch.flags |= batch.iteration.mark
                    self._write_batch(batch, NO_STEP)
                self.pending = []
                for micro, forward in enumerate(self.forwards):
                    self._write_forward(forward, NO_STEP, micro)
                self.forwards = []
                self._write_late(True)
                self._ask_waiting()
                self.flush()
                for item in guard.all_hooks():
                    self.hook_changed(item)
                self.event(
                    "final",
                    {
                        "final_params": self.final_params,
                        "num_other_collectives": self.num_other_collectives,
                        "capped": bool(self.journal is not None and self.journal.capped),
                    },
                )
                self.event("end", {"time": time.time()})
                if self.journal is not None:
                    self.journal.close()
                    self.journal = None
        except Exception as error:
            _journal.failed(error)
        if self.channel is not None:
            with contextlib.suppress(Exception):
                self.channel.close(path)
        if self.rank == 0 and self.settings is not None and self.settings.form == "rank":
            with contextlib.suppress(Exception):
                from ddp_audit.boot.watch import await_verdict

                await_verdict(self.settings)


_after_fork: list[Callable[[], None]] = []


def after_fork(call: Callable[[], None]) -> None:
    """Have something forgotten in the child of a fork."""
    _after_fork.append(call)


PROBE = Probe()
if PROBE.role == "off":
    Hook.silent = True
guard.on_change = PROBE.hook_changed
os.register_at_fork(after_in_child=PROBE.forked)


def record_samples(ids: Any) -> None:
    """Behind ``ddp_audit.record_samples``: ids of a hand-written batch, as level L1 of this step."""
    _record(ids)


def _record_samples(ids: Any) -> None:
    import numpy as np

    if digest.is_tensor(ids):
        if ids.device.type != "cpu":
            raise TypeError("ids on a device")
        values = np.array(ids.reshape(-1).tolist(), dtype=np.int64)
    else:
        values = np.array(list(ids) if not isinstance(ids, np.ndarray) else ids.reshape(-1), dtype=np.int64)
    data = values.tobytes()
    forward = Forward(
        serial=PROBE.next_serial(),
        wrapper=0,
        flags=int(ForwardFlag.RECORDED | ForwardFlag.HAS_DIGESTS),
        num_samples=len(values),
        content=digest.bytes_digest(data),
        lists=[(ListKind.RECORDED, data)],
    )
    with PROBE.lock:
        PROBE.forwards.append(forward)


_record = hook("record_samples").protect(_record_samples)
