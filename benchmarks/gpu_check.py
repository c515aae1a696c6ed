"""What one GPU can show of the executor, in less than eight minutes: `make gpu-check`.

Every section prints what it saw and whether that is as it should be; the exit code is 1 where
something is not. Without a GPU it says so and checks nothing. `--cpu` runs the same sections on the
CPU with a small model: that checks this script, not CUDA, and it says so in every line.

- tests: those with the marker `gpu`.
- parity: four ranks, in one process on streams of their own, against the same on CPU, as a pipeline
  of four stages and as one of two at TP 2: losses and every parameter after some steps, fp32
  without TF32.
- host syncs: how often F, B, W, the messages and the update make the host wait for the device,
  as torch's own sync debug mode counts it. None is right; the vote, once per step, is beside it.
- overlap: how much of the time several ranks' kernels run at once, from the observed times; they
  go to a trace file too.
- throughput: a stack of layers of the 1B shape in bf16, ours with B and W apart against plain
  modules of the same formulas under autograd, in turns; the median of the ratios.
- processes: a job of four ranks that share the GPU, one of them killed, through `resihp train`;
  its losses against the same job on CPU.
- nccl: the same with a GPU for every rank, so over NCCL: two ranks of two stages, or with four GPUs
  two replicas of them, one killed. Skipped with one GPU, where nothing of NCCL is checked but a
  group of one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from own_layers import PlainStack

from resihp.compiler import initial_plan
from resihp.config import JobConfig, ModelConfig, loads
from resihp.executor.data import load_dataset
from resihp.executor.device.cuda import give_streams_connections
from resihp.executor.device.interface import Communicator
from resihp.executor.device.local import LocalRun, run_local
from resihp.executor.init import initial_parameters
from resihp.executor.model import Model
from resihp.executor.models import build_model
from resihp.executor.packing import MicroBatch, Packing
from resihp.executor.sampler import GlobalBatches, Sampler
from resihp.executor.state import TrainState, initial_holding
from resihp.executor.tp import SingleMember
from resihp.executor.training import TrainingWork
from resihp.ir.model import Plan
from resihp.ir.program import Program

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
KILL = """
[[inject]]
kind = "kill"
rank = 2
step = 3
"""
TESTS = ("tests/executor/test_cuda.py", "tests/executor/test_attention.py")
PARITY_STEPS = 5
PARITY_TOLERANCE = 2e-4
"""Relative: five steps of Adam on gradients that differ by a few roundings of fp32."""
TRACED_SHARE = 0.2
"""Of the busy time in which two ranks or more should be at work at once; four ranks have more."""
SLOWEST_RATIO = 1.05
"""Ours over plain autograd; B and W apart cost a little memory traffic, no more."""


class Sizes(NamedTuple):
    """What is run."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    layers: int
    tokens: int
    pairs: int
    pipeline_hidden: int
    """Of the ranks whose kernels are to overlap."""
    pipeline_tokens: int
    parity_hidden: int
    """Of what the CPU computes too."""
    parity_tokens: int


GPU_SIZES = Sizes(2048, 32, 8, 8192, 16, 4096, 9, 1024, 2048, 256, 256)
CPU_SIZES = Sizes(128, 4, 2, 256, 2, 256, 3, 64, 64, 64, 64)


