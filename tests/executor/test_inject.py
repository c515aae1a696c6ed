"""Faults of the job file: at the right place, announced first, and real."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resihp.config import Injection
from resihp.executor.inject import Injector

ROOT = Path(__file__).parents[2]


def places(
    injections: list[Injection], rank: int = 1, num_instrs: int = 10
) -> list[tuple[int, int]]:
    """(step, instruction) before which `rank` would die."""
    injector = Injector(injections, rank, lambda *_: None)
    injector.num_instrs = num_instrs
    return [
        (step, index)
        for step in range(5)
        for index in range(num_instrs)
        if injector.before(step, index) is not None
    ]


@pytest.mark.parametrize(
    ("instruction", "place"), [(None, 5), (0, 0), (7, 7), (9, 9), (10, 9), (1000, 9)]
)
def test_a_fault_hits_right_before_its_instruction(instruction: int | None, place: int):
    """The middle of the program by default; beyond its end means before its last one."""
    assert places([Injection(rank=1, step=3, instruction=instruction)]) == [(3, place)]


def test_a_fault_hits_its_rank_only():
    """Each rank arms its own."""
    injections = [Injection(rank=0, step=1), Injection(rank=1, step=2), Injection(rank=1, step=4)]
    assert places(injections, rank=1) == [(2, 5), (4, 5)]
    assert places(injections, rank=2) == []


def test_the_process_dies_by_sigkill_after_it_said_so():
    """The announcement is out before the signal, so that the time of detection is known."""
    code = (
        "from resihp.config import Injection\n"
        "from resihp.executor.inject import Injector\n"
        "def announce(kind, step, index, sent):\n"
        "    print(kind, step, index, flush=True)\n"
        "    sent.set()\n"
        "injector = Injector([Injection(rank=0, step=2)], 0, announce)\n"
        "injector.num_instrs = 4\n"
        "injector.before(2, 2)()\n"
        "print('still here', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "kill 2 2\n"
    assert done.returncode == -signal.SIGKILL
