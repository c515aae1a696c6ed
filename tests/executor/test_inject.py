"""Faults of the job file: at the right place, announced first, and real."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.checkpoint.disk import open_folder
from resihp.config import FaultKind, Injection
from resihp.executor.faults import Conditions, InjectedError, fault_of
from resihp.executor.inject import Injector, place_of_hit
from resihp.executor.injected_disk import InjectedDisk

ROOT = Path(__file__).parents[2]


def injector_of(injections: list[Injection], rank: int = 1, **more: Any) -> Injector:
    return Injector(injections, rank, lambda fault, sent: sent.set(), world=4, **more)


def places(
    injections: list[Injection], rank: int = 1, num_instrs: int = 10, **more: Any
) -> list[tuple[int, int]]:
    """(step, instruction) before which a fault strikes `rank`."""
    injector = injector_of(injections, rank, **more)
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


def test_what_struck_an_earlier_executor_is_over():
    """An executor that is started again, and redoes the step, is not struck by the same fault."""
    injections = [Injection(rank=1, step=2), Injection(rank=1, step=2, instruction=7)]
    assert places(injections, struck={0: 2}) == [(2, 7)]


@given(st.integers(0, 99), st.floats(0.01, 1.0), st.integers(1, 8), st.integers(0, 50))
def test_random_places_are_the_same_for_all_ranks(seed: int, rate: float, world: int, step: int):
    """At most one rank of an iteration is struck, inside its program, by seed and step alone."""
    injection = Injection(kind="kill", rate=rate, seed=seed)
    hits = [
        place_of_hit(injection, 0, rank=rank, world=world, step=step, num_instrs=9)
        for rank in range(world)
    ]
    struck = [hit for hit in hits if hit is not None]
    assert len(struck) <= 1
    assert all(0 <= hit < 9 for hit in struck)


def test_a_rate_is_the_share_of_iterations_that_are_struck():
    """Over many iterations."""
    injection = Injection(rank=0, rate=0.2)
    hits = [
        place_of_hit(injection, 0, rank=0, world=4, step=step, num_instrs=9) for step in range(4000)
    ]
    assert 0.17 < sum(hit is not None for hit in hits) / 4000 < 0.23


def test_an_order_strikes_in_the_next_iteration_only():
    """Where the operator says no instruction, in the middle."""
    injector = injector_of([])
    injector.num_instrs = 4
    injector.before(0, 0)
    injector.order(Injection(kind="exit"))
    assert [injector.before(0, index) for index in (1, 2, 3)] == [None] * 3
    assert [injector.before(1, index) is not None for index in range(4)] == [0, 0, 1, 0]
    assert [injector.before(2, index) for index in range(4)] == [None] * 4


def test_an_order_for_a_moment_strikes_there_once():
    """Whatever iterations go by before the rank comes to it."""
    injector = injector_of([])
    injector.num_instrs = 4
    injector.order(Injection(kind="slow", moment="voted"))
    assert [injector.before(0, index) for index in range(4)] == [None] * 4
    assert injector.at("vote", 0) is None
    assert injector.at("voted", 0) is not None
    assert injector.at("voted", 1) is None


def test_a_moment_is_no_instruction():
    """It is asked for by name, once."""
    injection = Injection(kind="slow", rank=1, step=2, moment="voted")
    injector = injector_of([injection])
    injector.num_instrs = 4
    assert [injector.before(2, index) for index in range(4)] == [None] * 4
    assert injector.at("vote", 2) is None
    assert injector.at("voted", 1) is None
    strike = injector.at("voted", 2)
    assert strike is not None
    strike()
    assert injector.conditions.slowness.now == 2.0
    assert injector.at("voted", 2) is None


@pytest.mark.parametrize(
    ("kind", "lasts_s", "printed", "code"),
    [
        ("kill", None, "kill 2 2\n", -signal.SIGKILL),
        ("exit", None, "exit 2 2\n", 1),
        ("exception", None, "exception 2 2\n", 1),
        ("hold_gil", 0.01, "hold_gil 2 2\nstill here\n", 0),
        ("kill_supervisor", None, "kill_supervisor 2 2\nstill here\n", 0),
    ],
)
def test_the_process_does_what_it_said(
    kind: FaultKind, lasts_s: float | None, printed: str, code: int
):
    """The announcement is out before the fault, so that the time of detection is known."""
    program = (
        "from resihp.config import Injection\n"
        "from resihp.executor.inject import Injector\n"
        "def announce(fault, sent):\n"
        "    print(fault.kind, fault.step, fault.instruction, flush=True)\n"
        "    sent.set()\n"
        f"injection = Injection(kind={kind!r}, rank=0, step=2, lasts_s={lasts_s!r})\n"
        "injector = Injector([injection], 0, announce, world=1)\n"
        "injector.num_instrs = 4\n"
        "injector.before(2, 0)\n"
        "injector.before(2, 2)()\n"
        "print('still here', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.returncode) == (printed, code)
    assert ("InjectedError" in done.stderr) == (kind == "exception")


def test_nothing_else_runs_while_the_gil_is_held():
    """A thread that counts stands still."""
    program = (
        "import threading, time\n"
        "from resihp.executor.faults import HoldGil\n"
        "times = []\n"
        "def tick():\n"
        "    while len(times) < 2000:\n"
        "        times.append(time.monotonic())\n"
        "        time.sleep(0.001)\n"
        "threading.Thread(target=tick, daemon=True).start()\n"
        "time.sleep(0.05)\n"
        "HoldGil(0.5).strike()\n"
        "time.sleep(0.05)\n"
        "print(max(b - a for a, b in zip(times, times[1:])) > 0.45)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "True\n", done.stderr


def test_a_condition_ends_by_itself():
    """What lasts is over after its time; without one it stays."""
    conditions = Conditions()
    fault_of(Injection(kind="slow", factor=3.0, lasts_s=1e-6), conditions).strike()
    fault_of(Injection(kind="slow_link", delay_s=0.5), conditions).strike()
    time.sleep(1e-4)
    assert conditions.slowness.now == 1.0
    assert conditions.link_delay_s.now == 0.5


def test_a_full_disk_takes_no_file_of_state():
    """Writers ask first and get the error that the kernel would give."""
    conditions = Conditions()
    conditions.check_disk()
    fault_of(Injection(kind="full_disk"), conditions).strike()
    with pytest.raises(OSError, match="no space left"):
        conditions.check_disk()


def test_an_exception_is_raised_where_it_strikes():
    """In the code that runs, not beside it."""
    with pytest.raises(InjectedError):
        fault_of(Injection(kind="exception"), Conditions()).strike()


def test_a_full_disk_is_that_of_saved_versions(tmp_path: Path):
    """[T22] The error is the kernel's, nothing half-written stays, and later it works again."""
    conditions = Conditions()
    with open_folder(tmp_path, InjectedDisk(conditions)) as folder:
        conditions.fill_disk(None)
        with pytest.raises(OSError, match="no space left"):
            folder.write_new("part", [b"1234"])
        assert list(tmp_path.iterdir()) == []
        conditions.fill_disk(1e-9)
        time.sleep(1e-4)
        folder.write_new("part", [b"1234"])
    assert (tmp_path / "part").read_bytes() == b"1234"


def test_a_torn_version_is_half_a_file_of_a_dead_process(tmp_path: Path):
    """[T20] As a process leaves it that dies while it writes."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from resihp.checkpoint.disk import open_folder\n"
        "from resihp.executor.faults import Conditions\n"
        "from resihp.executor.injected_disk import InjectedDisk\n"
        "conditions = Conditions()\n"
        "conditions.tear_next()\n"
        "with open_folder(Path(sys.argv[1]), InjectedDisk(conditions)) as folder:\n"
        "    folder.write_new('part', [b'12345678'])\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    assert (tmp_path / "part").read_bytes() == b"1234"