class Check:
    """Prints sections and remembers whether all are right."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.failed: list[str] = []
        self._start_s = time.monotonic()

    def say(self, section: str, text: str, *, is_right: bool | None = None) -> None:
        verdict = {None: "    ", True: "ok  ", False: "FAIL"}[is_right]
        at_s = time.monotonic() - self._start_s
        print(f"{at_s:6.1f} s  {self.where}  {verdict}  {section:<11} {text}", flush=True)
        if is_right is False:
            self.failed.append(section)


# --- a pipeline in one process


class Pipeline:
    """Four ranks in this process, which train for real."""

    def __init__(
        self, hidden: int, tokens: int, device: torch.device, precision: str, tp: int = 1
    ) -> None:
        self.device = device
        self.job = _job(hidden, tokens, precision, tp)
        self.model: Model = build_model(self.job.model)
        config = self.job.model
        self.plan: Plan = initial_plan(
            config.shape("check"),
            self.job.parallel.mesh(),
            self.job.batch.batch(),
            schedule="zb-h1",
            precision=self.job.compute.precision,
        )
        self.states: dict[int, TrainState] = {}
        packing = Packing(load_dataset(str(ROOT / "resihp")), self.job.batch.tokens, 0)
        self._batches = GlobalBatches(
            packing, Sampler(packing.num_windows, 0), 1, self.job.batch.microbatches
        )

    def run(self, num_steps: int) -> dict[int, LocalRun]:
        return asyncio.run(run_local(self.model, self.plan, self._work, num_steps, self.device))

    def _work(self, program: Program, groups: Mapping[str, Communicator]) -> TrainingWork:
        with uncounted():
            return self._made(program, groups)

    def _made(self, program: Program, groups: Mapping[str, Communicator]) -> TrainingWork:
        state = self.states[program.rank] = TrainState(self.job)
        state.prepare(1, initial_holding(self.model, self.job, program, self.device))
        state.go()
        assert state.current is not None
        return TrainingWork(
            self.model,
            self.plan,
            state.current,
            state,
            self._batches,
            groups,
            numerics="fast",
            device=self.device,
        )

    def parameters(self) -> dict[tuple[int, str], torch.Tensor]:
        """By rank and name."""
        found: dict[tuple[int, str], torch.Tensor] = {}
        for rank, state in self.states.items():
            assert state.current is not None
            found |= {(rank, name): p.cpu() for name, p in state.current.parameters.items()}
        return found


def _job(hidden: int, tokens: int, precision: str, tp: int) -> JobConfig:
    return loads(f"""
