"""What surviving costs while nothing fails: a step of a job beside one without anything around it.

    python benchmarks/fault_free.py [--rounds N] [--steps N] [--ranks 2,8]

"bare" are the executors' sessions alone, on the same plan, model and data: no supervisors, monitor
or coordinator, no beats, no snapshots, nothing written. "watched" is `resihp train` without copies
of the state; "everything" has them as a job file has that says nothing of them, and an audit every
tenth step; "each step" a copy after every step. A step is the time from the first instruction of
rank 0 in an iteration to that in the next one, the mean of a run, since only some iterations have
a copy beside them. All take turns, there and back, for a machine's speed drifts; ratios are of the
same round, and their middle is what counts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "fleet"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "executor"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "ir"))

from fleet import Fleet
from options import at_least, some_of
from parity_crew import TrainTo, leave, session_of
from run_work import Site

from resihp.config import JobConfig, loads
from resihp.executor.data import load_dataset
from resihp.executor.packing import Packing
from resihp.executor.sampler import GlobalBatches, Sampler
from resihp.executor.state import TrainState
from resihp.ir.model import Plan
from resihp.ir.parser import parse
from resihp.monitor.observations import observations
from resihp.monitor.planner import Planner
from resihp.wire.messages import Commit, Message, Observed, StepDone

LAYOUTS = {2: "tp = 1\npp = 2\ndp = 1", 8: "tp = 2\npp = 2\ndp = 2"}
"""By number of ranks."""
STATES = {
    "watched": "snapshot_every = 0\naudit_every = 0",
    "everything": "audit_every = 10",
    "each step": "snapshot_every = 1\naudit_every = 10",
}
WARM_UP = 5
"""Iterations that do not count: by then the cost of copies is known."""


class Times(NamedTuple):
    """Mean step of each way to run, ms, by round."""

    bare: list[float]
    others: Mapping[str, list[float]]


async def train_bare(site: Site) -> list[Observed]:
    """One rank of a fleet: train to the end of the job; the times of its iterations."""
    order: TrainTo = site.argument
    messages: list[Message] = []
    state = site.memory["state"] = TrainState(order.job)
    session = session_of(site, order, state, messages.append, _batches_of(order.job))
    session.joining.opened(site.store)
    session.joining.went()
    with contextlib.redirect_stdout(None):  # its log
        await session.run()
    site.memory["session"] = session
    steps = [message.observed for message in messages if isinstance(message, StepDone)]
    return [observed for observed in steps if observed is not None]


def _batches_of(job: JobConfig) -> GlobalBatches:
    packing = Packing(load_dataset(job.data.source), job.batch.tokens, job.job.seed)
    sampler = Sampler(packing.num_windows, job.job.seed)
    return GlobalBatches(packing, sampler, job.parallel.dp, job.batch.microbatches)


def job_text(num_ranks: int, num_steps: int, state: str, folder: Path) -> str:
    """A job whose step takes some tenths of a second."""
    return f"""
[job]
name = "fault-free"
steps = {num_steps}
runs_dir = "{folder}"
[model]
hidden_size = 192
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 4
intermediate_size = 512
vocab_size = 258
[parallel]
{LAYOUTS[num_ranks]}
schedule = "1f1b"
[batch]
microbatches = {16 // num_ranks}
tokens = 512
[state]
{state}
"""


def step_ms(seen: Iterable[Observed]) -> float:
    """Mean time between the begins of iterations."""
    begins_ns = [begin_ns(each) for each in sorted(seen, key=lambda each: each.step)]
    counted = begins_ns[WARM_UP:]
    return 1e-6 * (counted[-1] - counted[0]) / (len(counted) - 1)


def begin_ns(observed: Observed) -> int:
    """When the first instruction of an iteration began."""
    return min(begin for begin in array("q", observed.starts_ns) if begin)


def of_a_job(text: str, folder: Path) -> float:
    """Of rank 0 of a job of its own."""
    path = folder / "job.toml"
    path.write_text(text)
    command = [sys.executable, "-m", "resihp", "train", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    (made,) = folder.glob("fault-free-*")
    return step_ms(seen for rank, seen in observations(made) if rank == 0)


def of_bare_sessions(fleet: Fleet, job: JobConfig, plan: Plan) -> float:
    """Of rank 0 of a fleet."""
    fleet.forget()
    start = Commit(version=0, updates=0, record=None)
    found = fleet.run(plan, train_bare, TrainTo(job, job.job.steps, None, 0, start))
    fleet.run(plan, leave)
    return step_ms(found[0])


def measured(num_ranks: int, num_rounds: int, num_steps: int) -> Times:
    """Take turns."""
    times = Times([], {name: [] for name in STATES})
    with tempfile.TemporaryDirectory() as made, Fleet(num_ranks, forked=False) as fleet:
        job = loads(job_text(num_ranks, num_steps, STATES["watched"], Path(made)))
        plan = parse(Planner(job).initial().text).plan
        for number in range(num_rounds):
            ways = ["", *STATES]
            for name in ways if number % 2 == 0 else reversed(ways):
                if not name:
                    times.bare.append(of_bare_sessions(fleet, job, plan))
                    continue
                folder = Path(made) / f"{number}-{name}"
                folder.mkdir()
                text = job_text(num_ranks, num_steps, STATES[name], folder)
                times.others[name].append(of_a_job(text, folder))
    return times


def print_times(num_ranks: int, times: Times) -> None:
    """Beside the bare sessions of the same round."""
    print(f"{num_ranks} ranks, {len(times.bare)} rounds, {os.cpu_count()} cores")
    print(f"  {'bare':12}{statistics.median(times.bare):9.1f} ms")
    for name, found in times.others.items():
        ratios = [100 * (one / base - 1) for one, base in zip(found, times.bare, strict=True)]
        each = ", ".join(f"{ratio:+.1f}" for ratio in ratios)
        middle = f"{statistics.median(found):9.1f} ms {statistics.median(ratios):+6.1f} %"
        print(f"  {name:12}{middle}   ({each})")


def main() -> None:
    parser = argparse.ArgumentParser(description="What surviving costs while nothing fails.")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="(default: %(default)s)")
    parser.add_argument("--steps", type=at_least(10), default=40, help="(default: %(default)s)")
    parser.add_argument(
        "--ranks", type=some_of(LAYOUTS), default="2,8", help="2, 8 or both (default: %(default)s)"
    )
    args = parser.parse_args()
    for count in args.ranks:
        print_times(count, measured(count, args.rounds, args.steps))


if __name__ == "__main__":
    main()
