"""torch's schedules: all that it ships and makes are read, judged and given back to it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import plan_oracle
import pytest
import torch_peer
from hypothesis import given
from hypothesis import strategies as st

from resihp.compiler.lower import lower
from resihp.errors import PlanSyntaxError
from resihp.ir.model import Level
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.ir.torch_csv import read_torch_csv
from resihp.ir.torch_export import write_torch_csv
from resihp.ir.verify import verify

DATA = Path(__file__).parents[3] / "shared" / "data"
SHIPPED = sorted((DATA / "torch_schedules").glob("*.csv"))
BAD = sorted((DATA / "bad_schedules").glob("*.csv"))
READABLE = [path for path in BAD if not path.name.startswith(("old_vocab", "trailing_garbage"))]

needs_data = pytest.mark.skipif(not SHIPPED, reason="no ../shared/data beside the checkout")

SIZES = {
    "GPipe": [(2, 1, 1), (3, 1, 2), (5, 1, 7)],
    "Interleaved1F1B": [(1, 2, 2), (2, 1, 2), (2, 2, 4), (3, 2, 6), (4, 3, 8), (2, 4, 6)],
    "LoopedBFS": [(2, 1, 1), (2, 2, 3), (3, 2, 5), (4, 4, 4)],
    "InterleavedZeroBubble": [(2, 2, 4), (3, 2, 6), (4, 2, 8), (2, 3, 6)],
    "ZBVZeroBubble": [(1, 2, 3), (2, 2, 4), (3, 2, 9), (4, 2, 8), (5, 2, 4)],
    "DualPipeV": [(1, 2, 2), (2, 2, 4), (3, 2, 9), (4, 2, 10)],
}
"""Ranks, stages per rank and micro-batches of each schedule that torch makes right."""
MADE = [(name, *size) for name, sizes in SIZES.items() for size in sizes]
BASES = [
    ("Interleaved1F1B", 2, 2, 2),
    ("LoopedBFS", 3, 1, 2),
    ("InterleavedZeroBubble", 2, 2, 4),
    ("ZBVZeroBubble", 2, 2, 3),
    ("DualPipeV", 2, 2, 4),
]
"""Small ones, which are damaged."""
LOWERED = [made for made in MADE if made[0] not in torch_peer.SINGLE]


def text_of(path):
    """A file as it is, line ends too."""
    return path.read_bytes().decode()


def kind_of(path):
    """What the names of the files say."""
    is_comms = "comms" in path.name or "_asap" in path.name or "_defer" in path.name
    return "comms" if is_comms else "compute"


def imported(path, text=None):
    """The plan of a file, in the vocabulary that its name tells."""
    vocabulary = "2024" if path.name.startswith("OLDVOCAB") else "today"
    return read_torch_csv(text or text_of(path), path=path.name, vocabulary=vocabulary)


def codes(parsed, **options):
    """The codes that the verifier reports."""
    return {finding.code for finding in verify(parsed, **options)}


@cache
def made(name, num_ranks, per_rank, num_microbatches, *, defer=False):
    """A schedule of torch; made once."""
    return torch_peer.schedule(name, num_ranks, per_rank, num_microbatches, defer=defer)


def without_reductions(rows):
    """What a compute file can say."""
    return [[action for action in row if str(action)[-4:] != "GRAD"] for row in rows]


@needs_data
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_comes_back_with_the_same_actions(path):
    """Read by torch's reader of cells; idle slots and the REDUCE_GRAD of compute files go."""
    parsed = imported(path)
    kind = kind_of(path)
    assert parsed.plan.level is (Level.PLAN if kind == "comms" else Level.SCHEDULE)
    written = write_torch_csv(parsed.plan, kind)
    if path.name.startswith("OLDVOCAB"):
        assert imported(path.with_name("today.csv"), written).plan.streams == parsed.plan.streams
        return
    before = torch_peer.actions(text_of(path))
    if kind == "compute":
        before = without_reductions(before)
    assert torch_peer.actions(written) == before


@needs_data
@pytest.mark.parametrize("path", [*SHIPPED, *READABLE], ids=lambda path: path.stem)
def test_what_is_imported_can_be_written_in_the_plan_language(path):
    """And read again as the same."""
    plan = imported(path).plan
    assert parse(print_plan(plan)).plan == plan


