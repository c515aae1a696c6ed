"""A job that is to end, and whose coordinator dies: whoever takes over ends it in the same way."""

from __future__ import annotations

import pytest
from coordinator_cases import Desk, exited, ready, record_of, settled
from saving_cases import RUN, desk_of, save, saved

from resihp.checkpoint.versions import version_name
from resihp.monitor.actions import End
from resihp.monitor.coordinator import Phase
from resihp.wire.messages import Beat, Deploy, Go, Save


def beat(generation: int = 1, *, runs: bool = True) -> Beat:
    return Beat(step=0, instruction=0, generation=generation, runs=runs)


def successor(*, base: int = 0, generation: int = 1) -> Desk:
    """Takes over a job of which one step is complete, and is told that it is to end."""
    desk = desk_of()
    desk.take_over(desk.entry(generation, base=base, version=min(base, 1)), [record_of(0)])
    stop(desk)
    desk.say_all(ready())
    return desk


def stop(desk: Desk) -> None:
    desk.do(desk.coordinator.stop("stopped by SIGTERM", 143, desk.clock.now_s()))


def check_saves(desk: Desk, step: int = 1) -> None:
    """All write what they hold, once, and the job ends when that is complete."""
    generation = desk.generation
    assert desk.end is None
    assert desk.phase is Phase.SAVING
    orders = {rank: order for rank, order in desk.sent(Save) if order.generation == generation}
    assert list(orders) == desk.alive
    assert {order.commit.version for order in orders.values()} == {step}
    name = save(desk, step)
    assert name == version_name(step, RUN, generation)
    assert desk.end == End(143, f"stopped by SIGTERM; newest saved: {name} (step {step})")
    assert not desk.sent(Deploy) + desk.sent(Go)


@pytest.mark.parametrize(("base", "generation"), [(0, 1), (1, 2)], ids=["first", "later"])
def test_a_generation_that_all_run_is_saved_and_not_adopted(base: int, generation: int):
    """The coordinator that was told died before it told anybody."""
    desk = successor(base=base, generation=generation)
    desk.say_all(beat(generation))
    assert desk.closed() == list(desk.world)
    desk.say_all(settled(desk.generation, 1, layouts=(generation,)))
    check_saves(desk)


@pytest.mark.parametrize("heard", ["settled", "beat", "loss"])
def test_what_was_being_saved_is_saved_under_another_name(heard: str):
    """Ranks have left for generation 2, and some have written there: no file is in the way,
    whatever of it is heard first."""
    desk = successor()
    match heard:
        case "settled":
            desk.say(2, settled(2, 1, layouts=(1,)))
        case "beat":
            desk.say(2, beat(2, runs=False))
        case _:
            desk.say(2, exited())
    assert desk.generation == 3
    desk.say_all(settled(2, 1, layouts=(1,)))
    assert desk.phase is Phase.SETTLING
    desk.say_all(settled(3, 1, layouts=(1,)))
    check_saves(desk)


def test_what_was_saved_already_is_not_saved_again():
    """The coordinator before died when the version was complete."""
    desk = desk_of(saved(1))
    desk.take_over(desk.entry(), [record_of(0)])
    stop(desk)
    desk.say_all(ready())
    desk.say_all(beat(2, runs=False))
    desk.say_all(settled(3, 1, layouts=(1,)))
    assert not desk.sent(Save)
    assert desk.end is not None
    assert desk.end.exit_code == 143
    assert f"newest saved: {saved(1).name}" in desk.end.reason


def test_whoever_is_told_late_ends_it_all_the_same():
    """Its generation was adopted, or settles: by a monitor that followed after the others."""
    for phase in (Phase.RUNNING, Phase.SETTLING):
        desk = desk_of()
        desk.take_over(desk.entry(), [record_of(0)])
        desk.say_all(ready())
        if phase is Phase.RUNNING:
            desk.say_all(beat())
        else:
            desk.say(3, exited())
        assert desk.phase is phase
        stop(desk)
        assert desk.phase is Phase.SETTLING
        desk.say_all(settled(desk.generation, 1, layouts=(1,)))
        check_saves(desk)


def test_a_rank_that_is_not_heard_holds_up_no_end():
    """Nor does one that is lost: the others hold everything."""
    desk = successor()
    for rank in (0, 1, 2):
        desk.say(rank, beat())
    desk.wait(desk.timing.silent_s + 1)
    assert desk.phase is Phase.SETTLING
    desk.gone(3)
    desk.say_all(settled(desk.generation, 1, layouts=(1,)))
    check_saves(desk)
