"""Whole jobs: the run with failures is compared with the run without."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from jobs import TP_CHANGE_TOLERANCE, Job, Run, complete

from resihp.compiler import initial_plan, lower
from resihp.executor.data import load_dataset
from resihp.executor.packing import Packing
from resihp.executor.sampler import Sampler
from resihp.ir.drawing.hops import hops_of
from resihp.ir.drawing.scene import scene_of
from resihp.ir.model import Batch, Instr, Level, Mesh, ModelShape, Op, Plan, Stream
from resihp.ir.printer import print_plan
from resihp.monitor.observations import played_run

pytestmark = pytest.mark.timeout(120)


def test_losses_are_bitwise_equal_until_the_failure(healthy: Run, killed: Run) -> None:
    """Before the first failure both runs are the same computation."""
    assert killed.losses()[:3] == healthy.losses()[:3]


def test_a_run_that_saves_nothing_has_no_directory_for_versions(healthy: Run) -> None:
    """The first version makes it."""
    assert not (healthy.dir / "checkpoints").exists()


def test_losses_after_a_tp_change_are_equal_within_rounding(healthy: Run, killed: Run) -> None:
    """[T16] A killed rank costs time, not progress: every step has the loss it would have."""
    assert len(killed.losses()) == 10
    assert killed.losses() == pytest.approx(healthy.losses(), rel=TP_CHANGE_TOLERANCE)


def test_losses_are_bitwise_equal_when_only_the_host_changes(healthy: Run, dropped: Run) -> None:
    """[T16] A replica that runs another's micro-batches at the same TP degree changes no bit."""
    assert dropped.losses() == healthy.losses()


@pytest.mark.parametrize("name", ["healthy", "killed", "dropped"])
def test_every_sample_is_used_exactly_once_and_in_order(
    name: str, corpus: Path, request: pytest.FixtureRequest
) -> None:
    """[T19] Committed steps used the windows of the epoch's order, each once, failures or not."""
    run: Run = request.getfixturevalue(name)
    ledger = run.rows("ledger")
    assert [row["step"] for row in ledger] == list(range(10))
    used = list(itertools.chain.from_iterable(row["samples"] for row in ledger))
    packing = Packing(load_dataset(str(corpus)), 64, 0)
    sampler = Sampler(packing.num_windows, 0)
    assert used == [sampler.sample_id(position) for position in range(len(used))]
    assert len(set(used)) == len(used) == 80


def test_no_process_but_the_killed_ones_is_restarted(killed: Run) -> None:
    """Each of the eight executors was started once, and those that were killed may come back."""
    ranks = [row["rank"] for row in killed.events("executor_started")]
    assert set(ranks) == set(range(8))
    assert all(ranks.count(rank) == 1 for rank in range(8) if rank not in (5, 2))
    assert [row["rank"] for row in killed.events("rank_lost")] == [5, 2]


def test_an_incident_says_when_it_was_seen_and_when_all_ran_again(killed: Run) -> None:
    """Each failure leaves one record: the kill, the verdict, the resumption, in this order."""
    first, second = killed.events("incident")
    for incident, rank, step in ((first, 5, 3), (second, 2, 6)):
        assert incident["ranks"] == [rank]
        assert incident["step"] == step
        times = [incident[key] for key in ("hit_s", "detected_s", "resumed_s")]
        assert times == sorted(times)
        assert incident["moved_bytes"] > 0


def test_each_recovery_says_what_else_was_considered(killed: Run) -> None:
    """Candidates with predicted times, and which one was chosen; the plan is stored on its own."""
    decisions = killed.events("decision")
    assert [row["generation"] for row in decisions] == [2, 3]
    for row in decisions:
        assert row["chosen"] in [each["name"] for each in row["considered"]]
        assert len(row["considered"]) > 1
        assert row["iteration_s"] > 0
        assert "text" not in row


def test_survivors_notice_in_well_under_a_second(killed: Run) -> None:
    """From SIGKILL to the last survivor knowing it."""
    for incident in killed.events("incident"):
        assert incident["noticed_s"] - incident["hit_s"] < 0.9


def test_the_summary_and_the_console_tell_the_same_story(killed: Run) -> None:
    """One line per step, one per incident, and a summary at the end."""
    assert sum(line.startswith("step ") for line in killed.output) == 10
    assert sum(line.startswith("! lost rank") for line in killed.output) == 2
    assert "2 of 2 failures survived, 3 plans used" in killed.text
    assert f"final loss {killed.losses()[-1]:.4f}" in killed.text