@pytest.mark.parametrize(("name", "num_ranks", "per_rank", "num_microbatches"), MADE)
def test_a_compute_file_of_torch_comes_back_through_its_loader(
    name, num_ranks, per_rank, num_microbatches, tmp_path
):
    """Its runtime has the same actions in the same order of what we write."""
    torch_made = made(name, num_ranks, per_rank, num_microbatches)
    text = torch_peer.dumped(torch_made, "compute", tmp_path)
    plan = read_torch_csv(text).plan
    assert plan.level is Level.SCHEDULE
    assert plan.batch.microbatches == num_microbatches
    written = write_torch_csv(plan, "compute")
    runtime = torch_peer.load(written, "compute", num_microbatches, tmp_path)
    assert list(runtime.pipeline_order.values()) == without_reductions(torch_peer.actions(text))
    if name not in torch_peer.SINGLE:
        assert runtime.pipeline_order_with_comms == torch_made.pipeline_order_with_comms


@pytest.mark.parametrize(("name", "num_ranks", "per_rank", "num_microbatches"), LOWERED)
@pytest.mark.parametrize("defer", [False, True], ids=["asap", "defer"])
def test_a_file_with_communication_of_torch_comes_back_to_the_byte(
    name, num_ranks, per_rank, num_microbatches, defer, tmp_path
):
    """And through its loader."""
    torch_made = made(name, num_ranks, per_rank, num_microbatches, defer=defer)
    text = torch_peer.dumped(torch_made, "comms", tmp_path)
    plan = read_torch_csv(text).plan
    assert plan.level is Level.PLAN
    written = write_torch_csv(plan, "comms")
    assert written == text
    runtime = torch_peer.load(written, "comms", num_microbatches, tmp_path)
    assert runtime.pipeline_order_with_comms == torch_made.pipeline_order_with_comms


REASONS = {
    "ok_2s2mb.compute.csv": set(),
    "ok_2s2mb.comms.csv": set(),
    "dup_F0.compute.csv": {"RHP302"},
    "mb_out_of_range.compute.csv": {"RHP104", "RHP301"},
    "orphan_recv.comms.csv": {"RHP401"},
    "recv_order_swapped.comms.csv": {"RHP412"},
    "no_reduce_grad.comms.csv": {"RHP701"},
    "interleaved1f1b_2rank_4mb_asap.csv": set(),
    "interleavedzerobubble_2rank_4mb_asap.csv": set(),
    "zbvzerobubble_2rank_4mb_asap.csv": set(),
    # Sends and receives of every channel are in the same order, deferred or not.
    "interleaved1f1b_2rank_4mb_defer.csv": set(),
    "interleavedzerobubble_2rank_4mb_defer.csv": {"RHP412"},
    "zbvzerobubble_2rank_4mb_defer.csv": {"RHP412"},
}
"""What is wrong with the files that torch lets pass."""


@needs_data
def test_every_file_of_the_folder_is_judged():
    """Those that cannot be read have their codes too."""
    assert {path.name for path in READABLE} == set(REASONS)
    unreadable = {"old_vocab_BW.compute.csv": "RHP011", "trailing_garbage.compute.csv": "RHP010"}
    assert {path.name for path in BAD} - set(REASONS) == set(unreadable)
    for name, code in unreadable.items():
        with pytest.raises(PlanSyntaxError) as caught:
            imported(DATA / "bad_schedules" / name)
        assert [found.code for found in caught.value.diagnostics] == [code]


@needs_data
@pytest.mark.parametrize("path", READABLE, ids=lambda path: path.stem)
def test_what_torch_lets_pass_is_refused_for_its_reason(path):
    """And what is right is accepted."""
    assert codes(imported(path)) == REASONS[path.name]


@needs_data
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_is_accepted_unless_it_is_wrong(path):
    """The 1F1B skips its first forward on the last rank and runs one that does not exist.

    The zero-bubble files with communication are from before torch reduced by an action.
    """
    found = codes(imported(path))
    if path.name.startswith("1f1b_4rank"):
        assert {"RHP104", "RHP301"} <= found
    elif "zb1p" in path.name and kind_of(path) == "comms":
        assert found == {"RHP701"}
    else:
        assert found == set()


@pytest.mark.parametrize(("name", "num_ranks", "per_rank", "num_microbatches"), MADE)
def test_what_torch_makes_is_accepted(name, num_ranks, per_rank, num_microbatches, tmp_path):
    """The order alone, and what torch lowers it to, under every transport that never blocks."""
    torch_made = made(name, num_ranks, per_rank, num_microbatches)
    assert codes(read_torch_csv(torch_peer.dumped(torch_made, "compute", tmp_path))) == set()
    if name not in torch_peer.SINGLE:
        lowered = read_torch_csv(torch_peer.dumped(torch_made, "comms", tmp_path))
        for transport in ("edge", "pair", "rank"):
            assert codes(lowered, transport=transport) == set()


