"""How fast an iteration is, against torch.distributed.pipelining: the same model, order and data.

    python benchmarks/executor_speed.py [--pairs N] [--only TEXT...] [--all] [--numerics bitwise]

A case runs on both runtimes in the same processes, one process a rank, in pairs: some iterations
of one, then as many of the other, in alternating order. First both must have the same gradients.
An iteration is F, B and W of 8 micro-batches of a LLaMA of 5.7 M parameters, from a common start to
the end of the last rank; no reduction, vote or update is in it. Orders are torch's own, imported.

"as shipped" is torch with a plain module and its own split of the backward, "dw_builder" torch with
our layers, so that only the runtimes differ. "ours/torch" is the median over the pairs of the ratio
of wall-clock times, "CPU" that of the CPU times of all ranks. Pairs during which other processes
used more than a tenth of a core do not count, unless too few others are left: then all do, and the
number of quiet ones says so.

Our sums of gradients are those of the numerics `fast` unless told otherwise: like torch's, one for
all micro-batches. `bitwise` adds them along a tree.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from executor_cases import SCHEDULES, Case
from executor_ours import Ours, plan_of
from executor_peer import Peer
from result_file import Row, print_table
from torch._C._distributed_c10d import PrefixStore, TCPStore

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "fleet"))
from fleet import Fleet
from run_work import Site, generation

QUIET_CORES = 0.1
LEAST_QUIET_PAIRS = 3
SAMPLE_S = 0.4
"""Iterations of one side of a pair take about this long."""
TOLERANCE = 1e-4
"""Of a gradient, relative to its largest element: sums are in another order."""


class Task(NamedTuple):
    """What the ranks are asked."""

    case: Case
    deferred: bool
    """Whether torch gets a `dw_builder`."""
    numerics: str
    num_pairs: int


class Sample(NamedTuple):
    """Iterations of one runtime on one rank."""

    starts_s: list[float]
    ends_s: list[float]
    """Monotonic clock, which the processes of a machine share."""
    cpu_s: float
    """Of this process."""
    busy_s: float
    """Of all processes of the machine."""


class Measured(NamedTuple):
    """What one rank brings home from one case."""

    difference: float
    """Largest of any gradient, relative to its largest element."""
    pairs: list[tuple[Sample, Sample]]
    """Ours and torch's."""


class Pair(NamedTuple):
    """Ratios ours/torch of one pair, over all ranks."""

    wall: float
    cpu: float
    ours_s: float
    """Wall-clock time of one iteration."""
    foreign_cores: float


# --- on a rank


async def compare(site: Site) -> Measured:
    """One case on one rank."""
    task: Task = site.argument
    case = task.case
    async with generation(site):
        store = TCPStore(site.store.host, site.store.port, is_master=False, wait_for_workers=False)
        prefix = PrefixStore(f"peer{site.generation}", store)
        dist.init_process_group("gloo", store=prefix, rank=site.rank, world_size=case.num_ranks)
        peer = Peer(case, site.rank, deferred=task.deferred)
        ours = Ours(case, site.rank, peer.order, task.numerics)
        await site.device.connect(ours.peers)
        measured = await _measure(site, peer, ours, task.num_pairs)
        dist.destroy_process_group()
        return measured


async def _measure(site: Site, peer: Peer, ours: Ours, num_pairs: int) -> Measured:
    interpreter = ours.interpreter(site.device)
    steps = iter(range(1 << 30))

    async def one_of_ours() -> None:
        await interpreter.run(next(steps))

    async def one_of_theirs() -> None:
        peer.run()

    await _sample(one_of_theirs, 1)
    await _sample(one_of_ours, 1)
    difference = _difference(ours, peer)
    count = _agreed_count(await _sample(one_of_ours, 2))
    await _sample(one_of_theirs, 2)
    pairs: list[tuple[Sample, Sample]] = []
    for number in range(num_pairs):
        if number % 2:
            theirs = await _sample(one_of_theirs, count)
            pairs.append((await _sample(one_of_ours, count), theirs))
        else:
            mine = await _sample(one_of_ours, count)
            pairs.append((mine, await _sample(one_of_theirs, count)))
    interpreter.discard()
    return Measured(difference, pairs)


async def _sample(run: Callable[[], Awaitable[None]], count: int) -> Sample:
    sample, cpu_s = Sample([], [], 0.0, 0.0), 0.0
    busy_s = _busy_s()
    for _ in range(count):
        dist.barrier()
        cpu_s -= time.process_time()
        sample.starts_s.append(time.monotonic())
        await run()
        sample.ends_s.append(time.monotonic())
        cpu_s += time.process_time()
    dist.barrier()
    return sample._replace(cpu_s=cpu_s, busy_s=_busy_s() - busy_s)


def _busy_s() -> float:
    """CPU time of all processes since the machine started: all but idle and waiting for disks."""
    with open("/proc/stat", encoding="ascii") as file:
        times = [int(part) for part in file.readline().split()[1:9]]
    return (sum(times) - times[3] - times[4]) / os.sysconf("SC_CLK_TCK")


