"""What operators want of all ranks: asked for once per generation, and answered once."""

from __future__ import annotations

import msgspec
import pytest
from coordinator_cases import Desk, exited, job_of, ready, record_of
from saving_cases import RUN, desk_of, part, save, saved

from resihp.checkpoint.versions import version_name
from resihp.config import DeviceConfig
from resihp.monitor.actions import Answer
from resihp.monitor.coordinator import Phase
from resihp.wire.messages import (
    Audited,
    Beat,
    Finished,
    Refused,
    Reply,
    Request,
    SaveFailed,
    StepDone,
    What,
)

BOTH = pytest.mark.parametrize("what", ["checkpoint", "audit"])
NAME = version_name(3, RUN, 1)


def running(num_steps: int = 2, *, job_steps: int = 9) -> Desk:
    """A job that trains and has completed some steps."""
    desk = desk_of(job=job_of(steps=job_steps)).run()
    for step in range(num_steps):
        desk.step(step)
    return desk


def wish(desk: Desk, what: What) -> None:
    desk.do(desk.coordinator.wish(what, desk.clock.now_s()))


def asked(desk: Desk, what: What) -> list[tuple[int, int]]:
    """(rank, generation) of all that were asked to bring it into the vote."""
    return [(rank, each.generation) for rank, each in desk.sent(Request) if each.what == what]


def answers(desk: Desk) -> list[Reply | Refused]:
    return [action.answer for action in desk.all_of(Answer)]


def audited(version: int, *differing: str, generation: int = 1, num_shards: int = 12) -> Audited:
    return Audited(
        generation=generation, version=version, differing=differing, num_shards=num_shards
    )


def fulfil(desk: Desk, what: What, version: int) -> None:
    """All ranks have done it."""
    if what == "checkpoint":
        save(desk, version)
    else:
        desk.say_all(audited(version, generation=desk.generation))


# --- asked and answered


def test_a_version_that_an_operator_wants_is_told_by_name_and_size():
    """One rank brings it into the vote; the answer comes when the version is complete."""
    desk = running()
    wish(desk, "checkpoint")
    assert asked(desk, "checkpoint") == [(0, 1)]
    desk.step(2)
    desk.say_all(part(desk, 3))
    assert answers(desk) == []
    desk.do(desk.coordinator.completed(NAME, "", [], desk.clock.now_s()))
    assert answers(desk) == [Reply(text=f"step 3: saved as version {NAME}, 4.0 MiB")]


@pytest.mark.parametrize(
    ("num_shards", "text"),
    [
        (12, "step 3: all replicas of 12 shards are equal"),
        (0, "step 3: each shard has one holder, nothing was compared"),
    ],
)
def test_an_audit_that_an_operator_wants_says_how_much_was_compared(num_shards: int, text: str):
    """Once, though every member says the same."""
    desk = running()
    wish(desk, "audit")
    assert asked(desk, "audit") == [(0, 1)]
    desk.say_all(audited(3, num_shards=num_shards))
    assert answers(desk) == [Reply(text=text)]
    assert desk.phase is Phase.RUNNING


def test_replicas_that_differ_are_named_to_the_operator():
    """With tensor and ranks; the job ends with it, as after any audit."""
    desk = running()
    wish(desk, "audit")
    line = "parameter table: that of rank 0 differs from that of rank 2"
    desk.say_all(audited(3, line))
    assert answers(desk) == [Reply(text=f"step 3: replicas differ: {line}", is_bad=True)]
    assert desk.end is not None
    assert desk.end.exit_code == 1


@BOTH
def test_a_second_wish_is_the_same_wish(what: What):
    """Nobody is asked twice, and one answer is for all; a wish after that is a new one."""
    desk = running()
    for _ in range(2):
        wish(desk, what)
        desk.wait(0.1)
    assert asked(desk, what) == [(0, 1)]
    fulfil(desk, what, 3)
    assert len(answers(desk)) == 1
    desk.step(2)
    desk.step(3)
    wish(desk, what)
    assert len(asked(desk, what)) == 2


@BOTH
def test_what_is_due_by_its_number_is_an_answer_too(what: What):
    """At the steps that the operator saw complete or a later one, not at an older one."""
    desk = running(3)
    wish(desk, what)
    fulfil(desk, what, 2)
    assert answers(desk) == []
    fulfil(desk, what, 3)
    (answer,) = answers(desk)
    assert isinstance(answer, Reply)
    assert answer.text.startswith("step 3: ")


