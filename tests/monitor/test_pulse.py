"""A process that hangs is told from one that computes, and from one that was not let run."""

from __future__ import annotations

import os

from resihp.monitor.pulse import Pulse, Silence, Vitals, vitals
from resihp.wire.timing import Timing

TIMING = Timing.from_detect_within(1.0)
BEAT_S = TIMING.beat_s


def looks(silence: Silence, seconds: float, seen: Vitals, *, cpu: bool = False) -> str:
    """Look once per beat, for so long or until there is a verdict."""
    why, now_s = "", silence._seen_s
    for number in range(1, round(seconds / BEAT_S) + 1):
        ticks = seen.cpu_ticks + number * cpu
        why = silence.look(now_s + number * BEAT_S, seen._replace(cpu_ticks=ticks))
        if why:
            break
    return why


def heard() -> Silence:
    silence = Silence(TIMING, 0.0, Vitals(0, 0, wants_cpu=False))
    assert not silence.look(BEAT_S, Vitals(1, 5, wants_cpu=False))
    return silence


def test_a_loop_that_stands_still_and_computes_nothing_hangs():
    """After its time, not before."""
    still = Vitals(1, 5, wants_cpu=False)
    assert not looks(heard(), TIMING.unheard_s - BEAT_S, still)
    assert "hung for" in looks(heard(), TIMING.unheard_s + BEAT_S, still)


def test_a_long_plan_is_no_hang():
    """It uses the processor, or waits for one; but it has an end."""
    for seen, cpu in (Vitals(1, 5, wants_cpu=True), False), (Vitals(1, 5, wants_cpu=False), True):
        assert not looks(heard(), TIMING.stalled_s - BEAT_S, seen, cpu=cpu)
        assert "without an end" in looks(heard(), TIMING.stalled_s + BEAT_S, seen, cpu=cpu)


def test_a_process_has_its_time_to_start():
    """Until it is heard first."""
    silence = Silence(TIMING, 0.0, Vitals(7, 0, wants_cpu=False))
    assert not looks(silence, TIMING.start_s - BEAT_S, Vitals(7, 0, wants_cpu=False))
    assert "hung for" in looks(silence, 2 * BEAT_S, Vitals(7, 0, wants_cpu=False))


def test_a_pause_of_the_one_who_looks_is_nobodys_silence():
    """As where the machine slept."""
    assert not heard().look(1000.0, Vitals(1, 5, wants_cpu=False))


def test_the_vitals_of_a_process_are_those_the_kernel_shows():
    """This one runs, and uses time."""
    pulse = Pulse()
    first = vitals(os.getpid(), pulse)
    while vitals(os.getpid(), pulse).cpu_ticks == first.cpu_ticks:
        pass
    assert first.wants_cpu
    assert first.beat == 0
    os.close(pulse.fd)
