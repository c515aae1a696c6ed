"""torchrun's agents wait for each other at the end; somebody must answer for the lost ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping

from resihp.monitor.process import Child

__all__ = ["answer_for_lost", "answers"]

BOUND_S = 60.0
"""For a process that imports torch."""


def answers(node: int, num_nodes: int, lost: Collection[int]) -> bool:
    """Whether `node` is the one that answers: the lowest that is left, if the store is left.

    The agent of node 0 hosts the store; without it the others end their waiting by themselves.
    """
    left = set(range(num_nodes)) - set(lost)
    return bool(lost) and 0 in left and node == min(left)


async def answer_for_lost(
    env: Mapping[str, str], node: int, num_nodes: int, lost: Collection[int]
) -> None:
    """Count in the agents of `lost` nodes, where that is ours to do and torchrun started us."""
    if not answers(node, num_nodes, lost) or "TORCHELASTIC_RUN_ID" not in env:
        return
    where = (env["MASTER_ADDR"], env["MASTER_PORT"], env["TORCHELASTIC_RUN_ID"])
    child = Child(
        [
            *(sys.executable, "-m", "resihp.executor.agent_barrier"),
            *(*where, str(num_nodes), str(len(lost))),
        ],
        env=os.environ,
    )
    await child.end(BOUND_S)
