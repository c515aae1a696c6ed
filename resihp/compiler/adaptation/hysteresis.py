"""When a plan may grow back: rules that keep a flapping device from making the plan flap.

A plan that lost devices changes at once, since it must. A plan that could use devices that are
back changes only if they have been good for a while, longer after each relapse, and if what the
larger plan saves over a horizon is more than the switch costs. Everything here is a pure function
of iteration numbers, so a run can be replayed and tested without a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from resihp.errors import UserError

__all__ = ["DEFAULT_PATIENCE", "Patience", "Record", "Trust", "Verdict", "may_grow", "wait_of"]


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How much proof it takes. Raises UserError for values that make no sense."""

    good_iterations: int = 8
    """N: iterations that a device must have been good before the plan counts on it again."""
    most_iterations: int = 1024
    """N doubles after each relapse up to this. A device that is good twice as long is forgiven."""
    horizon_iterations: int = 500
    """How long a new plan is expected to run, for what it saves."""
    switch_s: float = 5.0
    """Seconds that a switch takes beside the transfer of state."""

    def __post_init__(self) -> None:
        """Checks the values."""
        if not 1 <= self.good_iterations <= self.most_iterations:
            raise UserError(
                f"good_iterations {self.good_iterations}: must be 1..most_iterations "
                f"({self.most_iterations})"
            )
        if self.horizon_iterations < 1:
            raise UserError(f"horizon_iterations {self.horizon_iterations}: nearest valid: 1")
        if not 0 <= self.switch_s < float("inf"):
            raise UserError(f"switch_s {self.switch_s}: must be 0 or more seconds")


DEFAULT_PATIENCE = Patience()


class Record(msgspec.Struct, frozen=True):
    """What is remembered of a device that was lost or slow."""

    relapses: int = 0
    """How often it became bad again after it had been good again."""
    good_since: int | None = None
    """The first iteration of those that it has been good in a row; None while it is bad."""


class Trust(msgspec.Struct, frozen=True):
    """Records of all devices that were ever bad; the others are trusted."""

    records: Mapping[int, Record] = {}

    def seen(self, iteration: int, bad: Collection[int], patience: Patience) -> Trust:
        """After `iteration`, at the end of which exactly the ranks `bad` were lost or slow.

        Iterations between two calls count as good for who is good at both.
        """
        records = dict(self.records)
        for rank in bad:
            before = records.get(rank)
            if before is None:
                records[rank] = Record()
            elif before.good_since is not None:
                records[rank] = Record(before.relapses + 1)
        for rank, record in self.records.items():
            if rank in bad:
                continue
            if record.good_since is None:
                records[rank] = Record(record.relapses, iteration)
            elif iteration + 1 - record.good_since >= 2 * patience.most_iterations:
                del records[rank]
        return Trust(records)

    def wait(self, rank: int, iteration: int, patience: Patience) -> int:
        """Iterations after `iteration` that `rank` must yet be good; 0 for who is trusted."""
        record = self.records.get(rank)
        if record is None:
            return 0
        good = 0 if record.good_since is None else iteration + 1 - record.good_since
        return max(0, wait_of(record.relapses, patience) - good)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether to grow, and why."""

    grow: bool
    reason: str


def wait_of(relapses: int, patience: Patience) -> int:
    """Good iterations in a row that are asked of a device after `relapses` relapses."""
    doublings = min(relapses, patience.most_iterations.bit_length())
    return min(patience.good_iterations << doublings, patience.most_iterations)


def may_grow(
    patience: Patience,
    trust: Trust,
    iteration: int,
    *,
    ranks: Iterable[int],
    now_s: float,
    grown_s: float,
    transfer_s: float,
) -> Verdict:
    """Whether to switch, after `iteration`, to a plan that counts on `ranks` in addition.

    `now_s` and `grown_s` are predicted seconds of an iteration of both plans, `transfer_s` those
    of moving the state.
    """
    waits = [(trust.wait(rank, iteration, patience), rank) for rank in ranks]
    longest, rank = max(waits, default=(0, 0))
    if longest:
        return Verdict(grow=False, reason=f"rank {rank} must be good for {longest} more iterations")
    gain_s = (now_s - grown_s) * patience.horizon_iterations
    cost_s = patience.switch_s + transfer_s
    told = f"saves {gain_s:.3g} s in {patience.horizon_iterations} iterations, costs {cost_s:.3g} s"
    return Verdict(grow=gain_s > cost_s, reason=told)