[job]
steps = 100
[model]
hidden_size = {hidden}
num_hidden_layers = 8
num_attention_heads = 8
num_key_value_heads = 4
intermediate_size = {4 * hidden}
vocab_size = 272
[parallel]
tp = {tp}
pp = {4 // tp}
[batch]
microbatches = 8
tokens = {tokens}
[compute]
precision = "{precision}"
[optimizer]
lr = 1e-3
""")


def check_parity(check: Check, sizes: Sizes, device: torch.device, tp: int) -> None:
    ours, reference = (
        Pipeline(sizes.parity_hidden, sizes.parity_tokens, where, "fp32", tp)
        for where in (device, CPU)
    )
    losses = [
        [record.loss for record in next(iter(each.run(PARITY_STEPS).values())).records]
        for each in (ours, reference)
    ]
    worst = max(abs(a - b) / b for a, b in zip(*losses, strict=True))
    check.say(
        "parity",
        f"TP {tp}, loss of {PARITY_STEPS} steps {losses[0][0]:.4f} .. {losses[0][-1]:.4f}, off by "
        f"{worst:.1e} of the CPU's",
        is_right=worst <= PARITY_TOLERANCE,
    )
    expected = reference.parameters()
    off = {
        name: float((p - expected[name]).norm() / expected[name].norm())
        for name, p in ours.parameters().items()
    }
    worst_of = max(off, key=lambda each: off[each])
    rank, name = worst_of
    check.say(
        "parity",
        f"TP {tp}, {len(off)} shards, the worst is {name} of rank {rank}, off by "
        f"{off[worst_of]:.1e} of its norm",
        is_right=off.keys() == expected.keys() and off[worst_of] <= PARITY_TOLERANCE,
    )


# --- host syncs


@contextmanager
def counted_syncs() -> Iterator[Counter[str]]:
    """Where torch says that the host waits for the device, by the kind of thread."""
    counts: Counter[str] = Counter()
    lock = threading.Lock()

    def count(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchronizing" in str(message):
            name = threading.current_thread().name
            with lock:
                counts["vote" if name.startswith("comm") else f"step path ({name})"] += 1

    before = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counts
        finally:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = before


@contextmanager
def uncounted() -> Iterator[None]:
    """State is made here, with copies that wait: no part of a step."""
    if not torch.cuda.is_available():
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    yield
    torch.cuda.set_sync_debug_mode(mode)


def check_syncs(check: Check, sizes: Sizes, device: torch.device) -> None:
    if device.type != "cuda":
        check.say("host syncs", "a CPU does not run behind its host: nothing to count")
        return
    pipeline = Pipeline(sizes.pipeline_hidden, sizes.pipeline_tokens, device, "bf16")
    pipeline.run(1)  # what is loaded and cached once
    steps = 3
    with counted_syncs() as counts:
        pipeline.run(steps)
    on_path = {name: number for name, number in counts.items() if name != "vote"}
    check.say(
        "host syncs",
        f"{sum(on_path.values())} on the step path in {steps} steps of 4 ranks {on_path or ''}; "
        f"votes: {counts['vote'] / steps / 4:.1f} per step and rank",
        is_right=not on_path,
    )


# --- overlap


def check_overlap(check: Check, sizes: Sizes, device: torch.device, trace: Path) -> None:
    precision = "bf16" if device.type == "cuda" else "fp32"
    pipeline = Pipeline(sizes.pipeline_hidden, sizes.pipeline_tokens, device, precision)
    runs = pipeline.run(4)
    spans = {rank: spans_of(run) for rank, run in runs.items()}
    busy, shared = union_of([span for of_rank in spans.values() for span in of_rank])
    write_trace(trace, spans)
    check.say(
        "overlap",
        f"{len(spans)} ranks busy for {busy / 1e6:.1f} ms, two or more at once for "
        f"{shared / busy:.0%} of it; trace: {trace}",
        is_right=shared >= TRACED_SHARE * busy,
    )


def spans_of(run: LocalRun) -> list[tuple[int, int]]:
    """Start and end, ns, of everything that the last iteration was seen to do."""
    times = zip(run.observation.starts_ns, run.observation.ends_ns, strict=True)
    return [(start, end) for start, end in times if 0 < start < end]


def union_of(spans: list[tuple[int, int]]) -> tuple[int, int]:
    """Length of the union of the spans, and of what at least two of them cover."""
    edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    busy = shared = depth = 0
    for (at, change), (then, _) in pairwise(edges):
        depth += change
        busy += (then - at) * (depth >= 1)
        shared += (then - at) * (depth >= 2)
    return busy, shared


def write_trace(path: Path, spans: dict[int, list[tuple[int, int]]]) -> None:
    """Chrome's format, one row per rank."""
    origin = min(start for of_rank in spans.values() for start, _ in of_rank)
    events = [
        {
            "ph": "X",
            "pid": 0,
            "tid": rank,
            "name": f"rank {rank}",
            "ts": (start - origin) / 1e3,
            "dur": (end - start) / 1e3,
        }
        for rank, of_rank in spans.items()
        for start, end in of_rank
    ]
    path.write_text(json.dumps({"traceEvents": events}))


# --- throughput


def check_throughput(check: Check, sizes: Sizes, device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = ModelConfig(
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers + 2,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        intermediate_size=sizes.ffn,
        vocab_size=272,
    )
    model = build_model(config)
    names = model.tensors(1, sizes.layers)  # neither embedding nor head
    parameters = {
        name: tensor.to(dtype)
        for name, tensor in initial_parameters(model, names, 0, device=device).items()
    }
    batch = one_batch(sizes.tokens, device)
    x_TD = torch.randn(sizes.tokens, sizes.hidden, device=device, dtype=dtype)
    stage = model.stage(1, sizes.layers, SingleMember(), parameters)
    plain = PlainStack(config, 1, sizes.layers, parameters)

    def ours() -> None:
        stage.forward((0, 0), batch, x_TD, loss_scale=1.0)
        stage.backward_input((0, 0), x_TD)
        stage.backward_weight((0, 0))

    def theirs() -> None:
        plain.step(x_TD, batch)

    for warm_up in (ours, theirs):
        timed(warm_up, device)
    pairs = [(timed(ours, device), timed(theirs, device)) for _ in range(sizes.pairs)]
    seconds = statistics.median(ours_s for ours_s, _ in pairs)
    ratio = statistics.median(ours_s / plain_s for ours_s, plain_s in pairs)
    num_weights = sum(p.numel() for p in parameters.values())
    flops = 6 * num_weights * sizes.tokens
    check.say(
        "throughput",
        f"{num_weights / 1e9:.2f}B weights, {dtype}, {sizes.tokens} tokens: "
        f"{sizes.tokens / seconds:,.0f} tokens/s, {flops / seconds / 1e12:.1f} TFLOP/s without "
        f"attention; ours/plain autograd {ratio:.3f} (median of {len(pairs)} pairs)",
        is_right=ratio <= SLOWEST_RATIO if device.type == "cuda" else None,
    )


def one_batch(num_tokens: int, device: torch.device) -> MicroBatch:
    """A window of four documents of unequal length."""
    bounds = (0, num_tokens // 8, num_tokens // 4, num_tokens // 2, num_tokens)
    positions = [at for start, end in pairwise(bounds) for at in range(end - start)]
    ids_T = torch.arange(num_tokens, device=device) % 256
    return MicroBatch(
        sample_id=0,
        input_ids_T=ids_T,
        targets_T=ids_T,
        position_ids_T=torch.tensor(positions, device=device),
        cu_seqlens=bounds,
        num_targets=num_tokens,
    )


def timed(work: Callable[[], None], device: torch.device) -> float:
    """Seconds until the device has done `work`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start_s = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start_s


# --- tests, and processes that share the device


def check_tests(check: Check, device: torch.device) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr
    is_right = done.returncode == 0 if device.type == "cuda" else None
    check.say("tests", summary, is_right=is_right)


def check_processes(check: Check, device: torch.device) -> None:
    check_job(check, "processes", "4 ranks that share the device, one killed", device, dp=2)


def check_nccl(check: Check, device: torch.device) -> None:
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if num_gpus < 2:
        check.say("nccl", f"{num_gpus} GPUs: no two ranks can talk over NCCL, nothing was checked")
    elif num_gpus < 4:
        check_job(check, "nccl", "2 ranks on 2 GPUs", device, dp=1)
    else:
        check_job(check, "nccl", "4 ranks on 4 GPUs, one killed", device, dp=2)


def check_job(check: Check, section: str, what: str, device: torch.device, dp: int) -> None:
    shared = section == "processes"
    kinds = dict.fromkeys((device.type, "cpu"))
    with tempfile.TemporaryDirectory() as folder:
        ends = [run_job(Path(folder) / kind, kind, dp, is_shared=shared) for kind in kinds]
    (code, output, losses), expected = ends[0], ends[-1][2]
    worst = max(
        (abs(a - b) / b for a, b in zip(losses, expected, strict=False)), default=float("inf")
    )
    is_right = code == 0 and len(losses) == 6 and worst <= PARITY_TOLERANCE
    if not is_right:
        print(output)
    check.say(
        section,
        f"{what}: exit {code}, {len(losses)} of 6 steps, loss off by {worst:.1e} of the CPU's",
        is_right=is_right,
    )


def run_job(folder: Path, kind: str, dp: int, *, is_shared: bool) -> tuple[int, str, list[float]]:
    """A job of two stages, with a kill where there are replicas; exit code, output, losses.

    `is_shared`: all ranks see one GPU only.
    """
    folder.mkdir()
    path = folder / "job.toml"
    path.write_text(f"""
[job]
name = "gpu-check"
steps = 6
runs_dir = "{folder / "runs"}"
[model]
hidden_size = 64
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
intermediate_size = 128
vocab_size = 272
[parallel]
pp = 2
dp = {dp}
[batch]
microbatches = 4
tokens = 64
[data]
source = "{ROOT / "resihp"}"
[device]
kind = "{kind}"
{KILL if dp > 1 else ""}
""")
    devices = {"CUDA_VISIBLE_DEVICES": _first_gpu()} if is_shared and kind == "cuda" else {}
    done = subprocess.run(
        [sys.executable, "-m", "resihp", "train", str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **devices},
        capture_output=True,
        text=True,
    )
    metrics = list(folder.glob("runs/*/metrics.jsonl"))
    lines = metrics[0].read_text().splitlines() if metrics else []
    losses = [float(json.loads(line)["loss"]) for line in lines]
    return done.returncode, done.stdout + done.stderr, losses


def _first_gpu() -> str:
    """Of those that we see, as the driver names it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description="What one GPU can show of us.")
    parser.add_argument("--cpu", action="store_true", help="check this script on the CPU")
    parser.add_argument(
        "--trace",
        type=Path,
        default=Path("gpu-check-trace.json"),
        help="where the observed times go (default: %(default)s)",
    )
    arguments = parser.parse_args()
    give_streams_connections()
    if not arguments.cpu and not torch.cuda.is_available():
        print("gpu-check: no CUDA device here, so nothing was checked (--cpu tries the script)")
        return 0
    device = CPU if arguments.cpu else torch.device("cuda", 0)
    sizes = CPU_SIZES if arguments.cpu else GPU_SIZES
    check = Check("CPU, not a GPU" if arguments.cpu else torch.cuda.get_device_name(device))
    torch.backends.cuda.matmul.allow_tf32 = False
    check.say("versions", f"torch {torch.__version__}, CUDA {torch.version.cuda}")
    for tp in (1, 2):
        check_parity(check, sizes, device, tp)
    check_syncs(check, sizes, device)
    check_overlap(check, sizes, device, arguments.trace)
    check_throughput(check, sizes, device)
    check_processes(check, device)
    check_nccl(check, device)
    check_tests(check, device)
    check.say("all", f"failed: {', '.join(check.failed)}" if check.failed else "right")
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
