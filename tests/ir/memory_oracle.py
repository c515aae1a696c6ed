"""Peak memory of a group: a ledger of what is alive, instruction by instruction.

Slow and obvious, and written from the rules that `resihp.ir.verify.memory` gives in words, for
plans that can run. When a posted send was taken is learned by following the knowledge of both
groups, not their indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plan_oracle import stages_of
from transport_oracle import CUTS, RECVS, SENDS, USES, Doing, bodies_of, find

from resihp.ir.facts import Facts
from resihp.ir.model import GroupName, Op, Plan


class Ledger:
    """What one group holds, in bytes of one member, by name."""

    def __init__(self, plan: Plan, name: GroupName, facts: Facts) -> None:
        self.bodies = bodies_of(plan)
        self.name, self.body = name, self.bodies[name]
        self.degrees = {group.name: group.tp for group in plan.groups}
        self.positions = {s: pp for pp, held in stages_of(plan).items() for s in held}
        self.facts = dict(zip(stages_of(plan)[name.pp], facts.stages[name], strict=True))
        self.held: dict[object, int] = {}

    def peak(self) -> int:
        """The most that is alive while an instruction (or both of a pair) runs."""
        peak, at = 0, 0
        while at < len(self.body):
            unit = range(at, at + 1 + self.body[at].paired)
            for index in unit:
                self._learn(index)
            for index in unit:
                self._take(index, self.body[index])
            peak = max(peak, sum(self.held.values()))
            for index in unit:
                self._give(self.body[index])
            at = unit.stop
        return peak + sum(stage.state_bytes for stage in self.facts.values())

    def _take(self, index: int, doing: Doing) -> None:
        """What comes to life when the instruction starts."""
        op, stage, number, home = doing[:4]
        if stage is None or number is None:
            return
        facts, task = self.facts[stage], (stage, number, home)
        if op is Op.F:
            self.held["activations", *task] = facts.activation_bytes
        if op in (Op.B, Op.BW):
            self.held["output gradients", *task] = facts.weight_input_grad_bytes
        if op in (Op.F, Op.B, Op.BW) and self._is_used_here(doing):
            kind, step = ("act", 1) if op is Op.F else ("grad", -1)
            self.held[kind, stage + step, number, home] = facts.boundary_bytes
        if op in SENDS:
            kind, step = SENDS[op]
            cut = find(self.body, CUTS[op], stage, doing) is not None
            share = self._share(doing.peer, stage + step) if cut else 1
            self.held["send", index] = facts.boundary_bytes // share
        if op in RECVS:
            kind, step = RECVS[op]
            cut = find(self.body, USES[op][0], stage, doing) is not None
            share = self._share(doing.peer, stage + step) if cut else 1
            self.held[kind, *task] = facts.boundary_bytes // share
        if op in (Op.GATHER_ACT, Op.GATHER_GRAD):
            kind = "act" if op is Op.GATHER_ACT else "grad"
            self.held["joined " + kind, *task] = facts.boundary_bytes

    def _share(self, replica: int, stage: int) -> int:
        """Into how many parts of a whole tensor the chunks of one member go."""
        here, there = self.degrees[self.name], self.degrees[self._far(replica, stage)]
        return max(here, there) // (max(here, there) // here)

    def _far(self, replica: int, stage: int) -> GroupName:
        return GroupName(replica, self.positions[stage])

    def _is_used_here(self, doing: Doing) -> bool:
        """Whether the tensor that is made here stays."""
        op = doing.op
        send = Op.SEND_ACT if op is Op.F else Op.SEND_GRAD
        last = len(self.positions) - 1
        is_end = doing.stage == (last if op is Op.F else 0)
        return not is_end and find(self.body, send, doing.stage, doing) is None

    def _give(self, doing: Doing) -> None:
        """What is not needed any more when the instruction ends."""
        op, stage, number, home = doing[:4]
        task = (stage, number, home)
        for kind, uses in (("act", USES[Op.RECV_ACT]), ("grad", USES[Op.RECV_GRAD])):
            if op in uses:
                self.held.pop((kind, *task), None)
            if op in uses[1:]:
                self.held.pop(("joined " + kind, *task), None)
        if op is Op.B:
            assert stage is not None
            self.held["activations", *task] -= self.facts[stage].released_by_b_bytes
        if op in (Op.W, Op.BW):
            del self.held["activations", *task], self.held["output gradients", *task]

    def _learn(self, index: int) -> None:
        """Drop the sends that must have been taken if the instruction has what it uses."""
        for peer, sent_at in self._arrivals(self.name, index):
            for key in [key for key in self.held if isinstance(key, tuple) and key[0] == "send"]:
                send = self.body[key[1]]
                assert send.stage is not None
                far = self._far(send.peer, send.stage + SENDS[send.op][1])
                if far == peer and self._use(far, send) < sent_at:
                    del self.held[key]

    def _arrivals(self, name: GroupName, index: int) -> Iterator[tuple[GroupName, int]]:
        """Who sent what the instruction uses, and where."""
        doing = self.bodies[name][index]
        for recv_op, uses in USES.items():
            recv = (
                find(self.bodies[name], recv_op, doing.stage, doing) if doing.op in uses else None
            )
            if recv is None:
                continue
            assert doing.stage is not None
            stage = doing.stage + RECVS[recv_op][1]
            peer = self._far(self.bodies[name][recv].peer, stage)
            send_op = Op.SEND_ACT if recv_op is Op.RECV_ACT else Op.SEND_GRAD
            sent_at = find(self.bodies[peer], send_op, stage, doing)
            assert sent_at is not None
            yield peer, sent_at

    def _use(self, name: GroupName, send: Doing) -> int:
        """Where the group at the other end first needs what `send` brings."""
        assert send.stage is not None
        kind, step = SENDS[send.op]
        uses: Sequence[Op] = USES[Op.RECV_ACT if kind == "act" else Op.RECV_GRAD]
        found = [find(self.bodies[name], op, send.stage + step, send) for op in uses]
        return min(at for at in found if at is not None)
