"""Streams of a device that runs behind the host: who waits for whom, and that the host does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from slow_device import SlowQueue, launch

from resihp.errors import GenerationClosed
from resihp.executor.device.issuing import IssuingStream
from resihp.executor.interpreter.observe import Observation

RUN_AHEAD = 3
HANG_S = 20.0


class Gate:
    """A kernel that runs until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def launch(self) -> None:
        launch(lambda: self._pass())

    def _pass(self) -> None:
        assert self.opened.wait(HANG_S)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


@pytest.fixture
def compute() -> IssuingStream:
    return IssuingStream("compute", SlowQueue(), run_ahead=RUN_AHEAD)


@pytest.fixture
def comm() -> IssuingStream:
    return IssuingStream("comm", SlowQueue(), run_ahead=RUN_AHEAD)


def queue_of(stream: IssuingStream) -> SlowQueue:
    assert isinstance(stream.queue, SlowQueue)
    return stream.queue


def test_an_event_happens_when_its_work_is_issued(compute: IssuingStream, gate: Gate):
    """The device has not begun, and the host goes on."""
    event = compute.submit(gate.launch)
    event.wait()
    assert not event.mark.query()
    gate.opened.set()
    event.mark.synchronize()


def test_another_stream_waits_on_the_device(
    compute: IssuingStream, comm: IssuingStream, gate: Gate
):
    """What reads a result runs after what makes it, and keeps its memory; no host waits."""
    box, seen = [0], []

    def produce() -> list[int]:
        gate.launch()
        launch(lambda: box.__setitem__(0, 7))
        return box

    produced = compute.submit(produce)
    read = comm.submit(lambda: launch(lambda: seen.append(box[0])), waits=[produced])
    read.wait()
    assert seen == []
    assert queue_of(comm).waited == [produced.mark]
    assert queue_of(comm).used == [box]
    gate.opened.set()
    read.mark.synchronize()
    assert seen == [7]


def test_the_host_runs_ahead_so_far_and_no_further(compute: IssuingStream, gate: Gate):
    """With the first item still running, `run_ahead` are issued and the next is not."""
    events = [compute.submit(gate.launch, label=0)]
    events += [compute.submit(lambda: None, label=i) for i in range(1, RUN_AHEAD)]
    one_more = compute.submit(lambda: None, label=RUN_AHEAD)
    for event in events:
        event.wait()
    assert all(event.mark.num_waits == 0 for event in events[1:])
    assert not one_more.done
    gate.opened.set()
    one_more.wait()
    assert events[0].mark.num_waits == 1


def test_unlabelled_items_are_issued_without_a_look_at_the_device(
    compute: IssuingStream, gate: Gate
):
    """Posting messages costs no place in the queue."""
    first = compute.submit(gate.launch, label=0)
    for _ in range(5 * RUN_AHEAD):
        compute.submit(lambda: None).wait()
    assert first.mark.num_waits == 0


def test_times_are_those_of_the_device(compute: IssuingStream):
    """Start and end of every item that has ended, in the order of the stream."""
    num = 12
    observation = Observation(num)
    compute.observation = observation
    events = [compute.submit(lambda: launch(lambda: None), label=i) for i in range(num)]
    events[-1].wait()
    events[-1].mark.synchronize()
    compute.submit(lambda: None, label=0).wait()  # the next item tells of those before it
    times = [
        time
        for pair in zip(observation.starts_ns, observation.ends_ns, strict=True)
        for time in pair
    ]
    assert all(times)
    assert times[1:] == sorted(times[1:])
    assert observation.ends_ns[num - 1] == events[-1].mark.at_ns()


def test_times_go_to_the_iteration_that_they_are_of(compute: IssuingStream, gate: Gate):
    """An item that ends in the next iteration is told to the observation of its own."""
    own, following = Observation(1), Observation(1)
    compute.observation = own
    compute.submit(gate.launch, label=0).wait()
    compute.observation = following
    gate.opened.set()
    for _ in range(RUN_AHEAD + 1):
        compute.submit(lambda: None, label=0).wait()
    assert own.ends_ns[0] > 0
    assert own.ends_ns[0] <= following.starts_ns[0]


def test_the_stream_is_where_its_device_is(compute: IssuingStream, gate: Gate):
    """Not where the host is, which has issued it all; what waits is the item at the device."""
    other = IssuingStream("other", SlowQueue())
    needed = other.submit(gate.launch)
    compute.submit(lambda: None, label=4).wait()
    compute.submit(lambda: None, waits=[needed], label=5).wait()
    compute.submit(lambda: None, label=6).wait()
    while compute.position == 4:
        threading.Event().wait(0.001)
    assert (compute.position, compute.is_waiting) == (5, True)
    gate.opened.set()
    while compute.position != -1:
        threading.Event().wait(0.001)
    assert not compute.is_waiting


def test_clocks_are_compared_when_the_device_is_idle(compute: IssuingStream, gate: Gate):
    """Comparing waits for what is queued, so it is left while anything is, labelled or not."""
    compute.submit(lambda: None, label=0).wait()
    assert queue_of(compute).num_meetings == 1
    last = compute.submit(gate.launch)
    compute.submit(lambda: None, label=1).wait()
    assert queue_of(compute).num_meetings == 1
    gate.opened.set()
    last.mark.synchronize()
    compute.when_idle().wait()
    compute.submit(lambda: None, label=2).wait()
    assert queue_of(compute).num_meetings == 2


def test_idle_means_that_the_device_is(compute: IssuingStream, gate: Gate):
    """Nothing is queued on the host long before the device is done."""
    compute.submit(gate.launch).wait()
    idle = compute.when_idle()
    while not compute.is_idle:
        threading.Event().wait(0.001)
    assert not idle.done
    gate.opened.set()
    idle.wait()
    assert idle.error is None


def test_an_error_ends_what_is_queued(compute: IssuingStream):
    """As on every stream; after a reset it works again."""

    def fail() -> None:
        raise ValueError("a bug")

    broken, behind = compute.submit(fail), compute.submit(lambda: None)
    for event in (broken, behind):
        with pytest.raises(ValueError, match="a bug"):
            event.wait()
    compute.when_idle().wait()
    compute.reset()
    compute.submit(lambda: None, label=0).wait()


def test_cancelled_work_is_not_issued(compute: IssuingStream, gate: Gate):
    """What waits for the device to come closer is dropped as soon as it does."""
    for label in range(RUN_AHEAD):
        compute.submit(gate.launch, label=label)
    ran = []
    late = [compute.submit(lambda: ran.append(1), label=9) for _ in range(3)]
    compute.cancel()
    gate.opened.set()
    compute.when_idle().wait()
    assert [type(event.error) for event in late[1:]] == [GenerationClosed] * 2
    assert len(ran) <= 1
