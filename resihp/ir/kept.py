"""Micro-batches that an interrupted iteration has done and the plan after it keeps.

Such a plan redoes the iteration without them. The plan of the same layout that follows it runs all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import msgspec

from resihp.ir.model import GroupName, Instr, MicroBatch, Op, Plan, Resume, Stream
from resihp.ir.placement import placement_of

__all__ = ["kept_by", "num_kept", "same_groups", "weights_run_at", "without"]


def kept_by(plan: Plan) -> frozenset[MicroBatch]:
    """What `plan` keeps of the iteration that it redoes."""
    return frozenset() if plan.resume is None else frozenset(plan.resume.keep)


def num_kept(plan: Plan) -> int:
    """How many micro-batches of the global batch the plan keeps."""
    return len(kept_by(plan))


def without(plan: Plan, keep: Collection[MicroBatch], step: int) -> Plan:
    """`plan` as it redoes iteration `step` without the micro-batches `keep`.

    Every stream keeps the order of what is left. Where `plan` is sound, so is this: all ends of all
    transfers of a micro-batch go together, and who waits for less cannot wait in a circle.
    """
    kept = frozenset(keep)
    return msgspec.structs.replace(
        plan,
        resume=Resume(step=step, keep=tuple(sorted(kept))),
        streams=tuple(part for stream in plan.streams for part in _parts(stream, kept)),
    )


def _parts(stream: Stream, kept: frozenset[MicroBatch]) -> Iterator[Stream]:
    """The stream for each set of replicas that have the same left."""
    named = {
        MicroBatch(i.home, i.microbatch)
        for i in stream.body
        if i.home is not None and i.microbatch is not None
    }
    common = named & kept
    replicas: dict[frozenset[int], list[int]] = {}
    for replica in stream.replicas:
        own = frozenset(number for home, number in kept if home == replica)
        replicas.setdefault(own, []).append(replica)
    for own, members in replicas.items():
        body = stream.body
        if own or common:
            body = tuple(_left(body, own, common))
        yield Stream(replicas=tuple(members), pp=stream.pp, body=body)


def _left(
    body: tuple[Instr, ...], own: frozenset[int], others: Collection[MicroBatch]
) -> Iterator[Instr]:
    def stays(instr: Instr) -> bool:
        if instr.microbatch is None:
            return True
        if instr.home is None:
            return instr.microbatch not in own
        return MicroBatch(instr.home, instr.microbatch) not in others

    for index, instr in enumerate(body):
        if stays(instr):
            alone = instr.paired and not stays(body[index + 1])
            yield msgspec.structs.replace(instr, paired=False) if alone else instr


def same_groups(previous: Plan, plan: Plan) -> frozenset[GroupName]:
    """Groups of `previous` whose ranks form the same group, with the same layers, in `plan`."""
    after = {group.name: group for group in plan.groups}
    return frozenset(group.name for group in previous.groups if after.get(group.name) == group)


def weights_run_at(plan: Plan) -> Mapping[int, Mapping[MicroBatch, int]]:
    """Of each stage, the replica that computes the weight gradient of each micro-batch."""
    placement = placement_of(plan)
    found: dict[int, dict[MicroBatch, int]] = {stage: {} for stage in range(placement.num_stages)}
    for stream in plan.streams:
        for instr in stream.body:
            if instr.op is not Op.W and instr.op is not Op.BW:
                continue
            stage = placement.stage_of(stream.pp, instr)
            if stage is None or instr.microbatch is None:
                continue
            for replica in stream.replicas:
                home = replica if instr.home is None else instr.home
                found[stage][MicroBatch(home, instr.microbatch)] = replica
    return found
