"""What a mutation works on."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from resihp.ir.model import Instr, Op, Plan


class Site:
    """What a mutation may work on."""

    def __init__(self, plan: Plan, rng: random.Random) -> None:
        self.plan, self.rng = plan, rng
        self.bodies = [list(stream.body) for stream in plan.streams]
        """One per stream of the plan; its own bodies are those before the mutations."""

    def body(self) -> list[Instr]:
        return self.rng.choice([body for body in self.bodies if body] or [[Instr(Op.STEP)]])

    def pick(self, is_wanted: Callable[[Instr], bool]) -> tuple[list[Instr], int] | None:
        """A body and a place in it with a wanted instruction."""
        found = [(b, i) for b in self.bodies for i, instr in enumerate(b) if is_wanted(instr)]
        return self.rng.choice(found) if found else None

    def replace(self, **changes: object) -> None:
        """Fields of the plan."""
        self.plan = msgspec.structs.replace(self.plan, **changes)


Mutation = Callable[[Site], bool]
"""Whether there was something to change."""