@pytest.mark.parametrize(("name", "num_ranks", "per_rank", "num_microbatches"), MADE)
def test_torch_loads_what_we_lower_a_schedule_of_its_to(
    name, num_ranks, per_rank, num_microbatches, tmp_path
):
    """The same order of computing, with our communication."""
    torch_made = made(name, num_ranks, per_rank, num_microbatches)
    order = read_torch_csv(torch_peer.dumped(torch_made, "compute", tmp_path)).plan
    plan = lower(order)
    assert write_torch_csv(plan, "compute") == write_torch_csv(order, "compute")
    written = write_torch_csv(plan, "comms")
    assert codes(read_torch_csv(written)) == set()
    runtime = torch_peer.load(written, "comms", num_microbatches, tmp_path)
    assert list(runtime.pipeline_order_with_comms.values()) == torch_peer.actions(written)


@pytest.mark.parametrize("size", [(2, 2), (3, 5), (4, 8)])
def test_the_1f1b_of_torch_is_refused_at_any_size(size, tmp_path):
    """Its text is wrong on the last rank; its runtime, which does not use it, is right."""
    num_ranks, num_microbatches = size
    text = torch_peer.dumped(made("1F1B", num_ranks, 1, num_microbatches), "compute", tmp_path)
    found = verify(read_torch_csv(text))
    assert {"RHP104", "RHP301"} <= {finding.code for finding in found}
    wrong = next(finding for finding in found if finding.code == "RHP104")
    assert wrong.span.line == num_ranks
    assert f"micro-batch {num_microbatches} does not exist" in wrong.message


@pytest.mark.parametrize("name", [*dict.fromkeys(made[0] for made in LOWERED)])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("factor", [2, 3])
def test_deferred_receives_are_judged_as_they_would_run(name, num_ranks, factor, tmp_path):
    """RHP412 exactly where a receive takes the tensor of another one."""
    torch_made = made(name, num_ranks, 2, 2 * factor * num_ranks, defer=True)
    parsed = read_torch_csv(torch_peer.dumped(torch_made, "comms", tmp_path))
    try:
        plan_oracle.run(parsed.plan)
    except plan_oracle.RefusedError:
        assert codes(parsed) == {"RHP412"}
    else:
        assert codes(parsed) == set()


def test_some_deferred_receives_are_wrong():
    """So that the test before sees both."""
    refused = [made[0] for made in LOWERED if _is_refused(made)]
    assert set(refused) == {"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"}


def _is_refused(of):
    name, *size = of
    actions = made(name, *size, defer=True).pipeline_order_with_comms
    text = "".join(",".join(map(str, row)) + "\n" for row in actions.values())
    return codes(read_torch_csv(text)) == {"RHP412"}


@given(st.sampled_from(BASES), st.sampled_from(("compute", "comms")), st.randoms())
def test_a_damaged_file_is_refused_exactly_if_it_would_not_run(of, kind, random):
    """Cells that are swapped, dropped, doubled, moved or renumbered, against the slow verifier."""
    rows = rows_of(of, kind)
    for _ in range(random.choice((1, 1, 2, 3))):
        damage(random.choice(rows), random)
    try:
        parsed = read_torch_csv("".join(",".join(row) + "\n" for row in rows), kind=kind)
    except PlanSyntaxError:
        return
    try:
        plan_oracle.run(parsed.plan)
    except plan_oracle.RefusedError:
        assert codes(parsed)
    else:
        assert codes(parsed) == set()


def rows_of(of, kind):
    """The cells of a file of torch."""
    name, *size = of
    torch_made = made(name, *size)
    order = torch_made.pipeline_order if kind == "compute" else torch_made.pipeline_order_with_comms
    return [[str(action or "") for action in row] for row in order.values()]


def damage(row, random):
    """One mistake in a row."""
    one, other = random.randrange(len(row)), random.randrange(len(row))
    match random.randrange(5):
        case 0:
            row[one], row[other] = row[other], row[one]
        case 1:
            del row[one]
        case 2:
            row.insert(other, row[one])
        case 3:
            row.insert(max(0, one + random.randint(-3, 3)), row.pop(one))
        case _:
            row[one] = row[one].replace(random.choice("0123"), random.choice("0123"))
