"""Jobs on several nodes: one static torchrun agent in each namespace, with restarts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jobs import TAG, Job, tagged, wait_gone
from netns import Network, kill_node

PORT = 29_407
MASTER_PORT = 29_408
LOOK_S = 0.05
DEADLINE_S = 180.0
"""Torch is imported once per rank and agent, on a machine that may be crowded."""


def network_section(net: Network, folder: Path) -> str:
    """`[network]` of a job on all nodes, with a secret of its own."""
    key = folder / "secret"
    key.write_bytes(os.urandom(32).hex().encode())
    key.chmod(0o600)
    return f'[network]\nnodes = {json.dumps(net.addresses)}\nport = {PORT}\nsecret_file = "{key}"\n'


class NodeRun:
    """A job that runs on the nodes of a network."""

    def __init__(self, net: Network, job: Path, folder: Path, per_node: int) -> None:
        self.net = net
        self.folder = folder
        self.agents = [self._agent(node, job, per_node) for node in range(len(net.spaces))]

    def _agent(self, node: int, job: Path, per_node: int) -> subprocess.Popen[bytes]:
        command = self.net.spaces[node].inside(
            *(sys.executable, "-m", "torch.distributed.run"),
            f"--nnodes={len(self.net.spaces)}",
            f"--node-rank={node}",
            f"--nproc-per-node={per_node}",
            "--max-restarts=1",
            f"--master-addr={self.net.addresses[0]}",
            f"--master-port={MASTER_PORT}",
            *("-m", "resihp.worker", str(job)),
        )
        with self._log(node).open("wb") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, TAG: str(self.folder), "XDG_RUNTIME_DIR": str(self.folder)},
                start_new_session=True,
            )

    def _log(self, node: int) -> Path:
        return self.folder / f"agent{node}.log"

    @property
    def text(self) -> str:
        """All that the nodes printed."""
        parts = [
            f"--- node {node}\n{self._log(node).read_text(errors='replace')}"
            for node in range(len(self.agents))
        ]
        return "".join(parts)

    @property
    def dir(self) -> Path:
        (path,) = (self.folder / "runs").iterdir()
        return path

    def rows(self, name: str) -> list[dict[str, Any]]:
        with suppress(ValueError, FileNotFoundError):
            lines = (self.dir / f"{name}.jsonl").read_text().splitlines()
            return [json.loads(line) for line in lines]
        return []

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows("events") if row["event"] == kind]

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"{what} did not come\n{self.text}"
            time.sleep(LOOK_S)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: len(self.rows("metrics")) > step, f"step {step}")

    def wait_for_finish(self) -> None:
        """The last step is done. Agents may stay: without the first one's store they wait long."""
        self.wait_for(lambda: self.events("stop"), "the end of the job")
        assert [row["reason"] for row in self.events("stop")] == ["finished"], self.text

    def wait_for_end(self, node: int) -> int:
        self.wait_for(lambda: self.agents[node].poll() is not None, f"the end of agent {node}")
        return self.agents[node].returncode

    def lose(self, node: int) -> None:
        """Every process of a node dies at once."""
        kill_node(self.net.spaces[node])


@contextmanager
def running_on(net: Network, job: Job, folder: Path, corpus: Path) -> Iterator[NodeRun]:
    """`job` on all nodes; what is left of it at the end is killed."""
    path = job.write(folder, corpus)
    run = NodeRun(net, path, folder, job.world // len(net.spaces))
    try:
        yield run
    finally:
        for pid in tagged(str(folder)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in run.agents:
            agent.wait()
        wait_gone(tagged(str(folder)))
