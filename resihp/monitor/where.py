"""Who waits for whom, in the words of the plan: what `resihp where` prints.

Each rank says what is at the head of its two streams, whether that waits for its inputs, and
which receives are missing. With the plan this gives, for each rank, what it does or what it waits
for and whose turn it is; followed from rank to rank it ends at those that hold all others up, or
in a circle. Ranks answer one after the other: what a rank waits for may have been sent since, and
then nobody else holds it up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from resihp.ir.circle import shortest_circle
from resihp.ir.expand import expand
from resihp.ir.model import Op, Plan
from resihp.ir.program import Program, ProgramInstr
from resihp.ir.statements import spell_instr, spell_numbers
from resihp.monitor.run_dir import RunDir
from resihp.monitor.run_plans import plan_of_run
from resihp.wire.messages import At, Positions

__all__ = ["HangReport", "Standing", "describe", "hang_report", "report", "standings"]

_MAKERS = {Op.RECV_ACT: ((Op.F,), -1), Op.RECV_GRAD: ((Op.B, Op.BW), 1)}
"""What makes a receive's tensor, and at which stage from here."""
_LASTING_S = 1.0
"""Shorter waits may be those of a job that goes on, whose ranks answered at different moments."""


class Standing(NamedTuple):
    """One rank."""

    rank: int
    does: str
    """What it does or waits for, such as `waits for recv_act 7 from dp0.pp1`."""
    waits_for: tuple[int, ...]
    """Ranks whose turn it is; empty for one that waits for nobody."""
    since_s: float | None = None
    """How long it has been so; None: not known."""


def standings(plan: Plan, at: Mapping[int, At]) -> dict[int, Standing]:
    """What every rank of `plan` that answered does, by rank."""
    board = _Board(plan, at)
    return {rank: board.standing(rank) for rank in sorted(at)}


