"""Jobs under static torchrun agents, one for each node; each node has a loopback address."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jobs import TAG, Run, descendants, remove_memory, tagged, wait_gone

__all__ = ["Agents", "free_port", "host_of", "network_section", "under_agents"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def host_of(node: int) -> str:
    return f"127.0.0.{node + 1}"


def network_section(folder: Path, hosts: Sequence[str], port: int) -> str:
    """`[network]` of a job file, with a secret of its own."""
    secret = folder / "secret"
    if not secret.exists():
        secret.touch(0o600)
        secret.write_text(secrets.token_hex(32))
    named = ", ".join(f'"{host}"' for host in hosts)
    return f'[network]\nnodes = [{named}]\nport = {port}\nsecret_file = "{secret}"\n'


class Agents:
    """An agent with one worker for each job file, as on machines of their own."""

    def __init__(self, jobs: Sequence[Path], folder: Path) -> None:
        self._jobs = jobs
        self._folder = folder
        self._store_port = free_port()
        self.of_node = [self._started(node) for node in range(len(jobs))]
        self._all = list(self.of_node)
        self.run = Run(self.of_node[0], folder / "runs")
        """As node 0 tells of it."""

    def _started(self, node: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
        command += [f"--nnodes={len(self._jobs)}", f"--node-rank={node}", "--max-restarts=0"]
        command += ["--master-addr=127.0.0.1", f"--master-port={self._store_port}"]
        return subprocess.Popen(
            [*command, "-m", "resihp.worker", str(self._jobs[node])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, TAG: str(self._folder), "XDG_RUNTIME_DIR": str(self._folder)},
            start_new_session=True,
        )

    def lose(self, node: int) -> None:
        """Agent, supervisor, monitor and executor of a node are killed."""
        pid = self.of_node[node].pid
        for each in (pid, *descendants(pid)):
            with contextlib.suppress(ProcessLookupError):  # its parent took it along
                os.kill(each, signal.SIGKILL)

    def bring_back(self, node: int) -> None:
        """Start an agent for the node again, by the same command."""
        self.of_node[node] = self._started(node)
        self._all.append(self.of_node[node])

    def stop(self) -> None:
        """End the job in order, from node 0."""
        self.of_node[0].send_signal(signal.SIGTERM)
        self.run.finish()

    def close(self) -> None:
        """Nothing of it is left."""
        for pid in tagged(str(self._folder)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in self._all:
            agent.wait()
            assert agent.stdout is not None
            agent.stdout.close()
        wait_gone(tagged(str(self._folder)))
        remove_memory(self.run.runs_dir)


@contextmanager
def under_agents(jobs: Sequence[Path], folder: Path) -> Iterator[Agents]:
    """The job of `jobs`, one file for each node, in the background; killed at the end."""
    agents = Agents(jobs, folder)
    try:
        yield agents
    finally:
        agents.close()
