"""Opening a generation: deploy its plan, pass on its store, and let it go once all joined."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from resihp.ir.kept import num_kept
from resihp.ir.program import Program
from resihp.ir.program_bytes import encode_program
from resihp.monitor.actions import Log
from resihp.monitor.coordination.core import Core
from resihp.monitor.coordination.membership import Membership
from resihp.monitor.coordination.phase import Phase
from resihp.monitor.coordination.rejoining import Rejoining
from resihp.monitor.coordination.running import Running
from resihp.monitor.coordination.saving import Saving
from resihp.monitor.incident import Incident
from resihp.monitor.layout_line import layout_line
from resihp.monitor.planner import VerifiedPlan
from resihp.monitor.settlement import differing_shards
from resihp.wire.auth import derive_key
from resihp.wire.messages import Close, Commit, Deploy, Go, Joined, StoreAt, StoreOpened

__all__ = ["Opening"]


class Opening:
    """From a plan to everybody running it."""

    def __init__(
        self,
        core: Core,
        secret: bytes,
        membership: Membership,
        rejoining: Rejoining,
        running: Running,
        saving: Saving,
    ) -> None:
        self._core = core
        self._rejoining = rejoining
        self._secret = secret
        self._membership = membership
        self._running = running
        self._deploys: dict[int, Deploy] = {}
        self._store: StoreAt | None = None
        self._saving = saving

    def deploy(self, plan: VerifiedPlan, commit: Commit) -> None:
        """Give `plan` to everybody alive, to run from `commit`."""
        core = self._core
        core.enter(Phase.OPENING)
        programs = self._running.expect(plan)
        shared = Deploy(
            generation=core.generation,
            plan=plan.text,
            previous_plan=core.base_plan.text if core.base_plan is not None else None,
            base=core.base,
            commit=commit,
            # Standby ranks too: they may have shards to give away.
            peers={rank: core.ready[rank].address for rank in sorted(core.alive)},
            key=derive_key(self._secret, f"generation {core.generation}"),
            store_rank=min(plan.plan.active_ranks),
            emulated=plan.emulated,
            kept=plan.kept,
            steady_plan=plan.steady.text if plan.steady is not None else "",
            save_at=self._saving.at,
        )
        self._deploys = {
            rank: msgspec.structs.replace(
                shared,
                program=_encoded(programs.first, rank),
                steady_program=_encoded(programs.steady, rank) if plan.steady else b"",
            )
            for rank in core.alive
        }
        self._store = None
        for rank in sorted(core.alive):
            core.send(rank, self._deploys[rank])

    def repeat(self, rank: int) -> None:
        """What `rank` was told of the generation that opens, again."""
        core = self._core
        if rank not in core.round.joined:
            if rank in core.newcomers - core.round.left:
                core.send(rank, Close(generation=core.generation))
            core.send(rank, self._deploys[rank])
            if self._store is not None:
                core.send(rank, self._store)

    def store_opened(self, message: StoreOpened) -> None:
        """Groups can be built."""
        if self._core.opens(message.generation):
            self._store = StoreAt(generation=message.generation, address=message.address)
            self._core.broadcast(self._store)

    def joined(self, rank: int, message: Joined) -> None:
        """`rank` has its groups and its state."""
        core = self._core
        if not core.opens(message.generation):
            return
        core.round.joined[rank] = message
        if core.round.joined.keys() == core.alive:
            self._go()

    def _go(self) -> None:
        core, joined = self._core, self._core.round.joined
        differing = differing_shards(joined)
        if differing:
            core.stop(f"replicas of the same shard differ after recovery: {differing}", 1)
            return
        core.settle_on(core.generation, core.plan)
        self._running.begin()
        core.broadcast(Go(generation=core.generation))
        hashes = {name: h for each in joined.values() for name, h in each.hashes.items()}
        core.log("running", generation=core.generation, hashes=hashes)
        if core.book.open is not None:
            self._close_incident(core.book.open)
        self._rejoining.joined()
        core.revived.clear()

    def _close_incident(self, incident: Incident) -> None:
        core = self._core
        assert core.plan is not None
        incident.resumed_s = core.now_s
        incident.moved_bytes = sum(joined.moved_bytes for joined in core.round.joined.values())
        incident.action = layout_line(core.plan.plan)
        incident.num_kept = num_kept(core.plan.plan)
        incident.num_micro_batches = core.plan.plan.mesh.dp * core.plan.plan.batch.microbatches
        core.do(Log("incident", incident.row()))
        core.say(incident.line)

    def expired(self, waited_s: float) -> None:
        """Not everybody joined in time: try again."""
        self._membership.reopen(f"not all ranks joined in {waited_s:.0f} s")


def _encoded(programs: Mapping[int, Program], rank: int) -> bytes:
    """What `rank` runs; nothing where it stands by."""
    return encode_program(programs[rank]) if rank in programs else b""