class _Board:
    """All programs and where each rank is in its own."""

    def __init__(self, plan: Plan, at: Mapping[int, At]) -> None:
        self.plan = plan
        self.at = at
        self.programs = {rank: expand(plan, rank) for rank in plan.active_ranks}

    def standing(self, rank: int) -> Standing:
        at = self.at[rank]
        standing = self._standing(rank, at)
        if at.pause is None:
            return standing
        paused = f"{standing.does} (pauses: {at.pause.reason}, at most {at.pause.at_most_s:g} s)"
        return standing._replace(does=paused)

    def _standing(self, rank: int, at: At) -> Standing:
        program = self.programs.get(rank)
        if not at.runs or program is None:
            return Standing(rank, at.doing, (), at.since_s)
        does, waits_for = self._of_streams(program, at)
        return Standing(rank, does, tuple(sorted(set(waits_for) - {rank})), at.since_s)

    def _of_streams(self, program: Program, at: At) -> tuple[str, Iterable[int]]:
        if at.compute >= 0 and not at.compute_waits:
            text = _text(program, at.compute)
            return f"computes {text}", self._behind(program, at.compute, at.step)
        if at.compute >= 0:
            missing = _missing_for(program, at)
            if missing:
                return self._of_receives(program, missing, at.step)
        if at.comm >= 0:
            return self._of_comm(program, at)
        if at.compute >= 0:
            return f"waits to compute {_text(program, at.compute)}", ()
        return "is between two iterations", ()

    def _of_receives(
        self, program: Program, missing: Sequence[int], step: int
    ) -> tuple[str, Iterable[int]]:
        """Of one or, for a pair, two receives."""
        texts: list[str] = []
        everyone: list[int] = []
        for index in missing:
            receive = program.instrs[index]
            peers = [transfer.peer for transfer in receive.transfers]
            group = self.programs[peers[0]].group
            owing = [peer for peer in peers if not self._has_made(peer, receive, step)]
            whose = f", whose {self._who(owing)}" if owing else ", which has sent it"
            texts.append(f"{_text(program, index)} from {group}{whose}")
            everyone += owing
        return f"waits for {' and '.join(texts)}", everyone

    def _has_made(self, rank: int, receive: ProgramInstr, step: int) -> bool:
        """Whether `rank`, when it answered, was past making what `receive` of `step` brings."""
        at = self.at.get(rank)
        if at is None or not at.runs or receive.stage is None:
            return False
        if at.step != step:
            return at.step > step
        ops, distance = _MAKERS[receive.op]
        wanted = receive.stage + distance, receive.home, receive.microbatch
        instrs = self.programs[rank].instrs
        made = next(
            index
            for index, each in enumerate(instrs)
            if each.op in ops and (each.stage, each.home, each.microbatch) == wanted
        )
        # An idle compute stream has done what was before the other stream's head.
        head = at.compute if at.compute >= 0 else at.comm
        return head < 0 or head > made

    def _of_comm(self, program: Program, at: At) -> tuple[str, Iterable[int]]:
        instr = program.instrs[at.comm]
        text = _text(program, at.comm)
        if at.comm_waits:
            missing = [i for i in at.receives if _is_for(program.instrs[i], instr)]
            if missing:
                return self._of_receives(program, missing[:1], at.step)
            return f"waits to begin {text}", ()
        if instr.op.is_gather:
            ranks = self._behind(program, at.comm, at.step)
        else:
            ranks = self._not_at(instr, at.step)
        others = [rank for rank in ranks if rank != program.rank]
        return (
            f"waits at {text} for {self._who(others, ', which')}" if others else f"is at {text}"
        ), others

    def _who(self, ranks: Sequence[int], joined: str = "") -> str:
        """`rank 1 is at `F 5``, and how many more there are."""
        rank = min(ranks, key=lambda rank: (rank in self.at, rank))
        more = len(ranks) - 1
        return f"rank {rank}{joined} {self._position(rank)}" + (
            f" (and {more} more)" if more else ""
        )

    def _position(self, rank: int) -> str:
        at = self.at.get(rank)
        if at is None:
            return "does not answer"
        head = at.compute if at.compute >= 0 else at.comm
        if not at.runs or rank not in self.programs:
            return at.doing
        if head < 0:
            return "is between two iterations"
        return f"is at {_text(self.programs[rank], head)}"

    def _behind(self, program: Program, index: int, step: int) -> list[int]:
        """Members of the group that have not come to instruction `index`."""
        group = self.plan.group_of(program.rank)
        assert group is not None
        return [rank for rank in group.ranks if self._is_before(rank, index, step)]

    def _not_at(self, instr: ProgramInstr, step: int) -> list[int]:
        """Ranks that a reduction or a step waits for."""
        found: list[int] = []
        for rank, program in self.programs.items():
            theirs = [
                index
                for index, other in enumerate(program.instrs)
                if (other.op, other.stage) == (instr.op, instr.stage)
            ]
            if theirs and self._is_before(rank, theirs[0], step):
                found.append(rank)
        return found

    def _is_before(self, rank: int, index: int, step: int) -> bool:
        """Whether `rank` has not begun its instruction `index` of iteration `step`.

        One that does not answer may be anywhere, so it counts as if it had not.
        """
        at = self.at.get(rank)
        if at is None or not at.runs:
            return True
        if at.step != step:
            return at.step < step
        op = self.programs[rank].instrs[index].op
        on_compute = op.is_compute
        head, waits = (at.compute, at.compute_waits) if on_compute else (at.comm, at.comm_waits)
        if head < 0:
            # An idle stream has done what was before the other stream's head.
            other = at.comm if on_compute else at.compute
            return 0 <= other < index
        return head < index or (head == index and waits)


def _text(program: Program, index: int) -> str:
    return f"`{spell_instr(program.written(index))}`"


def _missing_for(program: Program, at: At) -> list[int]:
    """Missing receives that the head of the compute stream, alone or as a pair, waits for."""
    heads = [program.instrs[at.compute]]
    if heads[0].paired:
        heads.append(program.instrs[at.compute + 1])
    return [
        index
        for index in at.receives
        if any(_is_for(program.instrs[index], head) for head in heads)
    ]


def _is_for(receive: ProgramInstr, user: ProgramInstr) -> bool:
    """Whether `user` (F, B, BW or a gather) uses what `receive` brings."""
    same = (receive.stage, receive.home, receive.microbatch) == (
        user.stage,
        user.home,
        user.microbatch,
    )
    is_act = receive.op is Op.RECV_ACT
    return same and (user.op in (Op.F, Op.GATHER_ACT)) == is_act


def describe(
    plan: Plan, at: Mapping[int, At], silent: Mapping[int, str] | None = None
) -> Iterator[str]:
    """A line for each rank, then who holds all others up.

    `silent` says of ranks that did not answer what is known of them.
    """
    yield from hang_report(plan, at, silent or {}).lines()


