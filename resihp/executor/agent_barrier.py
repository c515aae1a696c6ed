"""Answers torchrun's exit barrier for agents that are gone.

    python -m resihp.executor.agent_barrier HOST PORT RUN_ID NUM_NODES NUM_LOST

A torchrun agent whose workers have ended waits for all other agents, for up to 300 s, in a store
that the first agent hosts. A lost node's agent never comes, so a survivor counts itself in for
it. Lives here because it needs torch; started by a supervisor at the end of a job.
"""

from __future__ import annotations

import sys
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

__all__ = ["answer"]

BARRIER = "torchelastic/agent/terminal_state"
CONNECT_S = 10.0


def answer(store: Store, num_nodes: int, num_lost: int) -> None:
    """Count `num_lost` agents in, as torch's `elastic.utils.store.barrier` does (2.4 to 2.13)."""
    for _ in range(num_lost):
        if store.add(f"{BARRIER}/num_members", 1) == num_nodes:
            store.set(f"{BARRIER}/last_member", "<val_ignored>")


def main(host: str, port: int, run_id: str, num_nodes: int, num_lost: int) -> int:
    """1 where the store is gone: then nobody waits in it either."""
    try:
        store = TCPStore(
            host,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_S),
        )
        answer(PrefixStore(run_id, store), num_nodes, num_lost)
    except RuntimeError as error:
        print(f"resihp: torchrun's exit barrier was not answered: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))
