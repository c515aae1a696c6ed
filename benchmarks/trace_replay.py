"""Production traces replayed: measured chunk times in, predicted spans and step times out.

    python benchmarks/trace_replay.py [--data DIR]

Each step of each replica in the traces of ByteDance's straggler study (OSDI'25; see PROVENANCE.md
beside the data) is a 1F1B pipeline whose forward and backward chunks were timed. The 1F1B plan of
its shape is lowered by the compiler and played by the simulator with those durations; a tensor
takes the same time on every hop. So what is tested is the order and the waits of the plan, not the
cost model: the durations are the measured ones. A hop takes 2 ms, whatever the trace, or what it
took in the trace (`measured`: the median over all tensors of the shorter of send and receive, since
the longer one has waited). Sends are posted, as in our executor, or block their stream for the hop,
as in Megatron, whose traces these are.

`span` is from the first start to the last end of compute of a replica. `step` is from the first
start to the last end of anything in a step; it is predicted as the longest span of its replicas
plus one constant per trace (optimizer, reductions, data), the mean of what is missing on the other
steps: a step is never predicted from its own time.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from result_file import print_table

from resihp.compiler import initial_plan
from resihp.compiler.simulate.course import Course, course_of
from resihp.compiler.simulate.times import Prices, play
from resihp.ir.arrays import arrays_of
from resihp.ir.model import Batch, Mesh, ModelShape

DEFAULT_DATA = Path(__file__).parent.parent.parent / "shared/data/bytedance_straggler"
TRACES = {
    "SE": "128 GPUs, uneven sequence lengths",
    "AR": "64 GPUs, one slow worker",
}
FIXED_HOP_S = 0.002
TARGET = 0.01
"""Mean relative error of the span."""

Floats = NDArray[np.float64]


class Trace(NamedTuple):
    """Seconds. Chunks by (step, replica, stage, micro-batch)."""

    forward: Floats
    backward: Floats
    span: Floats
    """By (step, replica)."""
    step: Floats
    hop_s: float
    in_order: float
    """Share of the (step, replica, stage) whose chunks ran in the order of the plan."""


def read_trace(path: Path) -> Trace:
    parquet: Any = importlib.import_module("pyarrow.parquet")  # installed for benchmarks only
    table = parquet.read_table(path)
    kind = np.asarray(table["optype"].cast("string").to_pylist())
    columns = {
        name: table[name].to_numpy().astype(np.float64)
        for name in ("step", "dp_rank", "stage", "mb_id", "seq_id", "start_ts", "duration")
    }
    start, end = columns["start_ts"], columns["start_ts"] + columns["duration"]
    steps, step = np.unique(columns["step"], return_inverse=True)
    replica, stage, number = (
        columns[name].astype(np.intp) for name in ("dp_rank", "stage", "mb_id")
    )
    shape = len(steps), int(replica.max()) + 1, int(stage.max()) + 1, int(number.max()) + 1
    chunks: dict[str, Floats] = {}
    begins: dict[str, Floats] = {}
    spans = np.full(shape[:2], np.inf), np.full(shape[:2], -np.inf)
    for name in ("forward", "backward"):
        at = np.flatnonzero(kind == f"{name}-compute")
        cell = step[at], replica[at], stage[at], number[at]
        chunks[name], begins[name] = np.full(shape, np.nan), np.full(shape, np.nan)
        chunks[name][cell], begins[name][cell] = columns["duration"][at], start[at]
        np.minimum.at(spans[0], (step[at], replica[at]), start[at])
        np.maximum.at(spans[1], (step[at], replica[at]), end[at])
        assert not np.isnan(chunks[name]).any(), f"{path}: some {name} chunk has no time"
    firsts, lasts = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
    np.minimum.at(firsts, step, start)
    np.maximum.at(lasts, step, end)
    course = pipeline(shape[2], shape[3])
    order = course.work.forward, course.work.backward
    planned = np.argsort(np.concatenate(order, axis=1), axis=1)
    ran = np.argsort(np.concatenate((begins["forward"], begins["backward"]), axis=3), axis=3)
    return Trace(
        forward=chunks["forward"],
        backward=chunks["backward"],
        span=spans[1] - spans[0],
        step=lasts - firsts,
        hop_s=measured_hop(kind, columns),
        in_order=float((planned == ran).all(axis=3).mean()),
    )


def measured_hop(kind: NDArray[np.str_], columns: dict[str, Floats]) -> float:
    """Median time of a tensor on its way."""
    shorter: list[float] = []
    for name, ahead in (("forward", 1), ("backward", -1)):
        ends: list[dict[tuple[float, ...], float]] = []
        for end, moved in (("send", ahead), ("recv", 0)):
            at = np.flatnonzero(kind == f"{name}-{end}")
            keys = zip(
                columns["step"][at],
                columns["dp_rank"][at],
                columns["stage"][at] + moved,
                columns["seq_id"][at],
                strict=True,
            )
            ends.append(dict(zip(keys, columns["duration"][at].tolist(), strict=True)))
        assert ends[0].keys() == ends[1].keys()
        shorter += (min(seconds, ends[1][key]) for key, seconds in ends[0].items())
    return float(np.median(shorter))


def pipeline(num_stages: int, num_microbatches: int) -> Course:
    """The lowered 1F1B plan of one replica. The model's sizes play no role."""
    shape = ModelShape(name="any", layers=num_stages, hidden=8, heads=1, kv_heads=1, ffn=8, vocab=8)
    mesh, batch = Mesh(tp=1, pp=num_stages, dp=1), Batch(microbatches=num_microbatches, tokens=8)
    return course_of(arrays_of(initial_plan(shape, mesh, batch, schedule="1f1b")))


