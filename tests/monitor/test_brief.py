"""What a node's owner hands down, and what one monitor leaves the next."""

from __future__ import annotations

import os

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from resihp.monitor.keeper import LONGEST_PAUSE_S, pause_s
from resihp.monitor.node.brief import Brief, Note, NoteFile, brief_file, read_brief
from resihp.monitor.node.server import MAX_REASON
from resihp.wire.nodes import StopAsked

BRIEF = Brief(job="[job]", secret=b"s" * 32, node=1, addresses=(("a", 1), ("b", 2)), run_dir=None)


def test_a_brief_can_be_read_by_every_monitor():
    """Not only by the first one."""
    fd = brief_file(BRIEF)
    try:
        assert read_brief(fd) == read_brief(fd) == BRIEF
    finally:
        os.close(fd)


def test_the_secret_is_in_no_repr_of_a_brief():
    """It may end up in a traceback."""
    assert "ssss" not in repr(BRIEF)


def test_nodes_hold_equally_many_ranks_in_order():
    """Every rank is on the node that has it."""
    assert [BRIEF.node_of(rank, 6) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [*BRIEF.ranks(0, 6), *BRIEF.ranks(1, 6)] == list(range(6))


@given(st.text(max_size=10_000), st.integers(0, 255))
def test_a_note_fits_its_page(reason: str, code: int):
    """A reason that is too long is cut, nothing else is."""
    file = NoteFile()
    try:
        assert file.read() == Note()
        stop = StopAsked(reason="s" * MAX_REASON, exit_code=143)
        whole = Note(num_starts=3, run_dir="/r" * 100, exit_code=code, reason=reason, stop=stop)
        file.write(whole)
        note = file.read()
        assert msgspec.structs.replace(note, reason=reason) == whole
        assert reason.startswith(note.reason)
        assert note.reason == reason or len(reason.encode()) > 3000
    finally:
        os.close(file.fd)


def test_pauses_double_up_to_a_bound():
    """The first start again is at once."""
    pauses = [pause_s(count) for count in range(100)]
    assert pauses[:4] == [0.0, 0.05, 0.1, 0.2]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_S
