"""From one plan to the next: every shard has one live source, the dead stay dead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from resihp.ir.diagnostics import Related, Span
from resihp.ir.model import Group, GroupName, Plan
from resihp.ir.reshard import (
    chunks_of_member,
    holder_of_chunk,
    live_holder,
    num_state_chunks,
)
from resihp.ir.source import Parsed
from resihp.ir.verify.findings import Findings, listed

__all__ = ["check_adaptation", "check_targets"]


class _Need(NamedTuple):
    """What one member of a new group lacks of one layer."""

    rank: int
    chunks: list[int]


def check_targets(parsed: Parsed, findings: Findings) -> None:
    """RHP805 and RHP802, which need no previous plan."""
    plan = parsed.plan
    groups = {group.name: group for group in plan.groups}
    brought: dict[tuple[GroupName, GroupName, int], Span] = {}
    for span, reshard in zip(parsed.reconfigure, plan.reshards, strict=True):
        target = groups.get(reshard.target)
        if target is None or not _holds(target, reshard.layers.first, reshard.layers.last):
            has = "there is no such group" if target is None else f"it holds {target.sole_layers}"
            message = f"{reshard.target} does not take layers {reshard.layers}: {has}"
            findings.add("RHP805", span, message)
            continue
        twice: dict[Span, list[int]] = {}
        for layer in range(reshard.layers.first, reshard.layers.last + 1):
            first = brought.setdefault((reshard.source, reshard.target, layer), span)
            if first != span:
                twice.setdefault(first, []).append(layer)
        for first, layers in twice.items():
            findings.add(
                "RHP802",
                span,
                f"layer {listed(layers)} of {reshard.target} is brought twice from "
                f"{reshard.source}",
                related=(Related("the first is here", first),),
            )


def check_adaptation(parsed: Parsed, previous: Plan, findings: Findings) -> None:
    """RHP801, RHP803, RHP804 and RHP806 to RHP808."""
    if not _check_same_job(parsed, previous, findings):
        return
    _check_lost_stay_lost(parsed, previous, findings)
    check = _Check(parsed, previous, findings)
    for span, group in zip(parsed.groups, parsed.plan.groups, strict=True):
        check.target(span, group)
    check.needless()


def _holds(group: Group, first: int, last: int) -> bool:
    return group.sole_layers.first <= first and last <= group.sole_layers.last


def _check_same_job(parsed: Parsed, previous: Plan, findings: Findings) -> bool:
    plan = parsed.plan
    same = True
    for keyword, new, old in (
        ("model", plan.model, previous.model),
        ("mesh", plan.mesh, previous.mesh),
        ("batch", plan.batch, previous.batch),
    ):
        if new != old:
            same = False
            message = f"the `{keyword}` line differs from the previous plan's"
            findings.add("RHP808", parsed.statement(keyword), message)
    return same


def _check_lost_stay_lost(parsed: Parsed, previous: Plan, findings: Findings) -> None:
    back = sorted(set(previous.lost) - set(parsed.plan.lost))
    if back:
        verb = "was" if len(back) == 1 else "were"
        findings.add(
            "RHP807",
            parsed.statement("lost"),
            f"rank {listed(back)} {verb} lost in the previous plan and must stay lost",
            hint="a repaired device joins as a new rank",
        )


class _Check:
    def __init__(self, parsed: Parsed, previous: Plan, findings: Findings) -> None:
        self.parsed = parsed
        self.plan = parsed.plan
        self.previous = previous
        self.findings = findings
        self.lost = frozenset(self.plan.lost)
        self.num_chunks = num_state_chunks(previous, self.plan)
        self.old: Mapping[GroupName, Group] = {group.name: group for group in previous.groups}
        self.held = {
            rank: (group, index)
            for group in previous.groups
            for index, rank in enumerate(group.ranks)
        }
        self.needed: set[int] = set()
        """Indices of the reshard lines that bring something."""

    def target(self, span: Span, group: Group) -> None:
        """All layers of one new group; layers that fare alike are reported together."""
        unsourced: dict[tuple[int, ...], list[int]] = {}
        for layer in range(group.sole_layers.first, group.sole_layers.last + 1):
            needs = list(self._needs(group, layer))
            if not needs:
                continue
            lines = [
                index
                for index, reshard in enumerate(self.plan.reshards)
                if reshard.target == group.name
                and reshard.layers.first <= layer <= reshard.layers.last
            ]
            if lines:
                self._check_sources(lines, group, layer, needs)
            else:
                ranks = tuple(need.rank for need in needs)
                unsourced.setdefault(ranks, []).append(layer)
        for ranks, layers in unsourced.items():
            lacks = "lacks" if len(ranks) == 1 else "lack"
            self.findings.add(
                "RHP801",
                span,
                f"rank {listed(list(ranks))} of {group.name} {lacks} state of layer "
                f"{listed(layers)}, and no reshard line brings it",
                hint=self._advice(group, layers),
            )

    def _needs(self, group: Group, layer: int) -> Iterator[_Need]:
        for index, rank in enumerate(group.ranks):
            wanted = chunks_of_member(index, group.tp, self.num_chunks)
            held = self._held_chunks(rank, layer)
            chunks = [chunk for chunk in wanted if chunk not in held]
            if chunks:
                yield _Need(rank, chunks)

    def _held_chunks(self, rank: int, layer: int) -> range:
        if rank not in self.held:
            return range(0)
        group, index = self.held[rank]
        if not _holds(group, layer, layer):
            return range(0)
        return chunks_of_member(index, group.tp, self.num_chunks)

    def _check_sources(
        self, lines: list[int], target: Group, layer: int, needs: list[_Need]
    ) -> None:
        """RHP803 and RHP804. Each chunk comes from the first line whose holder of it is alive."""
        sources = [self._source(line) for line in lines]
        sound = [source for source in sources if source is not None]
        if len(sound) < len(sources):
            self.needed.update(lines)  # what they were meant to bring is not known
            return
        gone: set[int] = set()
        for chunk in sorted({chunk for need in needs for chunk in need.chunks}):
            holder = live_holder(sound, chunk, self.num_chunks, self.lost)
            if holder is None:
                self.needed.update(lines)
                gone |= {holder_of_chunk(source, chunk, self.num_chunks) for source in sound}
            else:
                self.needed.add(lines[holder[0]])
        if gone:
            dead, verb = sorted(gone), "is" if len(gone) == 1 else "are"
            names = " and ".join(str(source.name) for source in sound)
            self.findings.add(
                "RHP804",
                self.parsed.reconfigure[lines[0]],
                f"rank {listed(dead)} of {names} held what {target.name} needs, and {verb} lost",
                related=(Related("lost here", self.parsed.statement("lost")),),
                hint=self._advice(target, [layer]),
            )

    def _source(self, line: int) -> Group | None:
        """The group of the previous plan that a line names; None (RHP803) where it cannot be."""
        reshard, span = self.plan.reshards[line], self.parsed.reconfigure[line]
        source = self.old.get(reshard.source)
        if source is None:
            message = f"the previous plan has no group {reshard.source}"
            self.findings.add("RHP803", span, message)
        elif not _holds(source, reshard.layers.first, reshard.layers.last):
            message = (
                f"in the previous plan {reshard.source} held layers {source.sole_layers}, not "
                f"{reshard.layers}"
            )
            self.findings.add("RHP803", span, message)
        else:
            return source
        return None

    def _advice(self, target: Group, layers: list[int]) -> str:
        """A group of the previous plan that could bring the layers."""
        for source in self.previous.groups:
            alive = not self.lost.intersection(source.ranks)
            if alive and all(_holds(source, layer, layer) for layer in layers):
                lines = f"{min(layers)}..{max(layers)}"
                return f"`reshard layers={lines} {source.name} -> {target.name}` would"
        return "no group of the previous plan that held them is whole"

    def needless(self) -> None:
        """RHP806."""
        groups = {group.name: group for group in self.plan.groups}
        for index, reshard in enumerate(self.plan.reshards):
            target = groups.get(reshard.target)
            if target is None or not _holds(target, reshard.layers.first, reshard.layers.last):
                continue
            again = any(
                (earlier.source, earlier.target) == (reshard.source, reshard.target)
                and earlier.layers.first <= reshard.layers.last
                and reshard.layers.first <= earlier.layers.last
                for earlier in self.plan.reshards[:index]
            )
            if index not in self.needed and not again:  # again: RHP802 has it
                self.findings.add(
                    "RHP806",
                    self.parsed.reconfigure[index],
                    f"{reshard.target} lacks nothing of layers {reshard.layers} that this line "
                    "would bring",
                    hint="remove the line",
                )