def test_every_plan_that_ran_passes_the_verifier_offline(killed: Run) -> None:
    """The plans in the run directory are those that ran, each valid after the one before."""
    plans = sorted((killed.dir / "plans").iterdir())
    assert [plan.name for plan in plans] == ["001.plan", "002.plan", "003.plan"]
    for previous, plan in itertools.pairwise([None, *plans]):
        assert plan is not None
        given = [] if previous is None else ["--previous", str(previous)]
        verify = [sys.executable, "-m", "resihp", "verify", str(plan), *given]
        done = subprocess.run(verify, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "lost rank 5" in plans[1].read_text().splitlines()[0]


def test_replicas_have_equal_hashes_after_each_recovery(killed: Run) -> None:
    """[T14] Every layout names the digest of every shard; the run stops if replicas differ."""
    shards = set[str]()
    for event in killed.events("running"):
        shards |= set(event["hashes"])
    assert shards >= {f"layer {n} shard {c}/2" for n in range(4) for c in range(2)}


def test_all_schedules_train_the_same_model(healthy: Run, tmp_path: Path, corpus: Path) -> None:
    """The order of B and W does not change a bit: 1F1B gives the losses of ZB-H1."""
    code, run = complete(Job(steps=3, schedule="1f1b"), tmp_path, corpus)
    assert code == 0, run.text
    # The learning rate of the first steps is the warm-up's, whatever the number of steps.
    assert run.losses()[:3] == healthy.losses()[:3]


def test_single_stages_of_micro_batches_may_run_in_another_replica(
    healthy: Run, tmp_path: Path, corpus: Path
) -> None:
    """A written plan: replica 1 has no second stage, replica 0 runs that of all micro-batches."""
    path = tmp_path / "given.plan"
    path.write_text(print_plan(without_last_group()))
    code, run = complete(Job(steps=3, plan=path), tmp_path, corpus)
    assert code == 0, run.text
    assert "F 3@1" in (run.dir / "plans" / "001.plan").read_text()
    assert run.losses() == healthy.losses()[:3]


def without_last_group() -> Plan:
    """Position 1 of replica 1 is on standby; F, B and W of its micro-batches run in replica 0."""
    shape = ModelShape(name="e2e", layers=4, hidden=32, heads=4, kv_heads=2, ffn=64, vocab=258)
    whole = initial_plan(shape, Mesh(tp=2, pp=2, dp=2), Batch(microbatches=4, tokens=64))
    first = Stream(
        replicas=(0, 1),
        pp=0,
        body=tuple(Instr(op, number) for op in (Op.F, Op.BW) for number in range(4)),
    )
    last = Stream(
        replicas=(0,),
        pp=1,
        body=tuple(
            Instr(op, number, home)
            for number in range(4)
            for home in (None, 1)
            for op in (Op.F, Op.BW)
        ),
    )
    return lower(
        msgspec.structs.replace(
            whole,
            groups=whole.groups[:-1],
            standby=whole.groups[-1].ranks,
            streams=(first, last),
            schedule=None,
            level=Level.SCHEDULE,
        )
    )


def test_a_standby_rank_takes_the_place_of_a_lost_one(tmp_path: Path, corpus: Path) -> None:
    """TP 4 loses a rank: two go on, one is left over; it fills the gap of the next loss."""
    # With fewer tokens the exchange inside a group takes longer than what it saves.
    job = Job(steps=6, tp=4, pp=1, dp=2, schedule="1f1b", kv_heads=4, tokens=512)
    for name in ("healthy", "killed"):
        (tmp_path / name).mkdir()
    _, reference = complete(job, tmp_path / "healthy", corpus)
    code, run = complete(replace(job, kills=((1, 2), (5, 4))), tmp_path / "killed", corpus)
    assert code == 0, run.text
    assert "standby 3" in (run.dir / "plans" / "002.plan").read_text()
    assert "group dp1.pp0 ranks=4,3,6,7" in (run.dir / "plans" / "003.plan").read_text()
    assert run.losses() == pytest.approx(reference.losses(), rel=TP_CHANGE_TOLERANCE)


def test_torchrun_survives_a_killed_executor(healthy: Run, tmp_path: Path, corpus: Path) -> None:
    """Under torchrun the job goes on too, and torchrun ends with 0."""
    code, run = complete(Job(kills=((5, 3),)), tmp_path, corpus, torchrun=True)
    assert code == 0, run.text
    assert "1 of 1 failures survived" in run.text
    assert run.losses() == pytest.approx(healthy.losses(), rel=TP_CHANGE_TOLERANCE)


def test_the_times_of_a_run_are_those_of_its_plans(killed: Run) -> None:
    """Of every step: what uses a tensor begins after what makes it, and all end with the step."""
    for step in range(10):
        played = played_run(killed.dir, step)
        assert all(hop.made <= hop.used for hop in hops_of(scene_of(played)))
        ends = [max(ends) for ends in played.timeline.ends.values()]
        last = [ends[-1] for ends in played.timeline.ends.values()]
        assert last == ends
        assert min(last) > 0
