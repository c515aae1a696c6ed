"""What the coordinator makes of an operator's `Inject`: by whom it goes, or why it cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from resihp.config import JobConfig
from resihp.config.injection import is_of_a_rank
from resihp.ir.expand import expand
from resihp.ir.model import Plan

__all__ = ["carrier", "remark", "why_not"]


def carrier(
    kind: object,
    rank: int | None,
    *,
    alive: AbstractSet[int],
    here: AbstractSet[int],
    per_node: int,
) -> int | None:
    """The rank whose supervisor passes the fault on; None: there is none.

    A fault of a rank goes to that rank. Any supervisor of its node does for a monitor, and any at
    all for a coordinator, also one whose executor is lost.
    """
    if is_of_a_rank(kind):
        return rank if rank in alive & here else None
    fit = here
    if rank is not None and kind in ("kill_monitor", "hang_monitor"):
        fit = {each for each in here if each // per_node == rank // per_node}
    if rank in fit:
        return rank
    return min(alive & fit or fit, default=None)


def why_not(
    fault: Mapping[str, str | int | float], rank: int, job: JobConfig, plan: Plan | None
) -> str | None:
    """Why `rank` cannot come to the place of this fault in the steps to come; None: it can."""
    if "moment" in fault and job.device.kind == "emulated":
        return "moments are not there on emulated devices; nearest valid: leave --moment out"
    instruction = fault.get("instruction")
    if not isinstance(instruction, int) or plan is None:
        return None
    if rank not in plan.active_ranks:
        return (
            f"rank {rank} stands by and has no instructions; nearest valid: leave --instruction out"
        )
    num_instrs = len(expand(plan, rank).instrs)
    if instruction < num_instrs:
        return None
    return (
        f"--instruction {instruction}: the program of rank {rank} has {num_instrs} instructions; "
        f"nearest valid: {num_instrs - 1}"
    )


def remark(kind: object, job: JobConfig) -> str:
    """What the operator may not expect of the fault; '' where there is nothing to say."""
    if kind == "torn_checkpoint" and job.checkpoint.every == 0:
        return (
            "; no step is saved in this job ([checkpoint] every = 0), so that it strikes only "
            "when the state is saved at its end"
        )
    return ""