def replayed(trace: Trace, hop_s: float, *, blocking: bool) -> Floats:
    """Predicted spans by (step, replica)."""
    num_steps, num_replicas, num_stages, num_microbatches = trace.forward.shape
    course = pipeline(num_stages, num_microbatches)
    delay = np.full(len(course.crossings.sent), hop_s)
    spans = np.zeros((num_steps, num_replicas))
    for cell in np.ndindex(*spans.shape):
        duration = np.zeros(course.arrays.lanes.num_instrs)
        duration[course.work.forward] = trace.forward[cell]
        duration[course.work.backward] = trace.backward[cell]
        if blocking:
            duration[course.crossings.sent] = hop_s
        end = play(course, Prices(duration, delay)).end
        spans[cell] = max(end[course.work.forward].max(), end[course.work.backward].max())
    return spans


def errors(predicted: Floats, measured: Floats) -> Floats:
    return np.abs(predicted - measured) / measured


def step_errors(spans: Floats, measured: Floats) -> Floats:
    """Of steps, each with the constant of the others."""
    longest = spans.max(axis=1)
    missing = measured - longest
    others = (missing.sum() - missing) / (len(missing) - 1)
    return errors(longest + others, measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data",
        type=Path,
        default=DEFAULT_DATA,
        help="directory of the traces (default: %(default)s)",
    )
    args = parser.parse_args()
    if not args.data.is_dir():
        raise SystemExit(f"{args.data} is not there: the traces are no part of this repository")
    rows: dict[str, dict[str, float | int | str]] = {}
    for name, what in TRACES.items():
        trace = read_trace(args.data / f"trace-{name}.parquet")
        ways = {
            f"{1e3 * FIXED_HOP_S:g} ms, posted": (FIXED_HOP_S, False),
            f"{1e3 * trace.hop_s:.1f} ms (measured), posted": (trace.hop_s, False),
            f"{1e3 * trace.hop_s:.1f} ms (measured), blocking": (trace.hop_s, True),
        }
        for way, (hop_s, blocking) in ways.items():
            spans = replayed(trace, hop_s, blocking=blocking)
            of_span = errors(spans, trace.span)
            rows[f"{name}, {what}: {way}"] = {
                "pipelines": int(spans.size),
                "in 1F1B order %": 100 * trace.in_order,
                "span MAPE %": 100 * float(of_span.mean()),
                "bias %": 100 * float((spans / trace.span - 1).mean()),
                "worst %": 100 * float(of_span.max()),
                "step MAPE %": 100 * float(step_errors(spans, trace.step).mean()),
                "constant s": float((trace.step - spans.max(axis=1)).mean()),
                "mean step s": float(trace.step.mean()),
            }
    print_table("Production traces replayed", rows)
    print(f"\nThe aim for the span is a MAPE of {TARGET:.0%}.")


if __name__ == "__main__":
    main()
