"""Who answers torchrun's exit barrier for agents that are gone, and that torch takes the answer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from resihp.monitor.exit_barrier import answers

AGENTS = """
import threading
from datetime import timedelta
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID
from torch.distributed.elastic.utils.store import barrier
from resihp.executor.agent_barrier import BARRIER, answer

assert BARRIER == _TERMINAL_STATE_SYNC_ID
base = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
base.set_timeout(timedelta(seconds=40))

def store():
    client = TCPStore("127.0.0.1", base.port, is_master=False, wait_for_workers=False)
    return PrefixStore("run", client)

agents = [
    threading.Thread(target=barrier, args=(store(), 4, BARRIER), kwargs={"barrier_timeout": 40})
    for _ in range(2)
]
agents[0].start()
answer(store(), 4, 2)
agents[1].start()
for agent in agents:
    agent.join(30)
print("free" if not any(agent.is_alive() for agent in agents) else "stuck")
"""


@pytest.mark.parametrize(
    ("lost", "who"),
    [((), None), ((2,), 0), ((1, 2), 0), ((0,), None), ((0, 2), None)],
    ids=str,
)
def test_one_node_answers_where_the_store_is_left(lost: tuple[int, ...], who: int | None):
    """Without the first agent there is no store, and nobody waits in it for long."""
    assert [node for node in range(3) if answers(node, 3, lost)] == ([] if who is None else [who])


def test_torch_takes_the_answer():
    """Two of four agents are gone: the two that are left are free as soon as both have come."""
    told = subprocess.run(
        [sys.executable, "-c", AGENTS], capture_output=True, text=True, check=False
    )
    assert told.stdout.strip() == "free", told.stderr
