"""Small jobs that are run for real: real processes, real gloo, real signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import resihp
from resihp.chaos import usage
from resihp.wire.shared_memory import SHM, remove_once_unheld, shared_path

DEADLINE_S = 50.0
TAG = "RESIHP_TEST"
NODE = "resihp.monitor.local_node"

# A smaller TP degree adds the same numbers in another order: each sum of a row-parallel linear
# changes by about one rounding, 2**-24 relative. Ten steps of Adam keep the loss, a mean over
# some 2,000 targets, within a few of these (measured: 2e-8); 1e-5 leaves room for other kernels,
# while one wrong micro-batch or a lost update changes the loss in the second digit.
TP_CHANGE_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Job:
    """A job file with few settings; the model and the corpus are tiny."""

    steps: int = 10
    tp: int = 2
    pp: int = 2
    dp: int = 2
    schedule: str = "zb-h1"
    layers: int = 4
    kv_heads: int = 2
    tokens: int = 64
    kills: tuple[tuple[int, int], ...] = ()
    """(rank, step), each in the middle of the rank's program."""
    at: int | None = None
    """Instruction of every kill instead of the middle."""
    plan: Path | None = None
    """What to begin with instead of a plan for the degrees."""
    detect_within_s: float = 1.0
    sections: str = ""
    """More of the job file."""
    model: str = ""
    """More of its `[model]`."""

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    def write(self, folder: Path, corpus: Path) -> Path:
        place = "" if self.at is None else f"instruction = {self.at}\n"
        injections = "".join(
            f'[[inject]]\nkind = "kill"\nrank = {rank}\nstep = {step}\n{place}'
            for rank, step in self.kills
        )
        plan = "" if self.plan is None else f'plan = "{self.plan}"\n'
        path = folder / "job.toml"
        path.write_text(
            f"""
[job]
name = "e2e"
detect_within_s = {self.detect_within_s}
steps = {self.steps}
runs_dir = "{folder / "runs"}"
[model]
hidden_size = 32
num_hidden_layers = {self.layers}
num_attention_heads = 4
num_key_value_heads = {self.kv_heads}
intermediate_size = 64
vocab_size = 258
{self.model}
[parallel]
tp = {self.tp}
pp = {self.pp}
dp = {self.dp}
schedule = "{self.schedule}"
{plan}[batch]
microbatches = 4
tokens = {self.tokens}
[data]
source = "{corpus}"
[optimizer]
lr = 3e-3
warmup_steps = 2
{self.sections}
{injections}"""
        )
        return path