def test_a_version_that_is_saved_already_is_told_at_once():
    """That of the newest step."""
    desk = running()
    save(desk, 2)
    wish(desk, "checkpoint")
    assert not desk.sent(Request)
    assert len(answers(desk)) == 1


# --- recoveries


@BOTH
def test_a_wish_that_falls_into_a_recovery_is_asked_again(what: What):
    """Its generation ends before the vote: a rank that is left is asked in the next one."""
    desk = running()
    wish(desk, what)
    desk.say(0, exited())
    desk.settle(2)
    desk.join()
    assert asked(desk, what) == [(0, 1), (1, 2)]
    assert answers(desk) == []
    fulfil(desk, what, 3)
    assert len(answers(desk)) == 1


@BOTH
@pytest.mark.parametrize("phase", [Phase.SETTLING, Phase.PROPOSING, Phase.OPENING])
def test_a_wish_during_a_recovery_waits_for_its_end(phase: Phase, what: What):
    """Nobody runs then who could bring it into a vote."""
    desk = running()
    desk.say(3, exited())
    desk.decides = phase is not Phase.PROPOSING
    if phase is not Phase.SETTLING:
        desk.settle(2)
    assert desk.phase is phase
    wish(desk, what)
    assert not desk.sent(Request)
    if phase is Phase.SETTLING:
        desk.settle(2)
    if phase is Phase.PROPOSING:
        desk.decide(2)
    desk.join()
    assert asked(desk, what) == [(0, 2)]


@BOTH
def test_a_wish_is_kept_by_a_coordinator_that_takes_over(what: What):
    """The monitor says it again, and the adopted generation is asked."""
    desk = desk_of()
    desk.take_over(desk.entry(version=1), [record_of(0)])
    wish(desk, what)
    desk.say_all(ready())
    assert not desk.sent(Request)
    desk.say_all(Beat(step=0, instruction=0, generation=1, runs=True))
    assert asked(desk, what) == [(0, 1)]


@BOTH
def test_a_rank_whose_monitor_was_gone_is_asked_again(what: What):
    """The request or what came of it may be lost; another rank's connection says nothing."""
    desk = running()
    wish(desk, what)
    desk.do(desk.coordinator.reached([1, 2], desk.clock.now_s()))
    assert len(asked(desk, what)) == 1
    desk.do(desk.coordinator.reached([0], desk.clock.now_s()))
    assert asked(desk, what) == [(0, 1), (0, 1)]
    fulfil(desk, what, 3)
    desk.do(desk.coordinator.reached([0], desk.clock.now_s()))
    assert len(asked(desk, what)) == 2


def test_a_version_of_a_closed_generation_is_no_failure():
    """It is dropped with its generation, and the next one saves another."""
    desk = running()
    wish(desk, "checkpoint")
    desk.step(2)
    desk.say(0, part(desk, 3))
    desk.say(3, exited())
    desk.say(1, SaveFailed(generation=1, name=NAME, why="no space left"))
    desk.settle(3)
    desk.join()
    assert answers(desk) == []
    assert asked(desk, "checkpoint") == [(0, 1), (0, 2)]


def test_a_version_is_waited_for_from_where_all_went_back_to():
    """What the operator saw is undone: the steps that count are those there are now."""
    desk = desk_of(saved(2), job=job_of(tp=2, pp=1, dp=2, steps=9)).run()
    for step in range(5):
        desk.step(step)
    wish(desk, "checkpoint")
    for rank in (1, 3):
        desk.say(rank, exited())
    desk.settle(5)
    assert desk.last_deploy().commit.version == 2
    desk.join()
    (answer,) = answers(desk)
    assert isinstance(answer, Reply)
    assert answer.text.startswith("step 2: ")


# --- what does not come of it


def test_a_version_that_cannot_be_written_is_told_with_the_disk_s_word():
    """It is bad news and no refusal; training goes on."""
    desk = running()
    wish(desk, "checkpoint")
    desk.say(2, SaveFailed(generation=1, name=NAME, why="no space left"))
    assert answers(desk) == [
        Reply(text=f"version {NAME} was not saved: no space left", is_bad=True)
    ]
    assert desk.phase is Phase.RUNNING


def test_parts_that_are_no_whole_state_are_told():
    """The disk has them, and they do not fit together."""
    desk = running()
    wish(desk, "checkpoint")
    save(desk, 3, trouble="part 1 is damaged")
    (answer,) = answers(desk)
    assert isinstance(answer, Reply)
    assert answer.is_bad
    assert answer.text.endswith("was not saved: part 1 is damaged")


