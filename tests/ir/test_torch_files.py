"""torch's schedules: all that it ships and makes are read, judged and given back to it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch_peer

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
