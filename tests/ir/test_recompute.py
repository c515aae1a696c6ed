"""`recompute` at all levels: which stages keep only their input until B."""

from __future__ import annotations

from msgspec.structs import replace
from plan_build import make_plan

from resihp.ir.difference import compare
from resihp.ir.expand import expand
from resihp.ir.parser import parse
from resihp.ir.plan_json import plan_of_json, print_json
from resihp.ir.printer import format_text, print_plan
from resihp.ir.program_text import parse_programs, print_program
from resihp.ir.torch_export import write_torch_csv
from resihp.ir.verify import verify
from resihp.ir.verify.programs import verify_programs

KEEPING = make_plan(microbatches=2)
AGAIN = replace(KEEPING, recompute=(0, 1))


def codes_of(text: str) -> list[str]:
    """What is found in programs."""
    (found,) = verify_programs([parse_programs(text)])
    return [finding.code for finding in found]


def test_the_line_is_part_of_the_plan():
    """Text and JSON keep it, and it is verified."""
    text = print_plan(AGAIN)
    assert "\nrecompute 0,1\n" in text
    assert parse(text).plan == AGAIN
    assert format_text(parse(text)) == text
    assert verify(parse(text)) == []
    assert plan_of_json(print_json(AGAIN), "a.json") == AGAIN


def test_a_change_is_told_and_allowed_from_plan_to_plan():
    """What is kept in memory is no part of the state."""
    (change,) = compare(parse(print_plan(KEEPING)), parse(print_plan(AGAIN))).fields
    assert (change.field, change.before, change.after) == ("recompute", None, "0,1")
    resumed = replace(AGAIN, resume=None)
    assert "RHP808" not in {f.code for f in verify(parse(print_plan(resumed)), previous=KEEPING)}


def test_all_programs_of_a_job_say_it():
    """One that does not is of another job; a stage that is not there is found in one alone."""
    programs = [print_program(expand(plan, rank)) for plan in (KEEPING, AGAIN) for rank in (0, 1)]
    assert "\nrecompute 0,1\n" in programs[2]
    assert codes_of("\n".join(programs[2:])) == []
    assert codes_of(programs[0] + "\n" + programs[3]) == ["RHP423"]
    assert codes_of(programs[2].replace("recompute 0,1", "recompute 7")) == ["RHP111"]


def test_torchs_csv_says_nothing_of_it():
    """As it says nothing of memory."""
    assert write_torch_csv(AGAIN, "comms") == write_torch_csv(KEEPING, "comms")
