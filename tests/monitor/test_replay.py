"""What a supervisor says again to a monitor or a coordinator that is new."""

from __future__ import annotations

import msgspec

from resihp.monitor.replay import Replay
from resihp.wire.messages import (
    ExecutorExited,
    ExecutorStarted,
    Finished,
    Joined,
    Observed,
    Ready,
    SaveFailed,
    StepDone,
    StepRecord,
    Trouble,
)

STARTED = ExecutorStarted(pid=7)


def done(step: int) -> StepDone:
    return StepDone(generation=1, record=StepRecord.empty(step))


def joined(generation: int) -> Joined:
    return Joined(generation=generation, hashes={}, moved_bytes=0)


def replay(*messages: object) -> Replay:
    memory = Replay()
    for message in messages:
        memory.keep(message)  # pyright: ignore[reportArgumentType]
    return memory


def test_the_last_of_each_kind_is_said_again_in_order():
    """Whatever the order in which they came."""
    memory = replay(STARTED, joined(1), joined(2))
    assert memory.messages(0) == [STARTED, joined(2)]


def test_steps_come_before_what_came_of_them():
    """A coordinator must know all steps before it hears that the job is finished."""
    end = Finished(generation=1)
    memory = replay(STARTED, joined(1), done(0), done(1), end)
    assert memory.messages(1) == [STARTED, joined(1), done(1), end]


def test_a_new_executor_voids_what_the_last_one_said():
    """But not the steps that it committed."""
    memory = replay(STARTED, joined(1), done(0), ExecutorExited(code=-9, last_words=""))
    again = ExecutorStarted(pid=8)
    memory.keep(again)
    assert memory.messages(0) == [again, done(0)]


def test_times_are_not_said_again():
    """They are of use while they are new, and thousands of steps are remembered."""
    observed = Observed(generation=1, step=0, starts_ns=bytes(8), ends_ns=bytes(8))
    timed = msgspec.structs.replace(done(0), observed=observed)
    assert replay(STARTED, timed).messages(0) == [STARTED, done(0)]


def test_trouble_is_said_again():
    """The link stays broken: who never hears of it takes the generation for one that hangs."""
    trouble = [Trouble(generation=number, what="x") for number in (1, 2)]
    assert replay(STARTED, *trouble).messages(0) == [STARTED, trouble[1]]


def test_news_of_a_moment_are_not_said_again():
    """Such as a save that failed: by then it is over, or comes up again."""
    failed = SaveFailed(generation=1, name="v", why="x")
    assert replay(STARTED, failed).messages(0) == [STARTED]
    assert Ready not in map(type, replay(STARTED).messages(0))
