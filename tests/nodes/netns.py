"""Several "machines" on this one: network namespaces, joined by veth pairs at a router.

    node 0 (10.77.0.2) --- veth ---+
    node 1 (10.77.1.2) --- veth ---+--- router, a namespace too
    node 2 (10.77.2.2) --- veth ---+

A namespace lives as long as the process that holds it, and its interfaces with it; holders die
with us (PR_SET_PDEATHSIG). So nothing can be left behind, whatever ends a test.

The router drops packets by rules (`cut`, one way), takes a link down (`unplug`), and sends what
comes from a node through a relay that delays and loses packets (`disturb`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from resihp.monitor.process import die_with_parent

RELAY = Path(__file__).parent / "relay.py"
RELAY_TABLE = "77"
READY = "ready\n"


class Space:
    """A network namespace, held by a process that sleeps."""

    def __init__(self) -> None:
        parent = os.getpid()
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo ready; exec sleep infinity"],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: die_with_parent(parent),
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != READY:
            self.close()
            raise OSError("no network namespace")
        self.pid = self._holder.pid
        self.do("ip", "link", "set", "lo", "up")

    def inside(self, *command: str) -> list[str]:
        """`command`, as one that runs in this namespace."""
        return ["nsenter", "--target", str(self.pid), "--net", *command]

    def do(self, *command: str) -> str:
        """Run `command` here; what it prints. OSError where it fails."""
        done = subprocess.run(self.inside(*command), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        """Let the namespace go, with whatever still runs on its network."""
        self._holder.kill()
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()


class Network:
    """Nodes that reach each other through a router, until somebody comes between them."""

    def __init__(self, spaces: Sequence[Space], router: Space) -> None:
        self.spaces = list(spaces)
        self.addresses = [f"10.77.{node}.2" for node in range(len(spaces))]
        self._router = router
        self._relays: list[subprocess.Popen[str]] = []
        for node, space in enumerate(spaces):
            self._wire(node, space)
        router.do("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")

    def _wire(self, node: int, space: Space) -> None:
        name, gateway = f"node{node}", f"10.77.{node}.1"
        self._router.do(
            *("ip", "link", "add", name, "type", "veth"),
            *("peer", "name", "eth0", "netns", str(space.pid)),
        )
        for at, interface, address in (
            (self._router, name, gateway),
            (space, "eth0", self.addresses[node]),
        ):
            at.do("ip", "address", "add", f"{address}/24", "dev", interface)
            at.do("ip", "link", "set", interface, "up")
        # No default route: a look-up of a name fails at once, and does not wait for an answer.
        space.do("ip", "route", "add", "10.77.0.0/16", "via", gateway)

    # --- what may happen to a network

    def cut(self, source: int, target: int) -> None:
        """Drop every packet from `source` to `target`; their sockets stay open."""
        self._router.do("ip", "rule", "add", *self._way(source, target), "blackhole")

    def mend(self, source: int, target: int) -> None:
        """Let packets from `source` to `target` through again."""
        self._router.do("ip", "rule", "delete", *self._way(source, target), "blackhole")

    def part(self, one: Sequence[int], other: Sequence[int]) -> None:
        """Cut both ways between two sides."""
        for a in one:
            for b in other:
                self.cut(a, b)
                self.cut(b, a)

    def unplug(self, node: int) -> None:
        """Take the link of a node down."""
        self._router.do("ip", "link", "set", f"node{node}", "down")

    def plug(self, node: int) -> None:
        """And up again."""
        self._router.do("ip", "link", "set", f"node{node}", "up")

    def disturb(self, node: int, *, delay_s: float = 0.0, loss: float = 0.0, seed: int = 0) -> None:
        """From now on, delay what `node` sends and lose a share of it. Needs /dev/net/tun."""
        device = f"relay{node}"
        relay = subprocess.Popen(
            self._router.inside(
                sys.executable, str(RELAY), device, str(delay_s), str(loss), str(seed)
            ),
            stdout=subprocess.PIPE,
            text=True,
        )
        self._relays.append(relay)
        assert relay.stdout is not None
        assert relay.stdout.readline() == READY
        self._router.do("ip", "link", "set", device, "up")
        # Without this the router drops what comes back as if its sender lied about itself.
        self._router.do("sh", "-c", f"echo 0 > /proc/sys/net/ipv4/conf/{device}/rp_filter")
        self._router.do("sh", "-c", "echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter")
        table = str(int(RELAY_TABLE) + node)
        self._router.do("ip", "route", "add", "default", "dev", device, "table", table)
        self._router.do("ip", "rule", "add", "iif", f"node{node}", "lookup", table)

    def _way(self, source: int, target: int) -> list[str]:
        return ["from", self.addresses[source], "to", self.addresses[target]]

    def close(self) -> None:
        """End the relays."""
        for relay in self._relays:
            relay.kill()
            relay.wait()
            assert relay.stdout is not None
            relay.stdout.close()


@contextmanager
def network(num_nodes: int) -> Iterator[Network]:
    """So many nodes; everything in their namespaces that was started through us is gone after."""
    with contextlib.ExitStack() as stack:
        spaces: list[Space] = []
        for _ in range(num_nodes + 1):
            spaces.append(Space())
            stack.callback(spaces[-1].close)
        net = Network(spaces[:-1], spaces[-1])
        stack.callback(net.close)
        yield net


def processes_in(space: Space) -> set[int]:
    """All processes in a namespace but the one that holds it."""
    name = os.readlink(f"/proc/{space.pid}/ns/net")
    found = set[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(folder / "ns" / "net") == name:
                found.add(int(folder.name))
    return found - {space.pid}


def kill_node(space: Space) -> None:
    """A power cut: every process of the node, agent, supervisors and executors, at one moment."""
    pids = processes_in(space)
    for number in (signal.SIGSTOP, signal.SIGKILL):  # so that none sees another one die
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@functools.cache
def why_not() -> str | None:
    """Why there can be no such network here; None where there can."""
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    try:
        with network(2) as net:
            net.cut(0, 1)
    except (OSError, AssertionError) as error:
        return f"no network namespaces with veth: {error}"
    return None


@functools.cache
def why_no_relay() -> str | None:
    """Why packets cannot be relayed here; None where they can."""
    if why_not() is not None:
        return why_not()
    try:
        with network(1) as net:
            net.disturb(0)
    except (OSError, AssertionError) as error:
        return f"no tun device: {error}"
    return None
