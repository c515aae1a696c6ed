"""`precision bf16` at all levels: what crosses stages is half as large, and all agree on it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from plan_build import make_plan

from resihp.compiler.facts import facts_of
from resihp.ir.difference import compare
from resihp.ir.expand import expand
from resihp.ir.listing import listing
from resihp.ir.parser import parse
from resihp.ir.printer import format_text, print_plan
from resihp.ir.program_text import parse_programs, print_program
from resihp.ir.torch_csv import read_torch_csv
from resihp.ir.torch_export import write_torch_csv
from resihp.ir.verify import verify
from resihp.ir.verify.programs import verify_programs

FULL = make_plan(microbatches=2)
HALF = replace(FULL, precision="bf16")
BOUNDARY_BYTES = FULL.batch.tokens * FULL.model.hidden * 2


def programs_of(plan):
    """Their text, rank by rank."""
    return "\n".join(print_program(expand(plan, rank)) for rank in plan.active_ranks)


def codes_of(text: str) -> list[str]:
    """What is found in programs."""
    (found,) = verify_programs([parse_programs(text)])
    return [finding.code for finding in found]


def test_full_precision_needs_no_line():
    """Said or not, it is the same plan; formatting keeps what is said."""
    text = print_plan(FULL)
    said = text.replace("\n\ngroup", "\nprecision fp32\n\ngroup", 1)
    assert "precision" not in text
    assert parse(said).plan == FULL
    assert format_text(parse(said)) == said


def test_a_plan_of_half_precision_is_verified_and_compared():
    """The line is part of the job."""
    assert verify(parse(print_plan(HALF)), facts=facts_of) == []
    (change,) = compare(parse(print_plan(FULL)), parse(print_plan(HALF))).fields
    assert (change.field, change.before, change.after) == ("precision", None, "bf16")


def test_programs_of_half_precision_send_half_the_bytes():
    """In their text and in their listing."""
    program = expand(HALF, 0)
    assert listing(program).boundary_bytes == BOUNDARY_BYTES
    assert "precision bf16\n" in print_program(program)
    assert f"{FULL.batch.tokens}x{FULL.model.hidden}xbf16\n" in print_program(program)
    assert codes_of(programs_of(HALF)) == []


def test_a_message_has_the_element_type_of_the_precision():
    """Either way, in one program alone and in all of a job."""
    for plan, (old, new) in ((HALF, ("precision bf16\n", "")), (FULL, ("xf32", "xbf16"))):
        assert set(codes_of(print_program(expand(plan, 0)).replace(old, new))) == {"RHP426"}
        assert set(codes_of(programs_of(plan).replace(old, new))) == {"RHP420"}


def test_programs_of_one_job_have_one_precision():
    """The second one is at odds with the first."""
    mixed = print_program(expand(HALF, 0)) + "\n" + print_program(expand(FULL, 1))
    assert codes_of(mixed) == ["RHP423"]


def test_no_plan_changes_the_precision_of_a_run():
    """The state would be another."""
    found = verify(parse(print_plan(HALF)), previous=FULL)
    assert [finding.code for finding in found] == ["RHP808"]


@pytest.mark.parametrize(("eager_bytes", "hangs"), [(BOUNDARY_BYTES, False), (1, True)])
def test_buffers_of_eager_sends_hold_tensors_of_the_precision(eager_bytes, hangs):
    """The size of one bf16 tensor lets both sides send first, which larger ones would block."""
    text = print_plan(HALF)
    for facts in (None, facts_of):
        found = verify(parse(text), facts=facts, transport=f"eager={eager_bytes}")
        assert ([f.code for f in found] == ["RHP501"]) == hangs
    if not hangs:
        found = verify(parse(print_plan(FULL)), transport=f"eager={eager_bytes}")
        assert [f.code for f in found] == ["RHP501"]


def test_torchs_csv_says_nothing_of_precision():
    """As it says nothing of sizes."""
    text = write_torch_csv(HALF, "comms")
    assert text == write_torch_csv(FULL, "comms")
    assert read_torch_csv(text).plan.precision == "fp32"
