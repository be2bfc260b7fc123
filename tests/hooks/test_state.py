"""The schedule, rounds of optimizers, and which batches are training ones."""

from typing import Any

import pytest

from ddp_audit.hooks import state
from ddp_audit.hooks.state import Batch, Forward, Iteration, Probe, Step, is_due
from ddp_audit.hooks.weak import WeakIdMap
from ddp_audit.records import BatchFlag, ForwardFlag


@pytest.mark.parametrize("every", [1, 3, 10])
def test_schedules_are_nested(every: int) -> None:
    for backoff in range(4):
        more = {s for s in range(5000) if is_due(s, every, backoff)}
        less = {s for s in range(5000) if is_due(s, every, backoff + 1)}
        assert {s for s in less if s >= 32} <= more
    assert all(is_due(s) for s in range(32))
    assert sum(is_due(s) for s in range(10_000)) < 300


class Recorder(Probe):
    """A probe that keeps rows instead of writing them."""

    def __init__(self) -> None:
        super().__init__()
        self.role = "rank"
        self.written: list[tuple[int, int, int]] = []

    def _write_batch(self, batch: Batch, step: int) -> None:
        self.written.append((batch.iteration.number, step, batch.flags & 7))

    def event(self, name: str, fields: dict[str, Any]) -> None:
        pass


def deliver(probe: Probe, iteration: Iteration, flags: int = 0) -> None:
    probe.deliver(
        iteration,
        Batch(
            serial=probe.next_serial(),
            iteration=iteration,
            ordinal=0,
            num_samples=4,
            wait_us=0,
            flags=flags,
            worker=-1,
            content=1,
            index=2,
        ),
    )


def step(probe: Probe, optimizer: int = 0) -> None:
    probe.open_round(optimizer)
    probe.step(Step(optimizer=optimizer, learning_rate=0.1))


LAST, CO, NONE = int(BatchFlag.TRAIN_LAST), int(BatchFlag.TRAIN_CO), state.NO_STEP


def test_validation_between_steps_is_no_training() -> None:
    probe = Recorder()
    train, val = probe.begin_iteration(0, {}), probe.begin_iteration(1, {})
    deliver(probe, train)
    probe.backward(0)
    step(probe)
    for _ in range(2):
        deliver(probe, val)
        probe.add_forward(Forward(serial=0, wrapper=0, flags=0, num_samples=0))
    val.exhausted = True
    probe.end_iteration(val)
    deliver(probe, train)
    probe.add_forward(Forward(serial=0, wrapper=0, flags=int(ForwardFlag.GRAD), num_samples=0))
    probe.backward(0)
    step(probe)
    assert probe.written == [(0, 0, LAST), (1, NONE, 0), (1, NONE, 0), (0, 1, LAST)]


def test_two_loaders_in_one_step() -> None:
    probe = Recorder()
    labelled, unlabelled = probe.begin_iteration(0, {}), probe.begin_iteration(1, {})
    for _ in range(2):
        deliver(probe, labelled)
        deliver(probe, unlabelled)
        probe.backward(0)
        step(probe)
    assert probe.written == [(0, 0, CO), (1, 0, LAST), (0, 1, CO), (1, 1, LAST)]


def test_accumulation_and_two_backwards() -> None:
    probe = Recorder()
    train = probe.begin_iteration(0, {})
    for _ in range(2):
        deliver(probe, train)
        probe.backward(0)
        probe.backward(0)
    step(probe)
    assert probe.written == [(0, 0, LAST), (0, 0, LAST)]


def test_rounds_and_counted_steps() -> None:
    probe = Recorder()
    rounds = []
    for _ in range(6):
        for optimizer in (0, 1):
            step(probe, optimizer)
            rounds.append((probe.round, probe.counted))
    assert [r for r, _ in rounds] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert [c for _, c in rounds][-6:] == [3, 4, 4, 5, 5, 6]


def test_an_optimizer_that_steps_rarely_holds_the_count() -> None:
    probe = Recorder()
    for number in range(20):
        step(probe, 0)
        if number % 2 == 0:
            step(probe, 1)
    assert probe.counted == 3 + 8


def test_weak_map_keeps_nothing_alive_and_asks_no_equality() -> None:
    class Odd:
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise RuntimeError

    died: list[int] = []
    table: WeakIdMap[int] = WeakIdMap(died.append)
    one, two = Odd(), Odd()
    table.set(one, 1)
    table.set(two, 2)
    assert (table.get(one), table.get(two), table.get(Odd())) == (1, 2, None)
    del one
    assert died == [1]
    assert len(table) == 1
