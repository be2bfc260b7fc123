"""DDP105: several loader workers of one rank yield the same samples."""

from __future__ import annotations

import numpy as np

from ddp_audit.checks.common import (
    LOADER_HOOKS,
    dataset_word,
    finding,
    inconclusive,
    no_loader,
    not_applicable,
    percent,
    ranks_text,
)
from ddp_audit.checks.streams import Epoch, RankView, View, epoch_of, whole_table
from ddp_audit.records import CheckInfo, Finding, Level, Outcome, Severity

LIMIT = 0.95  # share of samples that come once from each worker; the tail of a cut epoch takes the rest
MIN_SAMPLES = 8  # distinct samples; fewer repeat by chance in small streams

CHECK = CheckInfo(
    id="DDP105",
    kind="duplicates-across-workers",
    severity=Severity.ERROR,
    title="Loader workers of a rank share the stream",
    failure_title="Loader workers yield the same samples",
    why="Each of W workers reads the whole share of its rank: an epoch holds every sample W times.",
    explanation=(
        "For iterable data sets with two or more workers, the copies of each sample inside one rank and one epoch are "
        "counted, by content. The check fails when at least 95 % of the samples come exactly once from every worker. "
        "Oversampling, repeated augmentation or double rows give other counts, or copies from one and the same worker."
    ),
    needs="L2 with a leading batch axis, the worker of each batch",
    fix="in __iter__: info = get_worker_info(); take items rank * info.num_workers + info.id, step world * workers",
    broken="""def __iter__(self):
    return islice(self.rows(), rank, None, world_size)  # every worker yields all of it""",
    fixed="""def __iter__(self):
    info = get_worker_info()
    workers, worker = (info.num_workers, info.id) if info else (1, 0)
    return islice(self.rows(), rank * workers + worker, None, world_size * workers)""",
)


def _copied(epoch: Epoch, num_workers: int) -> tuple[float, int]:
    """Share of distinct samples that came exactly once from each worker, and their number."""
    assert epoch.samples is not None
    names, inverse, counts = np.unique(epoch.samples, return_inverse=True, return_counts=True)
    pairs = np.unique(np.stack([inverse, epoch.workers], axis=1), axis=0)
    from_workers = np.bincount(pairs[:, 0], minlength=len(names))
    hit = (counts == num_workers) & (from_workers == num_workers)
    return float(hit.mean()), len(names)


def _rank(view: RankView) -> tuple[str, float, Epoch] | None:
    """(word, share, epoch) of the worst epoch of a rank; ``None`` when nothing applies."""
    worst: tuple[str, float, Epoch] | None = None
    for number in view.training:
        loader = view.loaders.get(view.iterations[number].loader)
        if loader is None or not loader.dataset_iterable or loader.num_workers < 2:
            continue
        epoch = epoch_of(view, number, Level.L2)
        if epoch.samples is None or not len(epoch.samples):
            found = ("unlisted", -1.0, epoch)
        elif bool((epoch.workers < 0).any()):
            found = ("unattributed", -0.5, epoch)
        else:
            share, distinct = _copied(epoch, loader.num_workers)
            if distinct < MIN_SAMPLES:
                found = ("short", 0.0, epoch)
            elif not epoch.whole and share >= LIMIT and not _confirmed(view, epoch):
                found = ("windowed", share, epoch)
            else:
                found = ("counted", share, epoch)
        if worst is None or found[1] > worst[1]:
            worst = found
    return worst


def _confirmed(view: RankView, epoch: Epoch) -> bool:
    """Copies by windowed digests are copies by whole ones too, where both were taken."""
    table = whole_table(view)
    if table is None or epoch.samples is None:
        return table is None
    windowed, whole = table
    known = np.isin(epoch.samples, windowed)
    return bool(known.any()) and len(np.unique(whole)) == len(windowed)


def run(view: View) -> Finding:
    """Count from how many workers of its rank each sample of an epoch came."""
    found = {rank: _rank(rank_view) for rank, rank_view in view.ranks.items()}
    judged = {rank: item for rank, item in found.items() if item is not None}
    if not judged and view.hook_off(*LOADER_HOOKS) is not None:
        return no_loader(CHECK, view)
    if not judged:
        return not_applicable(CHECK, "No iterable data set is read by two or more workers.")
    counted = {rank: item for rank, item in judged.items() if item[0] == "counted"}
    bad = {rank: item for rank, item in counted.items() if item[1] >= LIMIT}
    unit = "share of samples that come once from every worker"
    if bad:
        rank, (_, share, epoch) = max(bad.items(), key=lambda item: item[1][1])
        assert epoch.loader is not None
        assert epoch.samples is not None
        workers = epoch.loader.num_workers
        data = dataset_word(epoch.loader)
        return finding(
            CHECK,
            Outcome.FAIL,
            f"{ranks_text(bad).capitalize()}: each of {workers} loader workers yields the same samples; "
            f"{len(epoch.samples)} reads of rank {rank} are {len(np.unique(epoch.samples))} samples, "
            f"{percent(share)} of them read {workers} times.",
            cause=f"{data} is split by rank but not by loader worker",
            fix=f"in {data}.__iter__ split by get_worker_info() too: item rank * {workers} + worker, "
            f"step world_size * {workers}",
            ranks=tuple(sorted(bad)),
            measured=share,
            limit=LIMIT,
            unit=unit,
            levels=(Level.L2,),
            location=epoch.loader.location,
            steps=(epoch.first_step,) if epoch.first_step is not None else (),
        )
    if counted:
        share = max(item[1] for item in counted.values())
        return finding(
            CHECK,
            Outcome.PASS,
            f"{percent(share)} of the samples come once from every worker.",
            ranks=tuple(sorted(counted)),
            measured=share,
            limit=LIMIT,
            unit=unit,
            levels=(Level.L2,),
        )
    words = {item[0] for item in judged.values()}
    why = {
        "unlisted": "batches with a leading batch axis, so that samples can be told apart",
        "unattributed": "the worker that made each batch",
        "short": f"at least {MIN_SAMPLES} distinct samples in an epoch",
        "windowed": "samples of which every byte can be hashed",
    }[sorted(words)[0]]
    return inconclusive(CHECK, f"Workers of {ranks_text(judged)} cannot be compared.", why, ranks=tuple(sorted(judged)))
