"""What ranks say to each other, from one node to another: transport, store and gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from netns import Network, network, processes_in, why_not

from resihp.monitor.listening import listeners_of

RANK = Path(__file__).parent / "one_rank.py"


@pytest.fixture
def net():
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with network(2) as made:
        yield made


def start(net: Network, node: int, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(RANK), str(node), net.addresses[node], *words]
    return subprocess.Popen(
        net.spaces[node].inside(*command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def say(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{text}\n")
    process.stdin.flush()


def test_two_ranks_on_two_nodes(net: Network):
    """[S4] Tensors, the store and a collective go over the nodes' own addresses, and nothing of
    them listens anywhere else, not even on the loopback interface."""
    first, second = start(net, 0), start(net, 1)
    try:
        store, here = line_of(first).split()
        there = line_of(second)
        assert here.startswith(net.addresses[0])
        assert there.startswith(net.addresses[1])
        assert store.startswith(net.addresses[0])
        for process in (first, second):
            say(process, f"{store} {here} {there}")
        assert line_of(first) == "sum [3.0, 3.0] received [2.0, 2.0]"
        assert line_of(second) == "sum [3.0, 3.0] received [1.0, 1.0]"
        for node in (0, 1):
            listeners = listeners_of(processes_in(net.spaces[node]))
            assert {each.address.host for each in listeners} == {net.addresses[node]}
            assert len(listeners) >= 2, "transport and gloo at least"
    finally:
        for process in (first, second):
            process.communicate("\n", timeout=20)
    assert (first.returncode, second.returncode) == (0, 0)
