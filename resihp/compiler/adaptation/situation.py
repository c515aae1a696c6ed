"""What an adaptation starts from: the plan that ran, the prices of today, and who will run the new.

Health, what is lost and what is slow, is part of the prices (`Pricing.health`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

import msgspec

from resihp.compiler.costs import Lengths
from resihp.compiler.planner.problem import Capacity, Chunks
from resihp.compiler.pricing import Pricing
from resihp.compiler.sources import NOT_STORED, State, Stored
from resihp.errors import UserError
from resihp.ir.model import LayerRange, Plan
from resihp.ir.placement import Placement, placement_of
from resihp.ir.reshard import nothing_before

__all__ = ["ANYTHING", "WHOLE_MICROBATCHES", "Profile", "Situation"]


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What the one who runs the plan accepts."""

    moves_single_stages: bool = True
    """A micro-batch may visit another replica for some of its stages; if not, it runs all of them
    in one replica, and every replica of a plan has all stages."""
    repartitions: bool = True
    """Layers may change their stage."""
    splits_backward: bool = True
    """B and W may come apart where the plan before has them in one."""


ANYTHING = Profile()
"""All that the plan language can say."""
WHOLE_MICROBATCHES = Profile(moves_single_stages=False, repartitions=False)
"""What `resihp.executor.runnable` accepts in an interrupted iteration."""


class Situation:
    """A verified plan, today's prices and health, and what the new plan may do."""

    def __init__(
        self,
        previous: Plan,
        pricing: Pricing,
        profile: Profile = ANYTHING,
        resume_step: int | None = None,
        returned: Collection[int] = (),
        all_lengths: Sequence[Lengths] | None = None,
        min_holders: int = 2,
        stored: Stored = NOT_STORED,
    ) -> None:
        """`resume_step` is the interrupted iteration that the new plan redoes.

        `returned` are ranks that the plan before has lost and that are back, without any state.
        `all_lengths` are those of the micro-batches of all replicas, home after home; fewer repeat.
        `min_holders` live groups are to hold each layer where a plan can have so many: with one
        the next loss ends the job, so that is worth more than time. `stored` is what of the state
        lies outside of live processes; a saved version needs `resume_step`, which is its step.

        Raises UserError for ranks that the job does not have, or that return and were not lost,
        and for less than one holder.
        """
        self.previous = previous
        self.pricing = pricing
        self.profile = profile
        self.resume_step = resume_step
        self.returned = frozenset(returned) - pricing.health.lost
        self.all_lengths = all_lengths
        """What plans are simulated with; None: every micro-batch is nominal."""
        self.min_holders = min(min_holders, previous.mesh.dp)
        self.stored = stored
        self.reserves_buffers = True
        """Whether the planner keeps room for buffers that it does not follow."""
        self.rooms: dict[tuple[LayerRange, int, bool], Capacity] = {}
        """Memory by layers, TP degree and recomputation, as far as it was asked for."""
        self.chunks: dict[tuple[LayerRange, int, float, bool], Chunks] = {}
        """Ticks by layers, TP degree, speed and recomputation, as far as they were asked for."""
        if min_holders < 1:
            raise UserError(f"{min_holders} holders of each layer: must be at least 1")
        world = previous.mesh.world
        for what, ranks in (("lost", pricing.health.lost), ("slow", pricing.health.speed)):
            unknown = sorted(rank for rank in ranks if not 0 <= rank < world)
            if unknown:
                raise UserError(f"{what} rank {unknown[0]}: the job's ranks are 0..{world - 1}")
        never = sorted(self.returned.difference(previous.lost))
        if never:
            lost = " ".join(map(str, sorted(previous.lost))) or "none"
            raise UserError(f"rank {never[0]} cannot return: lost in the plan before is {lost}")

    def with_profile(self, profile: Profile) -> Situation:
        """The same, for another one who runs the plan."""
        return self._with(profile, self.min_holders)

    def with_min_holders(self, min_holders: int) -> Situation:
        """The same, with more or less care for the next loss."""
        return self._with(self.profile, min_holders)

    def _with(self, profile: Profile, min_holders: int) -> Situation:
        return Situation(
            self.previous,
            self.pricing,
            profile,
            self.resume_step,
            self.returned,
            self.all_lengths,
            min_holders,
            self.stored,
        )

    def without_reserve(self) -> Situation:
        """The same for a first try with all memory: the verifier then tells who lacks how much."""
        twin = self.with_profile(self.profile)
        twin.reserves_buffers = False
        return twin

    @cached_property
    def lost(self) -> frozenset[int]:
        """Ranks that were lost before and now, without those that are back."""
        return frozenset(self.previous.lost) - self.returned | self.pricing.health.lost

    @cached_property
    def alive(self) -> frozenset[int]:
        """All other ranks, in groups or standby."""
        return frozenset(range(self.previous.mesh.world)) - self.lost

    @cached_property
    def state(self) -> State:
        """What is left of the state of the plan before."""
        return State(self.previous, self.lost, self.stored)

    @cached_property
    def held(self) -> Plan:
        """The plan whose layout says who holds what: that of before, or one of empty hands."""
        return nothing_before(self.previous) if self.stored.is_only_saved else self.previous

    def speed_of(self, rank: int) -> float:
        """Relative throughput; 0 for a lost rank."""
        return 0.0 if rank in self.lost else self.pricing.health.speed_of(rank)

    @cached_property
    def placement(self) -> Placement:
        """The stages of the plan before."""
        return placement_of(self.previous)

    def recomputes(self, pp: int) -> tuple[bool, ...]:
        """Of each stage at position `pp` whether its B computes the forward again."""
        return tuple(stage in self.previous.recompute for stage in self.placement.stages[pp])

    @property
    def has_one_stage_each(self) -> bool:
        """Whether position s of the pipeline runs stage s and no other, as the planner needs."""
        return self.placement.pp == tuple(range(self.placement.num_stages))

    @cached_property
    def lengths(self) -> Lengths:
        """Of a nominal micro-batch, as the planner sees all of them.

        The mean of those that are known, or else one document that fills it.
        """
        known = self.all_lengths
        if not known:
            return Lengths.of([self.previous.batch.tokens])
        total = self.previous.mesh.dp * self.previous.batch.microbatches
        each = [known[number % len(known)] for number in range(total)]
        return Lengths(
            round(sum(one.tokens for one in each) / total),
            round(sum(one.pairs for one in each) / total),
        )
