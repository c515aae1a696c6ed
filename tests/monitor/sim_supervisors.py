"""Supervisors of the simulated cluster: each owns an executor, and talks to its node's monitor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from coordinator_cases import ready
from sim_ranks import Executor
from sim_time import Process
from sim_wires import Wire

from resihp.monitor.replay import Replay
from resihp.wire.messages import (
    Beat,
    ExecutorExited,
    ExecutorStarted,
    Fence,
    Hello,
    Message,
    Resend,
    Resent,
    Respawn,
    Stop,
)

if TYPE_CHECKING:
    from sim_cluster import Cluster

RETRY_S = 0.1


class Supervisor(Process):
    """Of one rank. One that follows a dead one waits to be told to start an executor."""

    def __init__(
        self, cluster: Cluster, node: int, rank: int, *, was_restarted: bool = False
    ) -> None:
        super().__init__(cluster.time, cluster.nodes[node])
        self.cluster = cluster
        self.node = node
        self.rank = rank
        self.replay = Replay()
        self.up: Wire | None = None
        self.ended: int | None = None
        """Exit code of the job, once it was told."""
        self.pid = 0
        """Of the newest executor."""
        self._down_s = 0.0
        self.has_executor = not was_restarted
        """Whether there is one, or was."""
        self.executor = Executor(cluster, self)
        if was_restarted:
            self.executor.dead = True
        else:
            self.start()
        self.every(cluster.timing.report_s, self.beat)
        self.connect()

    def start(self) -> None:
        self.pid = self.cluster.new_pid()
        executor = self.executor
        self.say(ExecutorStarted(pid=self.pid))
        executor.later(self.time.random.uniform(0.2, 2.0), lambda: executor.say(ready()))

    def beat(self) -> None:
        if self.ended is not None:
            return
        if self.executor.dead:
            self.send(Beat(step=-1, instruction=-1))
        else:
            self.send(msgspec.structs.replace(self.executor.beat(), pid=self.pid))

    def say(self, message: Message) -> None:
        """Something that must be said again to whoever asks."""
        self.replay.keep(message)
        self.send(message)

    def send(self, message: Message) -> None:
        if self.up is not None:
            self.up.send(self, message)

    def from_executor(self, executor: Executor, message: Message) -> None:
        if executor is self.executor:
            self.say(message)

    # --- the monitor

    def connect(self) -> None:
        if self.up is not None or self.ended is not None:
            return
        wire = self.cluster.nodes[self.node].accept(self)
        if wire is None:
            self.later(RETRY_S, self.connect)
            return
        self.up = wire
        wire.send(self, Hello(pid=self.rank, has_executor=self.has_executor))

    def hung_up(self, wire: Wire) -> None:
        if wire is self.up:
            self.up = None
            self.cluster.rarity("supervisor reconnects")
            self.connect()

    def hear(self, wire: Wire, message: Message) -> None:
        if wire is not self.up or self.ended is not None:
            return
        match message:
            case Stop():
                self.ended = message.exit_code
                self.executor.dead = True
            case Fence() if message.pid in (0, self.pid):
                self.kill_executor()
            case Respawn():
                if not self.has_executor or message.after == self.pid:
                    self.respawn()
            case Resend():
                self.send(Resent(has_executor=self.has_executor))
                for again in self.replay.messages(message.from_step):
                    self.send(again)
                self.beat()
            case _:
                self.down(message)

    def down(self, message: Message) -> None:
        """To the executor, in order."""
        executor = self.executor
        self._down_s = max(self._down_s, self.time.now_s + self.time.delay(0.05))
        self.time.at(self._down_s, lambda: executor.do(lambda: executor.hear(message)))

    # --- the executor

    def respawn(self) -> None:
        """A fresh executor; the end of one that still runs is told first."""
        self.kill_executor()
        if self.has_executor:
            self.executor_exited(self.executor)
        self.executor = Executor(self.cluster, self)
        self.has_executor = True
        self.cluster.rarity("respawned")
        self.start()

    def kill_executor(self) -> None:
        """SIGKILL; what it said before is on its way still."""
        executor = self.executor
        if not executor.dead:
            executor.dead = True
            self.cluster.executor_died(executor)
            self.soon(lambda: self.executor_exited(executor), 0.2)

    def executor_exited(self, executor: Executor) -> None:
        if executor is self.executor and self.ended is None and not executor.is_reaped:
            executor.is_reaped = True
            self.say(ExecutorExited(code=-9, last_words="", pid=self.pid))

    def die(self) -> None:
        """With its executor, by the kernel."""
        if self.dead:
            return
        self.dead = True
        if not self.executor.dead:
            self.executor.dead = True
            self.cluster.executor_died(self.executor)
        if self.up is not None:
            self.up.hang_up(self)
