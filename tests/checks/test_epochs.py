"""DDP105 to DDP108: workers, order, length and loss of data over epochs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from evidence_builder import (
    BATCHED,
    RANDOM,
    SEQUENTIAL,
    Rank,
    batches_of,
    distributed,
    evidence,
    finding,
    permutation,
    sampler,
    sharded,
)

from ddp_audit.judge import judge
from ddp_audit.records import Outcome, SamplerInfo, Severity

# --------------------------------------------------------------------------- DDP105


def stream(copies: int, num_workers: int, **fields: object) -> list[Rank]:
    """An iterable split by rank; its batches come from the workers in turn."""
    ranks = []
    for rank in range(2):
        mine = batches_of(list(range(rank, 96, 2)), 4)
        rows = [batch for batch in mine for _ in range(copies)]
        ranks.append(
            Rank(
                epochs=[rows, rows],
                samplers=(),
                index=False,
                dataset_iterable=True,
                dataset_class="Rows",
                num_workers=num_workers,
                workers=lambda ordinal: ordinal % max(num_workers, 1),
                **fields,
            )
        )
    return ranks


def test_workers_that_yield_the_same_rows(tmp_path: Path) -> None:
    found = finding(tmp_path, stream(2, 2), "DDP105")
    assert found.outcome is Outcome.FAIL
    assert found.ranks == (0, 1)
    assert "each of 2 loader workers" in found.message
    assert "96 reads of rank 0 are 48 samples" in found.message
    assert "Rows.__iter__" in (found.fix or "")


def test_copies_within_a_rank_do_not_lower_effective_gpus(tmp_path: Path) -> None:
    audit = judge(evidence(tmp_path, stream(2, 2)), created=0.0)
    assert audit.effective_gpus == 2.0
    assert {item.id for item in audit.checks if item.outcome is Outcome.FAIL} == {"DDP105"}


@pytest.mark.parametrize(
    ("ranks", "outcome"),
    [
        pytest.param(stream(1, 2), Outcome.PASS, id="split"),
        pytest.param(stream(2, 3), Outcome.PASS, id="twice-with-three-workers"),
        pytest.param(
            [replace(r, workers=lambda ordinal: ordinal // 2 % 2) for r in stream(2, 2)],
            Outcome.PASS,
            id="both-copies-from-one-worker",
        ),
        pytest.param([replace(r, workers=lambda _: -1) for r in stream(2, 2)], Outcome.INCONCLUSIVE, id="no-worker"),
        pytest.param(stream(2, 0), Outcome.NOT_APPLICABLE, id="no-workers"),
        pytest.param(
            [replace(r, dataset_iterable=False) for r in stream(2, 2)], Outcome.NOT_APPLICABLE, id="map-style"
        ),
        pytest.param([replace(r, content=False) for r in stream(2, 2)], Outcome.INCONCLUSIVE, id="no-digests"),
    ],
)
def test_workers(tmp_path: Path, ranks: list[Rank], outcome: Outcome) -> None:
    assert finding(tmp_path, ranks, "DDP105").outcome is outcome


# --------------------------------------------------------------------------- DDP106


def test_set_epoch_never_called(tmp_path: Path) -> None:
    ranks = sharded(160, 2, 3, reshuffle=False, set_epoch_calls=0)
    found = finding(tmp_path, ranks, "DDP106")
    assert found.outcome is Outcome.FAIL
    assert found.severity is Severity.WARNING
    assert found.ranks == (0, 1)
    assert "set_epoch is never called" in (found.cause or "")
    assert (
        found.message
        == "Ranks 0 and 1 read the same order in 3 consecutive epochs of 3, though DistributedSampler shuffles."
    )


def test_only_finding_of_a_job_without_set_epoch(tmp_path: Path) -> None:
    audit = judge(evidence(tmp_path, sharded(160, 2, 3, reshuffle=False, set_epoch_calls=0)), created=0.0)
    assert {item.id for item in audit.checks if item.outcome is Outcome.FAIL} == {"DDP106"}
    assert audit.verdict == "warn"


def same_order(
    samplers: tuple[SamplerInfo, ...], length: int = 32, num_epochs: int = 3, **fields: object
) -> list[Rank]:
    return [
        Rank(
            epochs=[batches_of(permutation(length, rank), 4)] * num_epochs,
            samplers=samplers,
            dataset_length=length,
            **fields,
        )
        for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("ranks", "outcome"),
    [
        pytest.param(sharded(160, 2, 3), Outcome.PASS, id="reshuffled"),
        pytest.param(same_order((BATCHED, RANDOM)), Outcome.FAIL, id="random-sampler-seeded-anew"),
        pytest.param(same_order((BATCHED, RANDOM), new_loader_each_epoch=True), Outcome.FAIL, id="loader-built-anew"),
        pytest.param(same_order((BATCHED, SEQUENTIAL)), Outcome.NOT_APPLICABLE, id="sequential"),
        pytest.param(same_order((SamplerInfo(class_name="Curriculum"),)), Outcome.NOT_APPLICABLE, id="own-order"),
        pytest.param(same_order((BATCHED, sampler(64, 0, 2, shuffle=False))), Outcome.NOT_APPLICABLE, id="shuffle-off"),
        pytest.param(same_order((BATCHED, RANDOM), num_epochs=1), Outcome.INCONCLUSIVE, id="one-epoch"),
        pytest.param(same_order((BATCHED, RANDOM), finished=False), Outcome.INCONCLUSIVE, id="cut-short"),
        pytest.param(same_order((BATCHED, RANDOM), length=7), Outcome.INCONCLUSIVE, id="seven-samples"),
        pytest.param(same_order((BATCHED, RANDOM), length=8), Outcome.FAIL, id="eight-samples"),
    ],
)
def test_order_of_epochs(tmp_path: Path, ranks: list[Rank], outcome: Outcome) -> None:
    assert finding(tmp_path, ranks, "DDP106").outcome is outcome


# --------------------------------------------------------------------------- DDP107


def uneven(counts: tuple[int, int], read: tuple[int, int] | None = None, **fields: object) -> list[Rank]:
    """Ranks with ``counts`` batches per epoch, of which the loop takes ``read``."""
    taken = read or counts
    return [
        Rank(
            epochs=[batches_of([1000 * rank + k for k in range(4 * counts[rank])], 4)[: taken[rank]] for _ in range(3)],
            samplers=(BATCHED, SEQUENTIAL),
            dataset_length=4 * counts[rank],
            loader_length=counts[rank],
            finished=taken[rank] == counts[rank],
            content_salt=rank,
            dataset_digest=rank,
            **fields,
        )
        for rank in range(2)
    ]


def test_cut_to_the_shortest_is_an_error(tmp_path: Path) -> None:
    found = finding(tmp_path, uneven((22, 6), (6, 6)), "DDP107")
    assert found.outcome is Outcome.FAIL
    assert found.severity is Severity.ERROR
    assert found.measured == 16
    assert "rank 0 holds 22 batches per epoch and rank 1 6".lower() in found.message.lower()
    assert "skips 16 batches in 3 of 3 epochs" in found.message


def test_own_ends_are_a_warning(tmp_path: Path) -> None:
    """Join: every rank reads to its own end; parameters by step number are not compared."""
    ranks = uneven((15, 3))
    ranks = [replace(r, params=lambda step, r=k: 1000 * (r + 1) + step, final=5) for k, r in enumerate(ranks)]
    audit = judge(evidence(tmp_path, ranks), created=0.0)
    found = {item.id: item for item in audit.checks}
    assert found["DDP107"].outcome is Outcome.FAIL
    assert found["DDP107"].severity is Severity.WARNING
    assert found["DDP207"].outcome is not Outcome.FAIL


@pytest.mark.parametrize(
    ("ranks", "outcome"),
    [
        pytest.param(uneven((10, 10)), Outcome.PASS, id="even"),
        pytest.param(uneven((10, 9)), Outcome.PASS, id="one-apart"),
        pytest.param(uneven((10, 8)), Outcome.FAIL, id="two-apart"),
        pytest.param(uneven((30, 30), (9, 9)), Outcome.INCONCLUSIVE, id="step-limit"),
        pytest.param([uneven((9, 9))[0], Rank(steps=27)], Outcome.NOT_APPLICABLE, id="dispatcher"),
    ],
)
def test_batches_per_epoch(tmp_path: Path, ranks: list[Rank], outcome: Outcome) -> None:
    assert finding(tmp_path, ranks, "DDP107").outcome is outcome


def test_a_hang_is_an_error(tmp_path: Path) -> None:
    """Rank 1 ran out; rank 0 took one more batch and never came back."""
    first, second = uneven((10, 9))
    first = replace(first, epochs=[first.epochs[0][:10]], loader_length=12, finished=False, ended=False, pid=2**22 + 1)
    second = replace(second, epochs=second.epochs[:1])
    found = finding(tmp_path, [first, second], "DDP107")
    assert found.outcome is Outcome.FAIL
    assert found.severity is Severity.ERROR
    assert "never ended" in found.message


# --------------------------------------------------------------------------- DDP108


def dropping(shuffle: bool, *, length: int = 111, size: int = 32, num_epochs: int = 5) -> list[Rank]:
    return [
        Rank(
            epochs=[
                batches_of(distributed(length, rank, 2, e, shuffle=shuffle, drop_last=True), size, drop_last=True)
                for e in range(num_epochs)
            ],
            samplers=(
                replace(BATCHED, drop_last=True),
                sampler(
                    length, rank, 2, shuffle=shuffle, drop_last=True, num_samples=length // 2, total_size=length - 1
                ),
            ),
            dataset_length=length,
            drop_last=True,
        )
        for rank in range(2)
    ]


def test_the_same_rows_dropped_each_epoch(tmp_path: Path) -> None:
    ranks = dropping(False, num_epochs=9)
    found = finding(tmp_path, ranks, "DDP108")
    assert found.outcome is Outcome.FAIL
    assert found.message.startswith("47 of 111 samples (42.3 %) are used in none of 9 epochs")
    assert "BatchSampler and DistributedSampler both drop" in (found.cause or "")


@pytest.mark.parametrize(
    ("ranks", "outcome"),
    [
        pytest.param(dropping(True, num_epochs=9), Outcome.PASS, id="shuffled"),
        pytest.param(dropping(False, length=161, size=10), Outcome.PASS, id="a-row-or-two"),
        pytest.param(dropping(False, length=201, size=10, num_epochs=1), Outcome.INCONCLUSIVE, id="one-epoch"),
        pytest.param(
            [
                replace(r, samplers=(BATCHED, SamplerInfo(class_name="SubsetRandomSampler")))
                for r in dropping(False, num_epochs=9)
            ],
            Outcome.NOT_APPLICABLE,
            id="subset-on-purpose",
        ),
        pytest.param(
            [replace(r, samplers=(BATCHED, replace(RANDOM, num_samples=64))) for r in dropping(False, num_epochs=9)],
            Outcome.NOT_APPLICABLE,
            id="num-samples-on-purpose",
        ),
    ],
)
def test_dropped(tmp_path: Path, ranks: list[Rank], outcome: Outcome) -> None:
    assert finding(tmp_path, ranks, "DDP108").outcome is outcome


@pytest.mark.parametrize(("used", "outcome"), [(90, Outcome.PASS), (89, Outcome.FAIL)])
def test_border_of_dropped(tmp_path: Path, used: int, outcome: Outcome) -> None:
    ranks = [
        Rank(
            epochs=[[[k] for k in range(rank, used, 2)]] * 2,
            samplers=(BATCHED, sampler(100, rank, 2, shuffle=False, drop_last=True)),
            dataset_length=100,
        )
        for rank in range(2)
    ]
    assert finding(tmp_path, ranks, "DDP108").outcome is outcome


def test_a_stream_of_unknown_length_that_hung(tmp_path: Path) -> None:
    """No loader knows its length: rank 1 reached its end, rank 0 had read more and never ended."""
    first, second = (
        Rank(
            epochs=[batches_of(range(1000 * rank, 1000 * rank + 4 * num), 4)],
            samplers=(),
            index=False,
            dataset_iterable=True,
            finished=rank == 1,
            ended=rank == 1,
            pid=2**22 + 1 + rank,
        )
        for rank, num in enumerate((13, 12))
    )
    found = finding(tmp_path, [first, second], "DDP107")
    assert found.outcome is Outcome.FAIL
    assert found.severity is Severity.ERROR