@dataclass
class Run:
    """A job that runs or has run."""

    process: subprocess.Popen[str]
    runs_dir: Path
    output: list[str] = field(default_factory=list)
    leaves_memory: bool = False
    """Whether a node was killed: the doctor removes what it had in shared memory."""

    @property
    def text(self) -> str:
        return "".join(self.output)

    @property
    def dir(self) -> Path:
        (path,) = self.runs_dir.iterdir()
        return path

    def rows(self, name: str) -> list[dict[str, Any]]:
        lines = (self.dir / f"{name}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows("events") if row["event"] == kind]

    def losses(self) -> list[float]:
        return [float(row["loss"]) for row in self.rows("metrics")]

    def wait_for_executors(self, num: int) -> None:
        """Until so many were started, which is before any of them can do anything."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            events = [*self.runs_dir.glob("*/events.jsonl")]
            if events and len(self.events("executor_started")) >= num:
                return
            time.sleep(0.01)
        raise AssertionError(f"{num} executors were not started")

    def executor_pid(self, rank: int) -> int:
        """Of the executor that was started last."""
        *_, row = (row for row in self.events("executor_started") if row["rank"] == rank)
        return int(row["pid"])

    def supervisor_pid(self, rank: int) -> int:
        return parent_of(self.executor_pid(rank))

    def pid_of(self, module: str) -> int:
        """The process of this job that runs `module`; waited for, since it may be restarting."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            for pid in descendants(self.process.pid):
                if runs_module(pid, module):
                    return pid
        raise AssertionError(f"nobody runs {module}")

    def node_pid(self, node: int) -> int:
        """The process that is node number `node`, of several."""
        pids = [pid for pid in descendants(self.process.pid) if runs_module(pid, NODE)]
        return sorted(pids)[node]

    def kill_node(self, pid: int) -> None:
        """The process that is a node, and with it all of that."""
        os.kill(pid, signal.SIGKILL)
        self.leaves_memory = True

    def where(self) -> list[str]:
        """What `resihp where` tells of it."""
        command = [sys.executable, "-m", "resihp", "where", str(self.dir)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    def read_until(self, stop: Callable[[str], bool]) -> None:
        """Read lines of the console until one fulfils `stop` (or the job ends)."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if stop(line):
                return

    def read_to_step(self, step: int) -> None:
        self.read_until(lambda line: line.startswith(f"step {step:4d} "))

    def finish(self) -> int:
        """Read the rest and wait for the end; the exit code."""
        self.read_until(lambda _: False)
        return self.process.wait(DEADLINE_S)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def descendants(pid: int) -> set[int]:
    """All live processes below `pid`."""
    parents = dict[int, int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                parents[int(entry.name)] = parent_of(int(entry.name))
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def runs_module(pid: int, module: str) -> bool:
    """Whether the process is `python -m module`."""
    try:
        return module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False  # it ended meanwhile


def tagged(value: str) -> set[int]:
    """All processes whose environment carries our tag."""
    return usage.tagged(f"{TAG}={value}")


def copy_corpus(folder: Path) -> None:
    """A few source files as text to train on."""
    for path in sorted((Path(resihp.__file__).parent / "ir").glob("*.py")):
        (folder / path.name).write_bytes(path.read_bytes())


def train_command(job: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "resihp", "train", str(job), *options]


def torchrun_command(job: Path, world: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={world}",
        "-m",
        "resihp.worker",
        str(job),
    ]


def wait_gone(pids: set[int], within_s: float = 10.0) -> set[int]:
    """Those of `pids` that still run after at most `within_s`."""
    deadline = time.monotonic() + within_s
    while (left := {pid for pid in pids if alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def memory_of(run_name: str) -> list[Path]:
    """The directories in shared memory of a run, one for each node of this machine."""
    return list(SHM.glob(f"{shared_path(run_name).name}*"))


def remove_memory(runs_dir: Path, within_s: float = 10.0) -> None:
    """What killed owners of nodes left in shared memory, as soon as nobody holds it.

    A process that dies has no environment any more, so `tagged` does not see it, and holds files.
    """
    made = [path for run in runs_dir.glob("*") for path in memory_of(run.name)]
    for path in made:
        remove_once_unheld(path, within_s)
    held = [path for path in made if path.exists()]
    assert not held, f"still held: {held}"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def running(command: Sequence[str], folder: Path) -> Iterator[Run]:
    """A job in the background; whatever of it is left at the end is killed, and is a failure."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, TAG: str(folder)},
        start_new_session=True,
    )
    run = Run(process, folder / "runs")
    try:
        yield run
    finally:
        process.kill()
        process.wait()
        left = wait_gone(tagged(str(folder)))
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert process.stdout is not None
        process.stdout.close()
        if process.returncode < 0 or run.leaves_memory:
            remove_memory(run.runs_dir)
    assert not left, f"processes left behind: {left}\n{run.text}"


def complete(job: Job, folder: Path, corpus: Path, *, torchrun: bool = False) -> tuple[int, Run]:
    """Run a job to its end; exit code and what it left."""
    path = job.write(folder, corpus)
    command = torchrun_command(path, job.world) if torchrun else train_command(path)
    with running(command, folder) as run:
        code = run.finish()
    return code, run