def _agreed_count(sample: Sample) -> int:
    """Iterations in a sample; the same on all ranks."""
    duration = torch.tensor((sample.ends_s[-1] - sample.starts_s[0]) / len(sample.ends_s))
    dist.all_reduce(duration, dist.ReduceOp.MAX)
    return max(1, round(SAMPLE_S / float(duration)))


def _difference(ours: Ours, peer: Peer) -> float:
    expected = peer.gradients()
    assert ours.work.gradients.keys() == expected.keys()
    return max(
        float((ours.work.gradients[name] - grad).abs().max() / grad.abs().max())
        for name, grad in expected.items()
    )


# --- from all ranks


def pairs_of(measured: dict[int, Measured]) -> list[Pair]:
    """What the pairs of samples of all ranks say."""
    ranks = list(measured.values())
    pairs: list[Pair] = []
    for number in range(len(ranks[0].pairs)):
        mine = [rank.pairs[number][0] for rank in ranks]
        theirs = [rank.pairs[number][1] for rank in ranks]
        pairs.append(
            Pair(
                wall=_wall_s(mine) / _wall_s(theirs),
                cpu=_cpu_s(mine) / _cpu_s(theirs),
                ours_s=_wall_s(mine) / len(mine[0].ends_s),
                foreign_cores=max(_foreign_cores(mine), _foreign_cores(theirs)),
            )
        )
    return pairs


def _wall_s(samples: list[Sample]) -> float:
    starts = zip(*(sample.starts_s for sample in samples), strict=True)
    ends = zip(*(sample.ends_s for sample in samples), strict=True)
    return sum(max(end) - min(start) for start, end in zip(starts, ends, strict=True))


def _cpu_s(samples: list[Sample]) -> float:
    return sum(sample.cpu_s for sample in samples)


def _foreign_cores(samples: list[Sample]) -> float:
    busy_s = statistics.mean(sample.busy_s for sample in samples)
    duration_s = max(max(s.ends_s) for s in samples) - min(min(s.starts_s) for s in samples)
    return (busy_s - _cpu_s(samples)) / duration_s


def row_of(case: Case, measured: dict[int, Measured]) -> Row:
    """One row of the table; a case whose gradients differ has no times."""
    difference = max(rank.difference for rank in measured.values())
    if difference > TOLERANCE:
        raise SystemExit(f"{case}: gradients differ by {difference:.2g}")
    pairs = pairs_of(measured)
    quiet = [pair for pair in pairs if pair.foreign_cores < QUIET_CORES]
    counted = quiet if len(quiet) >= LEAST_QUIET_PAIRS else pairs
    walls = sorted(pair.wall for pair in counted)
    return {
        "ours/torch": statistics.median(walls),
        "least": walls[0],
        "most": walls[-1],
        "CPU": statistics.median(pair.cpu for pair in counted),
        "ours, ms": 1e3 * statistics.median(pair.ours_s for pair in counted),
        "quiet pairs": f"{len(quiet)} of {len(pairs)}",
        "gradients differ by": difference,
    }


class Comparison(NamedTuple):
    """One row of the table."""

    case: Case
    deferred: bool

    @property
    def label(self) -> str:
        """Its name."""
        peer = "dw_builder" if self.deferred else "as shipped"
        case = self.case
        return f"{case.schedule_name}, {case.num_tokens} tokens, {case.num_ranks} ranks, {peer}"


def comparisons(*, everything: bool) -> list[Comparison]:
    """All rows; by default, of those that take longest, the ones that say most."""
    found: list[Comparison] = []
    for num_ranks in (4, 2):
        for num_tokens in (32, 256, 1024):
            for schedule in SCHEDULES.values():
                for deferred in (False, True)[: 1 + schedule.splits]:
                    case = Case(schedule.name, num_ranks, num_tokens)
                    is_long = num_tokens == 1024 and (num_ranks == 2 or deferred != schedule.splits)
                    if everything or not is_long:
                        found.append(Comparison(case, deferred))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--pairs",
        type=int,
        default=7,
        help="samples of both sides that alternate (default: %(default)s)",
    )
    parser.add_argument("--only", nargs="*", default=[], help="parts that a row's label must have")
    parser.add_argument("--all", action="store_true", help="also the rest of 1,024 tokens")
    parser.add_argument(
        "--numerics",
        choices=("fast", "bitwise"),
        default="fast",
        help="sums of our side (default: %(default)s)",
    )
    args = parser.parse_args()
    rows: dict[str, Row] = {}
    fleets: dict[int, Fleet] = {}
    for case, deferred in comparisons(everything=args.all):
        label = Comparison(case, deferred).label
        if not all(part in label for part in args.only):
            continue
        if case.num_ranks not in fleets:
            fleets[case.num_ranks] = Fleet(case.num_ranks)
        plan = plan_of(Case("1F1B", case.num_ranks, case.num_tokens), None)
        task = Task(case, deferred, args.numerics, args.pairs)
        rows[label] = row_of(case, fleets[case.num_ranks].run(plan, compare, task))
        print(f"{label}: {rows[label]['ours/torch']:.3f}", file=sys.stderr, flush=True)
    for fleet in fleets.values():
        fleet.end()
    print_table("An iteration, ours against torch.distributed.pipelining", rows)


if __name__ == "__main__":
    main()
