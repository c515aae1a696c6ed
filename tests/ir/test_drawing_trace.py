"""The trace is what the Trace Event Format allows, and what Perfetto needs to show it right."""

from __future__ import annotations

import random

import msgspec
import pytest
from drawing_cases import healthy, paired, played
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_build import make_plan
from plan_generator import generate

from resihp.ir.drawing.document import Document, document_of
from resihp.ir.drawing.hops import hops_of
from resihp.ir.drawing.scene import Clock, scene_of
from resihp.ir.drawing.trace import trace_of
from resihp.ir.model import GroupName

ALWAYS = {"name": str, "ph": str, "pid": int}
TIMED = {**ALWAYS, "ts": float}
# What the format's document lists for each phase: fields that must be there, and that may be.
FIELDS = {
    "X": ({**TIMED, "tid": int, "dur": float}, {"cat": str, "cname": str, "args": dict}),
    "s": ({**TIMED, "tid": int, "cat": str, "id": int}, {}),
    "f": ({**TIMED, "tid": int, "cat": str, "id": int}, {"bp": str}),
    "C": ({**TIMED, "args": dict}, {}),
    "M": ({**ALWAYS, "args": dict}, {"tid": int}),
}
METADATA = {
    "process_name": {"name": str},
    "process_sort_index": {"sort_index": int},
    "thread_name": {"name": str},
    "thread_sort_index": {"sort_index": int},
}
RESERVED_COLOURS = {
    "rail_response",
    "thread_state_running",
    "rail_idle",
    "rail_load",
    "black",
    "grey",
}


def events(plan, **more):
    trace = msgspec.json.decode(msgspec.json.encode(trace_of(scene_of(played(plan, **more)))))
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    return trace["traceEvents"]


def of(found, phase):
    return [event for event in found if event["ph"] == phase]


def in_ns(event):
    """Start and end."""
    start = round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)


@given(st.integers(0, 1 << 32))
@settings(max_examples=40, deadline=None)
def test_every_event_has_the_fields_of_its_phase(seed):
    """And no other; colours are of the format's reserved names."""
    for event in events(generate(random.Random(seed))):
        required, allowed = FIELDS[event["ph"]]
        assert required.keys() <= event.keys() <= required.keys() | allowed.keys()
        for name, value in event.items():
            assert isinstance(value, {**required, **allowed}[name])
        if event["ph"] == "M":
            kinds = METADATA[event["name"]]
            assert {name: type(value) for name, value in event["args"].items()} == kinds
        if event["ph"] == "C":
            assert all(type(value) in (int, float) for value in event["args"].values())
        assert event.get("cname", "grey") in RESERVED_COLOURS
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0


@given(st.integers(0, 1 << 32))
@settings(max_examples=40, deadline=None)
def test_slices_of_a_thread_are_apart_or_inside_each_other(seed):
    """Otherwise viewers show wrong lengths. Every compute instruction is one."""
    plan = generate(random.Random(seed))
    found = of(events(plan), "X")
    by_thread = {}
    for event in found:
        by_thread.setdefault((event["pid"], event["tid"]), []).append(event)
    for slices in by_thread.values():
        stack = []
        for start, end in map(in_ns, slices):
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or end <= stack[-1]
            stack.append(end)
    scene = scene_of(played(plan))
    drawn = sorted((e["pid"], e["args"]["index"]) for e in found if e["cat"] == "compute")
    boxes = [(row.group.replica + 1, box.at) for row in scene.rows for box in row.boxes]
    assert drawn == sorted(boxes)