class HangReport(NamedTuple):
    """What `describe` prints."""

    ranks: list[str]
    verdict: list[str]
    """Who holds all others up; empty if nobody waits."""
    is_young: bool
    """No wait is long enough to say that it lasts."""

    def lines(self) -> Iterator[str]:
        """The ranks, then the verdict."""
        yield from self.ranks
        if self.verdict:
            yield ""
            yield from self.verdict


def hang_report(plan: Plan, at: Mapping[int, At], silent: Mapping[int, str]) -> HangReport:
    """A line for each rank, and who holds all others up (see `describe`)."""
    found = standings(plan, at)
    waits = [each for each in found.values() if each.waits_for]
    return HangReport(
        ranks=list(_ranks(plan, found, silent)),
        verdict=list(_verdict(found, silent)),
        is_young=all((each.since_s or 0.0) < _LASTING_S for each in waits),
    )


def _ranks(plan: Plan, found: Mapping[int, Standing], silent: Mapping[int, str]) -> Iterator[str]:
    places = {rank: str(group.name) for group in plan.groups for rank in group.ranks}
    everyone = sorted({*found, *silent})
    width = max((len(str(rank)) for rank in everyone), default=1)
    for rank in everyone:
        place = places.get(rank, "standby")
        does = silent[rank] if rank not in found else _line(found[rank])
        yield f"rank {rank:<{width}}  {place:<{max(map(len, places.values()))}}  {does}"


def _line(standing: Standing) -> str:
    return standing.does + (
        "" if standing.since_s is None else f", for {_seconds(standing.since_s)}"
    )


def _verdict(found: Mapping[int, Standing], silent: Mapping[int, str]) -> Iterator[str]:
    """Where the waiting ends."""
    waiting = {rank: s.waits_for for rank, s in found.items() if s.waits_for}
    if not waiting:
        return
    ends = sorted({end for rank in waiting for end in _ends_of(rank, waiting)})
    for rank in ends:
        does = _line(found[rank]) if rank in found else silent.get(rank, "does not answer")
        held = [one for one in waiting if rank in _ends_of(one, waiting)]
        many = len(held) > 1
        ranks = f"rank{'s' if many else ''} {spell_numbers(sorted(held))}"
        yield f"{ranks} wait{'' if many else 's'} in the end for rank {rank}, which {does}"
    circle = shortest_circle(waiting)
    if circle:
        yield f"in a circle: {' -> '.join(f'rank {rank}' for rank in (*circle, circle[0]))}"


def _ends_of(rank: int, waiting: Mapping[int, Sequence[int]]) -> set[int]:
    """Ranks that wait for nobody, and for which `rank` waits directly or through others."""
    seen, open_, ends = {rank}, [rank], set[int]()
    while open_:
        for other in waiting[open_.pop()]:
            if other not in waiting:
                ends.add(other)
            elif other not in seen:
                seen.add(other)
                open_.append(other)
    return ends


def report(run: Path, positions: Positions) -> Iterator[str]:
    """The lines that `resihp where` prints of a run."""
    path = RunDir(run).plan_path(positions.generation)
    step = max((at.step for at in positions.at.values() if at.runs), default=-1)
    iteration = f", step {step}" if step >= 0 else ""
    yield f"{run.name}: generation {positions.generation} is {positions.phase}{iteration}"
    if not path.exists():
        yield from (f"rank {rank}  {at.doing}" for rank, at in sorted(positions.at.items()))
        yield from _out(positions)
        return
    plan = plan_of_run(run, positions.generation, step)
    silent = {
        rank: _unheard(positions, rank) for rank in positions.alive if rank not in positions.at
    }
    told = hang_report(plan, positions.at, silent)
    yield from told.ranks
    yield from _out(positions)
    if told.verdict:
        yield ""
        yield from told.verdict
    if told.verdict and told.is_young:
        yield f"all waits are younger than {_LASTING_S:g} s: ask again to see what lasts"


def _out(positions: Positions) -> Iterator[str]:
    """A line for each rank that is lost."""
    width = max((len(str(rank)) for rank in (*positions.alive, *positions.out)), default=1)
    for rank, becomes in sorted(positions.out.items()):
        yield f"rank {rank:<{width}}  out  {becomes}"


def _unheard(positions: Positions, rank: int) -> str:
    beat = positions.beats.get(rank)
    seen = "" if beat is None else f", last seen at step {beat.step} instruction {beat.instruction}"
    heard_s = positions.heard_s.get(rank)
    heard = "" if heard_s is None else f"; its supervisor was heard {_seconds(heard_s)} ago"
    return f"does not answer{seen}{heard}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
