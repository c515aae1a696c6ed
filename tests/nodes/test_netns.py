"""The network that other tests here stand on: it joins, cuts, loses, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from netns import Network, network, processes_in, why_no_relay, why_not

SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 4000)) as server:
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        while data := connection.recv(65536):
            connection.sendall(data)
"""
CLIENT = """
import socket, sys, time
try:
    with socket.create_connection((sys.argv[1], 4000), timeout=float(sys.argv[2])) as sock:
        start = time.monotonic()
        for _ in range(int(sys.argv[3])):
            sock.sendall(b"x" * 1000)
            got = 0
            while got < 1000:
                got += len(sock.recv(65536))
        print(time.monotonic() - start)
except OSError as error:
    print(type(error).__name__)
"""


def echo_at(net: Network, node: int) -> subprocess.Popen[str]:
    command = net.spaces[node].inside(sys.executable, "-c", SERVER, net.addresses[node])
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    return server


def ask(net: Network, node: int, target: int, *, within_s: float = 20.0, count: int = 1) -> str:
    """Seconds that `count` echoes took, or the name of the error."""
    words = (net.addresses[target], str(within_s), str(count))
    return net.spaces[node].do(sys.executable, "-c", CLIENT, *words).strip()


@pytest.fixture(autouse=True)
def _possible():
    if (reason := why_not()) is not None:
        pytest.skip(reason)


@pytest.fixture
def net():
    """Three nodes; an echo server on node 0."""
    with network(3) as made:
        server = echo_at(made, 0)
        yield made
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()


def test_nodes_reach_each_other_and_nobody_else_does(net: Network):
    """By their addresses; this machine's own network is not touched."""
    assert float(ask(net, 1, 0)) >= 0
    assert float(ask(net, 2, 0)) >= 0
    assert ask(net, 0, 1) == "ConnectionRefusedError"
    assert "10.77." not in Path("/proc/net/fib_trie").read_text()


@pytest.mark.parametrize("way", [(0, 1), (1, 0)])
def test_one_way_cut_off_is_enough_to_stop_a_conversation(net: Network, way: tuple[int, int]):
    """Silently, for these two only, and until it is mended."""
    net.cut(*way)
    assert ask(net, 1, 0, within_s=0.3) == "TimeoutError"
    assert float(ask(net, 2, 0)) >= 0
    net.mend(*way)
    assert float(ask(net, 1, 0)) >= 0


def test_two_sides(net: Network):
    """Who is on one side reaches nobody on the other."""
    net.part([0, 1], [2])
    assert ask(net, 2, 0, within_s=0.3) == "TimeoutError"
    assert float(ask(net, 1, 0)) >= 0


def test_an_unplugged_node(net: Network):
    """Reaches nobody until it is plugged in again."""
    net.unplug(0)
    assert ask(net, 1, 0, within_s=0.3) in ("TimeoutError", "OSError")
    net.plug(0)
    assert float(ask(net, 1, 0)) >= 0


def test_delay_and_loss(net: Network):
    """Every answer is late by the delay; lost packets are sent again, and all arrive."""
    if (reason := why_no_relay()) is not None:
        pytest.skip(reason)
    net.disturb(0, delay_s=0.05)
    assert float(ask(net, 1, 0, count=10)) >= 0.5
    net.disturb(2, loss=0.2, seed=3)
    assert float(ask(net, 2, 0, count=30)) > float(ask(net, 1, 0, count=1))


def seen_from_outside() -> tuple[int, list[str]]:
    """Interfaces of this machine, and namespaces that have a name."""
    named = Path("/run/netns")
    names = sorted(os.listdir(named)) if named.exists() else []
    return Path("/proc/net/dev").read_text().count(":"), names


def test_nothing_is_left_behind():
    """No namespace, no interface, no process, also of what still ran inside."""
    before = seen_from_outside()
    with network(2) as net:
        server = echo_at(net, 0)
        pids = [space.pid for space in net.spaces]
        assert server.pid in processes_in(net.spaces[0])
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert seen_from_outside() == before


def test_a_killed_test_leaves_nothing_either(tmp_path: Path):
    """The holders of namespaces die with the process that asked for them."""
    script = tmp_path / "killed.py"
    script.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from netns import network\n"
        "with network(2) as net:\n"
        "    print(*[space.pid for space in net.spaces], flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    process.kill()
    process.wait()
    process.stdout.close()
    deadline_s = time.monotonic() + 20
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
