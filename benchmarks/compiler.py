"""How long the compiler takes to answer a failure, from 64 to 16,384 GPUs.

    python benchmarks/compiler.py [--results FILE] [--largest GPUS]

CPU time of one warm process on one core, the least of several runs without
garbage collection, in ms. "One candidate" is the
way of a single layout at nominal costs: the play (placing included), lowering, printing, parsing,
the verifier with memory and the reconfiguration, and the simulation. "Whole" is an adaptation with
its portfolio. A dead group has lost all its ranks, so that others run its stage; a slow one has a
member at some share of its speed. Numbers that changed by more than a seventh since the run
before, which is in FILE, say so.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

# One core, as the targets say; before numpy is there.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from result_file import Row, load_results, print_table, save_results

from resihp.compiler.adaptation import Situation, adapt, problem_of
from resihp.compiler.adaptation.emit import lowered
from resihp.compiler.adaptation.layouts import Layout, formed, supplied
from resihp.compiler.adaptation.pp import held_layers
from resihp.compiler.adaptation.tp import RULES, choose_members
from resihp.compiler.cluster import CLUSTERS, Health
from resihp.compiler.costs import CostModel
from resihp.compiler.facts import facts_of
from resihp.compiler.layout import initial_plan
from resihp.compiler.models import find_model
from resihp.compiler.planner.balance import balanced
from resihp.compiler.planner.engine import Engine
from resihp.compiler.planner.orders import streams_of
from resihp.compiler.planner.planned import Planned
from resihp.compiler.pricing import Pricing
from resihp.compiler.simulate import simulate
from resihp.ir.model import Batch, Mesh, Plan
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.ir.verify import verify

DEFAULT_RESULTS = Path("runs/benchmarks/compiler.json")
_CLUSTER = CLUSTERS["a100-2048x8"]
_MODEL = find_model("llama2-70b")
_PARTS = ("plan", "lower", "print", "parse", "verify", "simulate")
_TARGETS_MS = {
    256: {"one candidate": 25, "whole": 100},
    16_384: {"one candidate": 500, "whole": 2_500},
}
"""What is to be reached, by the number of GPUs."""

_Result = TypeVar("_Result")


class Job(NamedTuple):
    """A mesh and the micro-batches of each replica."""

    mesh: Mesh
    microbatches: int

    def rank(self, replica: int, stage: int, member: int = 0) -> int:
        """Of the healthy layout."""
        return (replica * self.mesh.pp + stage) * self.mesh.tp + member


_JOBS = [
    *(Job(Mesh(tp=4, pp=16, dp=dp), 32) for dp in (1, 2, 4)),
    *(Job(Mesh(tp=8, pp=16, dp=dp), 64) for dp in (8, 16, 32, 64, 128)),
]


class Failures(NamedTuple):
    """How many groups are dead and slow."""

    dead: int
    slow: int

    def health(self, job: Job) -> Health:
        """Different replicas, if there are as many, and different stages."""
        mesh = job.mesh
        places = [
            (index * max(1, mesh.dp // 10) % mesh.dp, (5 * index + 3) % mesh.pp)
            for index in range(self.dead + self.slow)
        ]
        lost = [
            job.rank(*place, member) for place in places[: self.dead] for member in range(mesh.tp)
        ]
        slow = {
            job.rank(*place, 1): 1 / (1.3 + index / 10)
            for index, place in enumerate(places[self.dead :])
        }
        return Health(lost=frozenset(lost), speed=slow)


_FAILURES = {
    "healthy": Failures(0, 0),
    "1 slow": Failures(0, 1),
    "1 dead, 2 slow": Failures(1, 2),
    "2 dead, 8 slow": Failures(2, 8),
}


def timed(run: Callable[[], _Result], repeats: int = 3) -> tuple[float, _Result]:
    """The least CPU milliseconds of several runs, and the result of the last one."""
    results: list[tuple[float, _Result]] = []
    gc.collect()
    gc.disable()
    for _ in range(repeats):
        start = time.process_time()
        result = run()
        results.append((1e3 * (time.process_time() - start), result))
    gc.enable()
    return min(ms for ms, _ in results), results[-1][1]


def healthy(job: Job) -> Plan:
    return initial_plan(
        _MODEL.shape,
        job.mesh,
        Batch(microbatches=job.microbatches, tokens=1024),
        schedule="zb-h1",
        memory_bytes=_CLUSTER.device.memory_bytes,
        precision="bf16",
    )


def situation_of(previous: Plan, health: Health) -> Situation:
    costs = CostModel.of_description(_MODEL, _CLUSTER, precision="bf16")
    return Situation(previous, Pricing(previous.model, costs, _CLUSTER, health))


def layout_of(situation: Situation) -> Layout:
    """Whoever is alive goes on where it was."""
    layers = held_layers(situation)
    members = choose_members(situation, RULES["largest"], layers)
    return supplied(situation, formed(situation, members, layers))


def one_candidate(situation: Situation, layout: Layout) -> tuple[dict[str, float], Engine]:
    """Times of each part, and what was played."""
    problem = problem_of(situation, layout)

    def play() -> tuple[Engine, Planned]:
        engine = Engine(problem, balanced(problem))
        return engine, engine.run()

    times: dict[str, float] = {}
    times["plan"], (engine, planned) = timed(play)
    times["lower"], plan = timed(lambda: lowered(situation, layout, streams_of(planned)))
    times["print"], text = timed(lambda: print_plan(plan))
    times["parse"], parsed = timed(lambda: parse(text))

    def prove() -> None:
        # A fresh reading each time: what is kept with it would be kept from the run before.
        found = verify(parsed_again.pop(), previous=situation.previous, facts=facts_of)
        assert not found, found[0]

    parsed_again = [parse(text) for _ in range(3)]
    times["verify"], _ = timed(prove)
    times["simulate"], _ = timed(lambda: simulate(parsed.plan, situation.pricing))
    return {**times, "one candidate": sum(times.values())}, engine


def row_of(job: Job, failures: Failures, previous: Plan) -> Row:
    situation = situation_of(previous, failures.health(job))
    times, engine = one_candidate(situation, layout_of(situation))
    repeats = 3 if job.mesh.world < 4096 else 2
    whole, decision = timed(lambda: adapt(situation_of(previous, failures.health(job))), repeats)
    return {
        **times,
        "whole": whole,
        "plays": decision.num_played,
        "chunks": engine.num_started,
        "teams": len(engine.teams),
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def targets(rows: Mapping[str, Row], jobs: Mapping[str, Job]) -> dict[str, Row]:
    """What is reached of the targets."""
    reached: dict[str, Row] = {}
    for label, job in jobs.items():
        for failure in ("1 dead, 2 slow", "2 dead, 8 slow"):
            row = rows.get(f"{label}, {failure}")
            if row is not None and job.mesh.world in _TARGETS_MS:
                reached[f"{label}, {failure}"] = {
                    part: f"{row[part]:.0f} of {target}"
                    for part, target in _TARGETS_MS[job.mesh.world].items()
                }
    return reached


def growth(rows: Mapping[str, Row], jobs: Mapping[str, Job]) -> dict[str, Row]:
    """Exponents of the replicas: log of the time over log DP, between jobs of one mesh."""
    labels = [label for label, job in jobs.items() if job.mesh.tp == 8]
    found: dict[str, Row] = {}
    for failure in _FAILURES:
        for few, many in dict.fromkeys([(labels[0], labels[-1]), tuple(labels[-2:])]):
            before, after = rows[f"{few}, {failure}"], rows[f"{many}, {failure}"]
            ratio = jobs[many].mesh.dp / jobs[few].mesh.dp
            found[f"{failure}, {few} to {many}"] = {
                part: math.log(_number(after[part]) / _number(before[part])) / math.log(ratio)
                for part in (*_PARTS, "one candidate", "whole")
            }
    return found


def _number(value: float | int | str) -> float:
    assert not isinstance(value, str)
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description="times of the compiler")
    parser.add_argument(
        "--results",
        type=Path,
        default=DEFAULT_RESULTS,
        metavar="FILE",
        help="results of the run before, then of this one (default: %(default)s)",
    )
    parser.add_argument(
        "--largest",
        type=int,
        default=16_384,
        metavar="GPUS",
        help="leave larger jobs out (default: %(default)s)",
    )
    options = parser.parse_args()
    before = load_results(options.results)
    jobs = {f"{job.mesh.world:,}": job for job in _JOBS if job.mesh.world <= options.largest}
    title = f"{_MODEL.shape.name}, zb-h1, ms"
    rows: dict[str, Row] = {}
    for label, job in jobs.items():
        previous = healthy(job)
        for failure, failures in _FAILURES.items():
            if failures.dead + failures.slow <= 3 * job.mesh.dp and failures.dead < job.mesh.dp:
                rows[f"{label}, {failure}"] = row_of(job, failures, previous)
    tables = {
        title: rows,
        "Targets, ms": targets(rows, jobs),
    }
    if sum(job.mesh.tp == 8 for job in jobs.values()) > 1:
        tables["Growth with the number of replicas, exponent"] = growth(rows, jobs)
    for name, table in tables.items():
        print_table(name, table, before.get(name))
    save_results(options.results, tables)


if __name__ == "__main__":
    main()