def test_a_rank_that_still_writes_the_version_before_is_asked_again():
    """After a while, and the wish is as good as before."""
    desk = running()
    wish(desk, "checkpoint")
    busy = SaveFailed(generation=1, name=NAME, why="still being written", is_busy=True)
    for rank in (1, 2):
        desk.say(rank, busy)
    assert answers(desk) == []
    desk.wait(desk.timing.grace_s / 2)
    assert len(asked(desk, "checkpoint")) == 1
    desk.wait(desk.timing.grace_s)
    assert len(asked(desk, "checkpoint")) == 2
    save(desk, 4)
    assert len(answers(desk)) == 1


@BOTH
def test_a_job_that_ends_first_refuses_what_is_wanted(what: What):
    """In one sentence, whether it was asked for already or not."""
    desk = running(job_steps=2)
    wish(desk, what)
    desk.say_all(Finished(generation=1))
    wish(desk, what)
    assert answers(desk) == [
        Refused(text="the job ended first: finished"),
        Refused(text="the job is ending"),
    ]


def test_a_version_that_only_lacks_its_marker_when_the_job_ends_is_waited_for():
    """All ranks wrote their parts before they said that they finished."""
    desk = running(job_steps=3)
    wish(desk, "checkpoint")
    desk.step(2)
    desk.say_all(part(desk, 3))
    desk.say_all(Finished(generation=1))
    assert desk.end is not None
    assert answers(desk) == []
    desk.do(desk.coordinator.completed(NAME, "", [], desk.clock.now_s()))
    assert answers(desk) == [Reply(text=f"step 3: saved as version {NAME}, 4.0 MiB")]


def test_a_job_that_is_to_end_answers_with_the_version_before_its_end():
    """A signal comes after the wish: what is saved then is what was wanted. Later wishes are not
    heard any more, and audits not made."""
    desk = running()
    for what in ("checkpoint", "audit"):
        wish(desk, what)
    desk.do(desk.coordinator.stop("stopped by SIGTERM", 143, desk.clock.now_s()))
    wish(desk, "checkpoint")
    assert answers(desk) == [Refused(text="the job is ending")]
    desk.settle(version=2)
    save(desk, 2)
    assert desk.end is not None
    _, *late = answers(desk)
    name = version_name(2, RUN, 2)
    assert late == [
        Reply(text=f"step 2: saved as version {name}, 4.0 MiB"),
        Refused(text=f"the job ended first: {desk.end.reason}"),
    ]


@BOTH
def test_no_wish_waits_for_ever(what: What):
    """Nothing comes of it: whoever waits is told, and what the job does."""
    desk = running()
    wish(desk, what)
    beat = Beat(step=2, instruction=0, generation=1, runs=True)
    for step in range(2, 8):
        desk.wait(desk.timing.wish_s / 5, beats=beat)
        desk.say_all(StepDone(generation=1, record=record_of(step)))
    (answer,) = answers(desk)
    assert isinstance(answer, Refused)
    assert answer.text.startswith("not done within 180 s (the job is running")


@BOTH
def test_no_wish_is_late_by_what_the_coordinator_slept(what: What):
    """It stood still with its machine, and the ranks perhaps with it."""
    desk = running()
    wish(desk, what)
    desk.clock.advance(1000.0)
    desk.do(desk.coordinator.stood_still(1000.0, desk.clock.now_s()))
    desk.wait(0.1)
    assert answers(desk) == []
    fulfil(desk, what, 3)
    assert len(answers(desk)) == 1


@BOTH
def test_a_job_that_has_not_begun_refuses(what: What):
    """Nobody holds anything yet."""
    desk = desk_of()
    wish(desk, what)
    assert answers(desk) == [Refused(text="the job has not begun yet")]


@BOTH
def test_emulated_devices_have_nothing_to_save_or_compare(what: What):
    """They hold no state."""
    job = msgspec.structs.replace(job_of(), device=DeviceConfig(kind="emulated"))
    desk = Desk(job)
    desk.take_over(desk.entry(), [])
    wish(desk, what)
    (answer,) = answers(desk)
    assert isinstance(answer, Refused)
    assert answer.text.startswith("emulated devices hold no state")


def test_a_job_without_a_place_saves_nothing():
    """It can be audited all the same."""
    desk = Desk().run()
    wish(desk, "checkpoint")
    assert answers(desk) == [Refused(text="this job saves nothing")]
    wish(desk, "audit")
    assert asked(desk, "audit") == [(0, 1)]
