"""Execution is the judge of the verifier: plans and mutants are verified, then run for real.

`make oracle` does the same with many more; `python tests/ir/oracle.py --help` says how to look at
one of them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from plan_build import make_plan
from plan_runner import Runner
from trial import Case, executable_case_of, findings_of

from resihp.ir.model import GroupName, Instr, ModelShape, Op, Plan
from resihp.ir.torch_csv import read_torch_csv

NUM_SEEDS = 50
MODEL = ModelShape(name="tiny", layers=4, hidden=8, heads=4, kv_heads=4, ffn=8, vocab=16)
CSV = sorted((Path(__file__).parents[3] / "shared/data/bad_schedules").glob("*rank*.csv"))


@pytest.fixture(scope="module")
def runner():
    with Runner() as runner:
        yield runner


def small(**options) -> Plan:
    plan = make_plan(**options)
    groups = tuple(
        msgspec.structs.replace(group, layers=(type(group.layers[0])(group.pp, group.pp),))
        for group in plan.groups
    )
    model = msgspec.structs.replace(MODEL, layers=plan.mesh.pp)
    return msgspec.structs.replace(plan, model=model, groups=groups)


def changed(plan: Plan, stream: int, old: list[Instr], new: list[Instr]) -> Plan:
    """With some neighbours of a stream replaced."""
    body = list(plan.streams[stream].body)
    at = body.index(old[0])
    assert body[at : at + len(old)] == old
    body[at : at + len(old)] = new
    streams = list(plan.streams)
    streams[stream] = msgspec.structs.replace(streams[stream], body=tuple(body))
    return msgspec.structs.replace(plan, streams=tuple(streams))


# --- the interpreter itself


@pytest.mark.parametrize(
    "options",
    [
        {"pp": 1, "dp": 2},
        {"pp": 3, "split": True},
        {"pp": 2, "dp": 2, "gone": {1: 0}},
        {"pp": 2, "tp": 2, "scatter": True},
        {"pp": 2, "tp": 4, "degrees": {GroupName(0, 1): 2}},
        {"pp": 2, "dp": 2, "tp": 2, "degrees": {GroupName(0, 0): 1, GroupName(1, 1): 1}},
    ],
)
def test_right_plans_have_the_reference_gradient(runner, options):
    """Whatever the layout, the gradient is that of one process."""
    assert runner.run(small(**options, microbatches=3)).verdict == "right"


def test_swapped_tensors_give_another_gradient(runner):
    """Nothing hangs and nothing fails when two receives change places."""
    plan = small(order="gpipe", microbatches=2)
    early = [Instr(Op.RECV_ACT, 0), Instr(Op.F, 0), Instr(Op.RECV_ACT, 1)]
    swapped = [Instr(Op.RECV_ACT, 1), Instr(Op.RECV_ACT, 0), Instr(Op.F, 0)]
    assert runner.run(changed(plan, 1, early, swapped)).verdict == "wrong"


def test_a_circle_hangs(runner):
    """The last stage waits for a tensor that the first one makes after what comes back to it.

    Nobody moves: that is seen without waiting for a time-out of gloo.
    """
    plan = small(microbatches=3)
    body = list(plan.streams[1].body)
    receives = [instr for instr in body if instr.op is Op.RECV_ACT]
    of_the_last = [i for i in body if i.microbatch == 2 and i not in receives]
    others = [i for i in body if i not in receives and i not in of_the_last]
    circle = changed(plan, 1, body, [*receives, *of_the_last, *others])
    assert runner.run(circle, quiet_s=0.5).verdict == "hang"


def test_a_missing_tensor_is_an_error(runner):
    """And the next plan runs with new processes."""
    plan = small(microbatches=1)
    lost = changed(plan, 1, [Instr(Op.RECV_ACT, 0)], [])
    assert runner.run(lost).verdict == "error"
    assert runner.run(plan).verdict == "right"


# --- the verifier against it


def judged(runner: Runner, case: Case) -> None:
    """What is accepted runs right; what hangs, fails or has another gradient is refused."""
    found = findings_of(case)
    outcome = runner.run(case.plan)
    if outcome.verdict == "hang" and not found:
        outcome = runner.run(case.plan, quiet_s=10)  # a busy machine only looks stuck
    assert found or outcome.verdict == "right", (case.seed, case.mutations, outcome)


@pytest.mark.parametrize("seeds", [range(at, at + 10) for at in range(0, NUM_SEEDS, 10)])
def test_what_the_verifier_accepts_trains_right(runner, seeds):
    """Random plans and mutants of them."""
    for seed in seeds:
        judged(runner, executable_case_of(seed))


@pytest.mark.skipif(not CSV, reason="no ../shared/data beside the checkout")
@pytest.mark.parametrize("path", CSV, ids=lambda path: path.stem)
def test_torch_lowering_is_judged_by_a_run(runner, path):
    """Two of the files with deferred receives train on wrong gradients, the others are right."""
    plan = read_torch_csv(path.read_bytes().decode(), model=MODEL, tokens=4).plan
    is_wrong = path.name.endswith("_defer.csv") and "1f1b" not in path.name
    assert runner.run(plan).verdict == ("wrong" if is_wrong else "right")
    assert findings_of(Case(0, plan, (), "edge")) == (("RHP412",) if is_wrong else ())
