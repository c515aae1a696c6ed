"""From one plan to the next: every shard has one live source, the dead stay dead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from resihp.ir.diagnostics import Related, Span
from resihp.ir.model import Group, GroupName, LayerRange, Load, Move, Plan, Reshard, Restore, Source
from resihp.ir.reshard import Change, Need, holds, layers_of
from resihp.ir.source import Parsed
from resihp.ir.verify.findings import Findings, listed
from resihp.ir.verify.kept import check_kept

__all__ = ["check_adaptation", "check_targets"]


def check_targets(parsed: Parsed, findings: Findings) -> None:
    """RHP802, RHP805, RHP810, RHP811 and a part of RHP807, which need no previous plan."""
    plan = parsed.plan
    both = sorted(set(plan.returned).intersection(plan.lost))
    if both:
        verb = "is" if len(both) == 1 else "are"
        findings.add(
            "RHP807",
            parsed.statement("returned"),
            f"rank {listed(both)} {verb} lost, so it has not returned",
            related=(Related("lost here", parsed.statement("lost")),),
        )
    groups = {group.name: group for group in plan.groups}
    of_rank = {rank: group for group in plan.groups for rank in group.ranks}
    brought: dict[tuple[object, object, int], Span] = {}
    for span, line in zip(parsed.reconfigure, plan.reconfigure, strict=True):
        target = of_rank.get(line.target) if isinstance(line, Move) else groups.get(line.target)
        if isinstance(line, Load):
            _check_version(parsed, span, line, findings)
        if isinstance(line, Restore):
            _check_is_gone(plan, span, line, findings)
        if target is None or not holds(target, line.layers):
            _report_target(span, line, target, findings)
        else:
            _check_once(span, line, target.name, brought, findings)


def check_adaptation(parsed: Parsed, previous: Plan, findings: Findings) -> None:
    """RHP801, RHP803, RHP804, RHP806 to RHP809 and RHP812."""
    if not _check_same_job(parsed, previous, findings):
        return
    _check_lost_stay_lost(parsed, previous, findings)
    check = _Check(parsed, previous, findings)
    for span, group in zip(parsed.groups, parsed.plan.groups, strict=True):
        check.target(span, group)
    check.needless()
    check_kept(parsed, previous, findings)


def _check_version(parsed: Parsed, span: Span, line: Load, findings: Findings) -> None:
    resume = parsed.plan.resume
    if resume is None:
        message = f"this loads version {line.step}, but the plan does not say where it resumes"
        hint = f"add `resume step={line.step} keep=none`"
        findings.add("RHP810", parsed.attribute(span, "step"), message, hint=hint)
    elif resume.step != line.step:
        findings.add(
            "RHP810",
            parsed.attribute(span, "step"),
            f"this loads version {line.step}, but the plan resumes at step {resume.step}",
            related=(Related("given here", parsed.statement("resume")),),
        )


def _check_is_gone(plan: Plan, span: Span, line: Restore, findings: Findings) -> None:
    """RHP811."""
    if line.source in plan.lost or line.source in plan.returned:
        return
    findings.add(
        "RHP811",
        span,
        f"rank {line.source} is neither lost nor returned, so it holds its state itself",
        hint="`reshard` or `move` takes what a live rank holds",
    )


def _report_target(span: Span, line: Source, target: Group | None, findings: Findings) -> None:
    if isinstance(line, Move):
        what = f"rank {line.target} does not take layers {line.layers}"
        has = "it is in no group" if target is None else f"{target.name} holds {_held(target)}"
    else:
        what = f"{line.target} does not take layers {line.layers}"
        has = "there is no such group" if target is None else f"it holds {_held(target)}"
    findings.add("RHP805", span, f"{what}: {has}")


def _held(group: Group) -> str:
    return ",".join(map(str, group.layers))


def _check_once(
    span: Span,
    line: Source,
    target: GroupName,
    brought: dict[tuple[object, object, int], Span],
    findings: Findings,
) -> None:
    """RHP802: the same layers from the same source to the same target."""
    source = _source_of(line)
    twice: dict[Span, list[int]] = {}
    for layer in range(line.layers.first, line.layers.last + 1):
        first = brought.setdefault((source, line.target, layer), span)
        if first != span:
            twice.setdefault(first, []).append(layer)
    if isinstance(line, Move):
        ends = f"of rank {line.target} is brought twice from rank {line.source}"
    else:
        ends = f"of {target} is brought twice from {source}"
    for first, layers in twice.items():
        findings.add(
            "RHP802",
            span,
            f"layer {listed(layers)} {ends}",
            related=(Related("the first is here", first),),
        )


def _source_of(line: Source) -> GroupName | int | str:
    match line:
        case Load():
            return "a saved version"
        case Restore():
            return f"a snapshot of rank {line.source}"
        case Reshard() | Move():
            return line.source


def _check_same_job(parsed: Parsed, previous: Plan, findings: Findings) -> bool:
    plan = parsed.plan
    same = True
    for keyword, new, old in (
        ("model", plan.model, previous.model),
        ("mesh", plan.mesh, previous.mesh),
        ("batch", plan.batch, previous.batch),
        ("precision", plan.precision, previous.precision),
    ):
        if new != old:
            same = False
            message = f"the `{keyword}` line differs from the previous plan's"
            findings.add("RHP808", parsed.statement(keyword), message)
    return same


def _check_lost_stay_lost(parsed: Parsed, previous: Plan, findings: Findings) -> None:
    plan = parsed.plan
    back = sorted(set(previous.lost).difference(plan.lost, plan.returned))
    if back:
        verb = "was" if len(back) == 1 else "were"
        findings.add(
            "RHP807",
            parsed.statement("lost"),
            f"rank {listed(back)} {verb} lost in the previous plan and must stay lost",
            hint=f"if it is back with nothing, say `returned {listed(back)}`",
        )
    never = sorted(set(plan.returned).difference(previous.lost))
    if never:
        verb = "was" if len(never) == 1 else "were"
        findings.add(
            "RHP807",
            parsed.statement("returned"),
            f"rank {listed(never)} {verb} not lost in the previous plan, so it cannot return",
        )


class _Check:
    def __init__(self, parsed: Parsed, previous: Plan, findings: Findings) -> None:
        self.parsed = parsed
        self.plan = parsed.plan
        self.previous = previous
        self.findings = findings
        self.change = Change(previous, parsed.plan)
        self.of_rank = {rank: group for group in self.plan.groups for rank in group.ranks}
        self.groups = {group.name: group for group in self.plan.groups}
        self.sound = [
            self._has_source(span, line)
            for span, line in zip(parsed.reconfigure, self.plan.reconfigure, strict=True)
        ]
        """Per line: whether what it names as its source held the layers."""
        self.useful: set[int] = set()
        """Lines that bring something, or whose fault is reported already."""

    def _has_source(self, span: Span, line: Source) -> bool:
        """Reports RHP803, RHP809, and RHP804 of a rank that is to read a snapshot."""
        match line:
            case Load():
                return True
            case Reshard():
                source = self.change.old.get(line.source)
                reason = _why_not_group(line, source)
            case Move() | Restore():
                source = self.change.member.get(line.source, (None, 0))[0]
                reason = _why_not_rank(line, source)
        target = self._target_of(line)
        if target is None:
            return reason is None
        if reason is not None:
            self.findings.add("RHP803", span, reason)
            return False
        match line:
            case Reshard():
                return True
            case Move():
                return self._is_alike(span, line, target)
            case Restore():
                return self._can_read(span, line)

    def _can_read(self, span: Span, line: Restore) -> bool:
        """RHP804 for a snapshot that a lost rank is to read."""
        if line.giver not in self.change.lost:
            return True
        self.findings.add(
            "RHP804",
            span,
            f"rank {line.giver}, which is to read the snapshot of rank {line.source}, is lost",
            related=(Related("lost here", self.parsed.statement("lost")),),
            hint="name a live rank of the node whose memory has the snapshot",
        )
        return False

    def _target_of(self, line: Source) -> Group | None:
        """The group that a line brings something to; None where RHP805 has it."""
        if isinstance(line, Move):
            target = self.of_rank.get(line.target)
        else:
            target = self.groups.get(line.target)
        return target if target is not None and holds(target, line.layers) else None

    def _is_alike(self, span: Span, line: Move, target: Group) -> bool:
        """RHP809; the source was in a group."""
        source, was = self.change.member[line.source]
        becomes = target.ranks.index(line.target)
        if (was, source.tp) == (becomes, target.tp):
            return True
        self.findings.add(
            "RHP809",
            span,
            f"rank {line.source} was member {was} of {source.tp} in {source.name}, rank "
            f"{line.target} is member {becomes} of {target.tp} in {target.name}: their shards "
            "differ",
            hint=f"`reshard layers={line.layers} {source.name} -> {target.name}` cuts them anew",
        )
        return False

    def target(self, span: Span, group: Group) -> None:
        """All layers of one new group; layers that fare alike are reported together."""
        if group == self.change.old.get(group.name):
            return  # its members hold all of it
        lines = self.change.lines_to(group)
        unsourced: dict[tuple[int, ...], list[int]] = {}
        for layer in layers_of(group):
            left: list[int] = []
            gone: dict[int, set[int]] = {}
            for need in self.change.needs(group, layer):
                about = [
                    index
                    for index in lines
                    if self.change.covers(self.plan.reconfigure[index], need.rank, layer)
                ]
                dead = self._lost_holders(about, need)
                if self._is_unsourced(about, need):
                    left.append(need.rank)
                elif dead:
                    gone.setdefault(about[0], set()).update(dead)
            for line, dead in gone.items():
                self._report_lost(line, group, sorted(dead))
            if left:
                unsourced.setdefault(tuple(left), []).append(layer)
        for ranks, layers in unsourced.items():
            self._report_unsourced(span, group, ranks, layers)

    def _lost_holders(self, about: Sequence[int], need: Need) -> set[int]:
        """Ranks that held what `about` cannot bring any more. Notes the lines that bring it."""
        if not all(self.sound[index] for index in about):
            self.useful.update(about)  # what they were meant to bring is not known
            return set()
        dead: set[int] = set()
        for chunk in need.chunks:
            giver = self.change.giver(about, chunk)
            if giver is not None:
                self.useful.add(giver.line)
                continue
            self.useful.update(about)
            for index in about:
                line = self.plan.reconfigure[index]
                assert not isinstance(line, Load)
                holder = self.change.holder(line, chunk)
                if holder is not None:
                    dead.add(holder)
        return dead

    def _is_unsourced(self, about: Sequence[int], need: Need) -> bool:
        """Whether no line is about some chunk: there is none, or only snapshots without it."""
        if not all(self.sound[index] for index in about):
            return False
        lines = [self.plan.reconfigure[index] for index in about]
        return not any(isinstance(line, Load) for line in lines) and any(
            all(isinstance(line, Load) or self.change.holder(line, chunk) is None for line in lines)
            for chunk in need.chunks
        )

    def _report_lost(self, line: int, target: Group, dead: list[int]) -> None:
        first, last = self.plan.reconfigure[line].layers
        verb = "is" if len(dead) == 1 else "are"
        names = dict.fromkeys(str(self.change.member[rank][0].name) for rank in dead)
        self.findings.add(
            "RHP804",
            self.parsed.reconfigure[line],
            f"rank {listed(dead)} of {' and '.join(names)} held what {target.name} needs, and "
            f"{verb} lost",
            related=(Related("lost here", self.parsed.statement("lost")),),
            hint=self._advice(target, list(range(first, last + 1))),
        )

    def _report_unsourced(
        self, span: Span, group: Group, ranks: tuple[int, ...], layers: list[int]
    ) -> None:
        lacks = "lacks" if len(ranks) == 1 else "lack"
        self.findings.add(
            "RHP801",
            span,
            f"rank {listed(list(ranks))} of {group.name} {lacks} state of layer "
            f"{listed(layers)}, and no line of `reconfigure` brings it",
            hint=self._advice(group, layers),
            detail=ranks,
        )

    def _advice(self, target: Group, layers: list[int]) -> str:
        """What could bring the layers, as the lines to write."""
        runs = _runs(layers)
        for source in self.previous.groups:
            alive = not self.change.lost.intersection(source.ranks)
            if alive and all(holds(source, run) for run in runs):
                return _lines(
                    f"reshard layers={run} {source.name} -> {target.name}" for run in runs
                )
        nobody = "no group of the previous plan that held them is whole"
        resume = self.plan.resume
        if resume is None:
            return nobody
        step = resume.step
        loads = _lines(f"load layers={run} step={step} -> {target.name}" for run in runs)
        return f"{nobody}; if version {step} is saved, {loads}"

    def needless(self) -> None:
        """RHP806."""
        for index, line in enumerate(self.plan.reconfigure):
            reported = not self.sound[index] or self._target_of(line) is None
            if index in self.useful or reported or self._again(index):
                continue
            name = f"rank {line.target}" if isinstance(line, Move) else str(line.target)
            self.findings.add(
                "RHP806",
                self.parsed.reconfigure[index],
                f"{name} lacks nothing of layers {line.layers} that this line would bring",
                hint="remove the line",
            )

    def _again(self, index: int) -> bool:
        """Whether RHP802 has the line."""
        line = self.plan.reconfigure[index]
        return any(
            _ends(earlier) == _ends(line)
            and earlier.layers.first <= line.layers.last
            and line.layers.first <= earlier.layers.last
            for earlier in self.plan.reconfigure[:index]
        )


def _why_not_group(line: Reshard, source: Group | None) -> str | None:
    if source is None:
        return f"the previous plan has no group {line.source}"
    if not holds(source, line.layers):
        return f"in the previous plan {line.source} held layers {_held(source)}, not {line.layers}"
    return None


def _why_not_rank(line: Move | Restore, source: Group | None) -> str | None:
    if source is None:
        return f"in the previous plan rank {line.source} was in no group"
    if not holds(source, line.layers):
        return (
            f"in the previous plan rank {line.source} held layers {_held(source)}, not "
            f"{line.layers}"
        )
    return None


def _ends(line: Source) -> tuple[object, object]:
    return _source_of(line), line.target


def _runs(layers: Sequence[int]) -> list[LayerRange]:
    """Ascending layers as ranges without gaps."""
    runs: list[LayerRange] = []
    for layer in sorted(layers):
        if runs and runs[-1].last + 1 == layer:
            runs[-1] = LayerRange(runs[-1].first, layer)
        else:
            runs.append(LayerRange(layer, layer))
    return runs


def _lines(lines: Iterable[str]) -> str:
    """`a` and `b` would."""
    return " and ".join(f"`{line}`" for line in lines) + " would"
