"""What becomes of an operator's order to bring a fault about."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from resihp.cli import main
from resihp.config import load
from resihp.ir.expand import expand
from resihp.monitor.injecting import carrier, remark, why_not
from resihp.monitor.planner import Planner

JOB = load(Path(__file__).parents[2] / "examples" / "stdlib.toml")


@pytest.mark.parametrize(
    ("kind", "rank", "by"),
    [
        ("kill", 1, 1),
        ("kill", 0, None),
        ("kill_supervisor", 0, None),
        ("kill_coordinator", None, 1),
        ("kill_coordinator", 0, 0),
        ("hang_coordinator", 7, 1),
        ("kill_monitor", None, 1),
        ("kill_monitor", 7, 4),
        ("hang_monitor", 3, 1),
    ],
)
def test_a_fault_of_no_rank_goes_by_any_supervisor_that_is_there(
    kind: str, rank: int | None, by: int | None
):
    """Rank 0 is lost and its supervisor is there; of ranks 2, 3, 6 and 7 nobody is."""
    assert carrier(kind, rank, alive={1, 4, 5}, here={0, 1, 4, 5}, per_node=4) == by


def test_a_coordinator_without_living_ranks_can_still_be_hit():
    """A supervisor without an executor passes the order on."""
    assert carrier("kill_coordinator", None, alive=set(), here={2}, per_node=4) == 2
    assert carrier("kill_coordinator", None, alive=set(), here=set(), per_node=4) is None


def test_an_instruction_that_the_program_has_not_is_refused():
    """With the last one that it has."""
    plan = Planner(JOB).initial().plan
    num = len(expand(plan, 0).instrs)
    assert why_not({"kind": "kill", "instruction": num - 1}, 0, JOB, plan) is None
    why = why_not({"kind": "kill", "instruction": num}, 0, JOB, plan)
    assert why is not None
    assert why.endswith(f"has {num} instructions; nearest valid: {num - 1}")


def test_a_torn_version_where_nothing_is_saved_is_remarked_on():
    """It would be waited for in vain."""
    checkpoint = msgspec.structs.replace(JOB.checkpoint, every=0)
    never = msgspec.structs.replace(JOB, checkpoint=checkpoint)
    often = msgspec.structs.replace(JOB, checkpoint=msgspec.structs.replace(checkpoint, every=5))
    assert "every = 0" in remark("torn_checkpoint", never)
    assert remark("torn_checkpoint", often) == remark("kill", never) == ""


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("lost_beats --share 2", "--share 2: must be at least 0 and at most 1"),
        ("slow --lasts -1", "--lasts -1: must be more than 0 and at most 1000000"),
        ("hold_gil", "hold_gil needs --lasts, for how long no other thread runs; "),
        ("kil", 'no fault is called "kil"; nearest valid: kill, of kill, stop, exit, '),
        ("kill --factor 2", "--factor 2: is not said of kill, but of slow; nearest valid: "),
        ("kill --moment votes", "--moment votes: must be vote or voted or update or "),
        ("kill --moment vote --instruction 3", "--moment is said instead of --instruction; "),
        ("kill", "no job runs under nowhere: name the directory of its run with RUN, or "),
    ],
)
def test_what_cannot_be_ordered_is_refused_in_one_sentence(
    words: str, error: str, capsys: pytest.CaptureFixture[str]
):
    """It names the option as it was written."""
    assert main(["inject", *words.split(), "--runs-dir", "nowhere"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"resihp: error: {error}")
    assert said.count("\n") == 1