@given(st.integers(0, 1 << 32))
@settings(max_examples=30, deadline=None)
def test_every_arrow_goes_from_a_slice_to_a_slice(seed):
    """From the compute that makes a tensor, a nanosecond before its end, to that which uses it."""
    plan = generate(random.Random(seed))
    found = events(plan)
    starts, ends = ({e["id"]: e for e in of(found, phase)} for phase in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == len(list(hops_of(scene_of(played(plan)))))
    slices = {}
    for event in of(found, "X"):
        slices.setdefault(event["tid"], []).append(in_ns(event))
    for one in [*starts.values(), *ends.values()]:
        time = round(one["ts"] * 1000)
        assert any(start <= time < end for start, end in slices[one["tid"]])
    assert all(starts[key]["ts"] <= ends[key]["ts"] for key in starts)


def test_events_are_in_order_of_time():
    """At one time what encloses before what is inside, and slices before arrows."""
    found = [event for event in events(paired(healthy("zbv"))) if event["ph"] != "M"]
    keys = [(event["ts"], "XsfC".index(event["ph"]), -event.get("dur", 0)) for event in found]
    assert keys == sorted(keys)


def test_a_pair_is_a_slice_around_both():
    """Named after them."""
    found = of(events(paired(healthy("zb-h1", pp=1, microbatches=1))), "X")
    assert [event["name"] for event in found[:3]] == ["F 0 & B 0", "F 0", "B 0"]
    assert [in_ns(event) for event in found[:3]] == [
        (0, 2_000_000),
        (0, 1_000_000),
        (1_000_000, 2_000_000),
    ]


def test_processes_are_replicas_and_threads_are_groups():
    """Named and numbered from 1, in their order."""
    plan = make_plan(dp=2, tp=2, degrees={GroupName(1, 1): 1}, microbatches=2)
    found = of(events(plan, speeds={2: 0.5}), "M")
    names = [(e["pid"], e.get("tid"), e["args"]["name"]) for e in found if "name" in e["args"]]
    assert names == [
        (1, None, "replica 0"),
        (1, 1, "pp0: stage 0, ranks 0,1"),
        (1, 2, "pp1: stage 1, ranks 2,3, 0.5x speed"),
        (2, None, "replica 1"),
        (2, 3, "pp0: stage 0, ranks 4,5"),
        (2, 4, "pp1: stage 1, ranks 6"),
    ]


def test_what_runs_beside_computation_has_a_thread_of_its_own():
    """A reduction that overlaps the next chunk, as a timeline of measured times may say."""
    known = played(make_plan(pp=1, microbatches=2))
    name = GroupName(0, 0)
    starts = {name: [0.0, 1.0, 1.5, 3.0, 2.0, 5.0]}
    ends = {name: [1.0, 1.5, 3.0, 5.0, 4.0, 5.0]}
    timeline = known.timeline._replace(starts=starts, ends=ends)
    scene = scene_of(known._replace(timeline=timeline, facts=None))
    found = of(msgspec.to_builtins(trace_of(scene).traceEvents), "X")
    assert {event["name"]: event["tid"] for event in found if event["cat"] == "gradients"} == {
        "reduce_grads 0": 2,
        "step": 1,
    }


def test_memory_is_a_counter_of_each_group():
    """Of bytes; where several values share a time the highest and then the last."""
    scene = scene_of(played(make_plan(microbatches=2)))
    found = of(msgspec.to_builtins(trace_of(scene).traceEvents), "C")
    peaks = {}
    for event in found:
        peaks[event["name"]] = max(peaks.get(event["name"], 0), event["args"]["bytes"])
    assert peaks == {
        f"pp{row.group.pp} memory of a rank": row.memory.peak_bytes
        for row in scene.rows
        if row.memory is not None
    }


@pytest.mark.parametrize(("unit", "length_us"), [("s", 15e6), ("unit", 15e3)])
def test_times_are_microseconds(unit, length_us):
    """Of a second, or of a unit that stands for a millisecond."""
    plan = healthy("1f1b", pp=2, microbatches=4)
    found = of(events(plan, clock=Clock(unit, "")), "X")
    assert max(event["ts"] + event["dur"] for event in found) == length_us


def test_the_same_plan_makes_the_same_trace():
    """To the letter."""
    encoded = [msgspec.json.encode(trace_of(scene_of(played(healthy("zbv"))))) for _ in range(2)]
    assert encoded[0] == encoded[1]


@given(st.integers(0, 1 << 32))
@settings(max_examples=30, deadline=None)
def test_the_json_has_every_instruction_with_its_times(seed):
    """And can be read back as what it was."""
    known = played(generate(random.Random(seed)))
    document = document_of(scene_of(known))
    assert msgspec.json.decode(msgspec.json.encode(document), type=Document) == document
    for replica in document.replicas:
        for group, name in zip(
            replica.groups, [n for n in known.lanes if n.replica == replica.replica], strict=True
        ):
            assert group.group == str(name)
            assert [each.start for each in group.instrs] == known.timeline.starts[name]
            assert [each.op for each in group.instrs] == [
                instr.op.mnemonic for instr in known.lanes[name].body
            ]
