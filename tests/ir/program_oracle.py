"""Programs of one job run the slow way: ranks one by one, messages with what is in them.

Under `edge`: a directed rank pair is a FIFO, a receive takes the message at its place in the
order of receives, and everything that needs a tensor waits for it. F, B, W and gathers are done by
all members of a group at once, `reduce_grads` by all ranks of the stage, `step` by all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from resihp.ir.model import Op
from resihp.ir.program import Program, ProgramInstr, boundary_type

__all__ = ["RunError", "fault_of"]

_BACKWARD = (Op.B, Op.BW)
_GATHERS = {Op.GATHER_ACT: Op.RECV_ACT, Op.GATHER_GRAD: Op.RECV_GRAD}
_SCATTERS = {Op.SCATTER_ACT: Op.SEND_ACT, Op.SCATTER_GRAD: Op.SEND_GRAD}


class RunError(Exception):
    """What goes wrong when the programs run."""


def fault_of(programs: Sequence[Program]) -> str | None:
    """Why the programs do not compute the gradient of the job; None if they do."""
    try:
        _check_work(programs)
        _Run(programs).finish()
    except RunError as wrong:
        return str(wrong)
    return None


def _check_work(programs: Sequence[Program]) -> None:
    """Every micro-batch once per stage, on one whole group; one program per seat."""
    first = programs[0]
    ranks = Counter(program.rank for program in programs)
    seats = Counter((program.group, program.tp_index) for program in programs)
    if max(ranks.values()) > 1 or max(seats.values()) > 1:
        raise RunError("two programs of one rank or seat")
    tasks = {
        (stage, home, number)
        for stage in range(first.num_stages)
        for home in range(first.mesh.dp)
        for number in range(first.batch.microbatches)
    }
    done: dict[tuple[object, ...], Counter[Op]] = {task: Counter() for task in tasks}
    where: dict[tuple[object, ...], set[object]] = {task: set() for task in tasks}
    for program in programs:
        if len(_mates(programs, program)) != program.tp:
            raise RunError(f"{program.group} is not complete")
        for instr in program.instrs:
            if instr.op.is_compute:
                task = instr.stage, instr.home, instr.microbatch
                if task not in tasks or instr.stage not in program.stages:
                    raise RunError(f"{instr} is no work of this rank")
                where[task].add(program.group)
                done[task][instr.op] += program.tp_index == 0
    for task, ops in done.items():
        if len(where[task]) != 1 or ops not in (
            Counter((Op.F, Op.BW)),
            Counter((Op.F, Op.B, Op.W)),
        ):
            raise RunError(f"{task}: {ops} on {where[task]}")


def _mates(programs: Sequence[Program], program: Program) -> list[Program]:
    return [other for other in programs if other.group == program.group]


class _Rank:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.at = 0
        self.have: set[tuple[object, ...]] = set()
        """Whole tensors that are here: (`act` or `grad`, stage that uses them, home, number)."""
        self.done: set[tuple[object, ...]] = set()
        """(op, stage, home, number) of what has run."""
        self.posted: list[tuple[int, int, ProgramInstr, int]] = []
        """(peer, place in its channel, receive, index of the message in it)."""

    @property
    def instr(self) -> ProgramInstr | None:
        instrs = self.program.instrs
        return instrs[self.at] if self.at < len(instrs) else None


def _key(instr: ProgramInstr) -> tuple[object, ...]:
    return instr.stage, instr.home, instr.microbatch


def _used(kind: str, instr: ProgramInstr, step: int) -> tuple[object, ...]:
    """The tensor of `kind` that the stage `step` further uses."""
    assert instr.stage is not None
    return kind, instr.stage + step, instr.home, instr.microbatch


class _Run:
    def __init__(self, programs: Sequence[Program]) -> None:
        self.ranks = {program.rank: _Rank(program) for program in programs}
        self.channels: dict[tuple[int, int], list[tuple[object, ...]]] = {}
        self.num_received: Counter[tuple[int, int]] = Counter()

    def finish(self) -> None:
        while any(map(self._advance, self.ranks.values())):
            pass
        if any(rank.instr is not None for rank in self.ranks.values()):
            raise RunError("a rank waits for ever")
        for pair, sent in self.channels.items():
            if len(sent) != self.num_received[pair]:
                raise RunError(f"{pair}: {len(sent)} sent, {self.num_received[pair]} received")
        for rank in self.ranks.values():
            for posted in rank.posted:
                self._check_message(rank, *posted)
            self._check_end(rank)

    def _check_end(self, rank: _Rank) -> None:
        stages = [(Op.REDUCE_GRADS, stage) for stage in rank.program.stages]
        ends = [(i.op, i.stage) for i in rank.program.instrs if i.op in (Op.REDUCE_GRADS, Op.STEP)]
        if sorted(ends) != sorted([*stages, (Op.STEP, None)]) and len(ends) != len(stages) + 1:
            raise RunError("reduce or step missing or twice")
        if rank.program.instrs[-1].op is not Op.STEP or Counter(ends).most_common(1)[0][1] > 1:
            raise RunError("step is not last, or something stands twice")

    def _advance(self, rank: _Rank) -> bool:
        """Run what is next, if it can run; whether it did."""
        instr = rank.instr
        if instr is None:
            return False
        if instr.op.is_compute or instr.op in _GATHERS:
            together = self._group(rank)
        elif instr.op is Op.REDUCE_GRADS:
            together = [r for r in self.ranks.values() if instr.stage in r.program.stages]
        elif instr.op is Op.STEP:
            together = list(self.ranks.values())
        else:
            self._alone(rank, instr)
            rank.at += 1
            return True
        size = 2 if instr.paired else 1
        both = rank.program.instrs[rank.at : rank.at + size]
        for other in together:
            theirs = other.program.instrs[other.at : other.at + size]
            if [_what(i) for i in theirs] != [_what(i) for i in both]:
                return False
        if not all(self._is_ready(other, one) for other in together for one in both):
            return False
        for one in both:
            for other in together:
                self._meet(other, one)
        for other in together:
            other.at += size
        return True

    def _group(self, rank: _Rank) -> list[_Rank]:
        return [r for r in self.ranks.values() if r.program.group == rank.program.group]

    # --- what one rank does

    def _alone(self, rank: _Rank, instr: ProgramInstr) -> None:
        if instr.op in (Op.GATHER_PARAMS, Op.FREE_PARAMS):
            return
        if instr.op in _SCATTERS:
            rank.done.add((instr.op, *_key(instr)))
        elif instr.op in (Op.SEND_ACT, Op.SEND_GRAD):
            self._send(rank, instr)
        else:
            for index, transfer in enumerate(instr.transfers):
                pair = transfer.peer, rank.program.rank
                place = self.num_received[pair]
                self.num_received[pair] += 1
                rank.posted.append((transfer.peer, place, instr, index))

    def _send(self, rank: _Rank, instr: ProgramInstr) -> None:
        act = instr.op is Op.SEND_ACT
        makers = (Op.F,) if act else _BACKWARD
        if not any((op, *_key(instr)) in rank.done for op in makers):
            raise RunError(f"{instr} sends what is not made")
        cut = (Op.SCATTER_ACT if act else Op.SCATTER_GRAD, *_key(instr)) in rank.done
        if (instr.num_chunks > 1) and not cut:
            raise RunError(f"{instr} sends chunks of what is not cut")
        used = _used("act" if act else "grad", instr, 1 if act else -1)
        for peer, chunk, num in instr.transfers:
            if num < 1 or not 0 <= chunk < num:
                raise RunError(f"{instr} has no such chunk")
            expected = boundary_type(rank.program, num)
            if instr.tensor != expected:
                raise RunError(f"{instr} sends another type than {expected}")
            owed = chunk * rank.program.tp // num == rank.program.tp_index
            if num > 1 and not owed:
                raise RunError(f"{instr} sends a chunk of another member")
            message = (*used, chunk, num, instr.tensor)
            self.channels.setdefault((rank.program.rank, peer), []).append(message)

    # --- what several do together

    def _is_ready(self, rank: _Rank, instr: ProgramInstr) -> bool:
        if instr.op in _GATHERS:
            recvs = self._recvs(rank, _GATHERS[instr.op], instr)
            if not recvs:
                raise RunError(f"{instr} gathers what is not received")
            return all(self._is_there(rank, peer, place) for peer, place, *_ in recvs)
        needed = self._needed(rank, instr)
        if needed is None or needed in rank.have:
            return True
        kind = Op.RECV_ACT if needed[0] == "act" else Op.RECV_GRAD
        recvs = self._recvs(rank, kind, instr)
        if not recvs:
            raise RunError(f"{instr} lacks {needed}")
        if recvs[0][2].num_chunks > 1:
            raise RunError(f"{instr} uses chunks")
        return all(self._is_there(rank, peer, place) for peer, place, *_ in recvs)

    def _needed(self, rank: _Rank, instr: ProgramInstr) -> tuple[object, ...] | None:
        assert instr.stage is not None or not instr.op.is_compute
        if instr.op is Op.F and instr.stage != 0:
            return _used("act", instr, 0)
        if instr.op in _BACKWARD and instr.stage != rank.program.num_stages - 1:
            return _used("grad", instr, 0)
        return None

    def _recvs(
        self, rank: _Rank, op: Op, instr: ProgramInstr
    ) -> list[tuple[int, int, ProgramInstr, int]]:
        return [post for post in rank.posted if post[2].op is op and _key(post[2]) == _key(instr)]

    def _is_there(self, rank: _Rank, peer: int, place: int) -> bool:
        return len(self.channels.get((peer, rank.program.rank), ())) > place

    def _check_message(
        self, rank: _Rank, peer: int, place: int, recv: ProgramInstr, index: int
    ) -> None:
        message = self.channels[peer, rank.program.rank][place]
        _, chunk, num = recv.transfers[index]
        kind = "act" if recv.op is Op.RECV_ACT else "grad"
        if message != (*_used(kind, recv, 0), chunk, num, recv.tensor):
            raise RunError(f"{recv} takes {message}")

    def _meet(self, rank: _Rank, instr: ProgramInstr) -> None:
        if instr.op in _GATHERS:
            self._gather(rank, instr)
        elif instr.op.is_compute:
            self._compute(rank, instr)
        rank.done.add((instr.op, *_key(instr)))

    def _gather(self, rank: _Rank, instr: ProgramInstr) -> None:
        chunks: list[int] = []
        num = 0
        for mate in sorted(self._group(rank), key=lambda mate: mate.program.tp_index):
            for post in self._recvs(mate, _GATHERS[instr.op], instr):
                self._check_message(mate, *post)
                num = post[2].transfers[post[3]].num_chunks
                chunks.append(post[2].transfers[post[3]].chunk)
        if chunks != list(range(num)):
            raise RunError(f"{instr} joins {chunks}")
        kind = "act" if instr.op is Op.GATHER_ACT else "grad"
        rank.have.add(_used(kind, instr, 0))

    def _compute(self, rank: _Rank, instr: ProgramInstr) -> None:
        needed = self._needed(rank, instr)
        if needed is not None and needed not in rank.have:
            kind = Op.RECV_ACT if needed[0] == "act" else Op.RECV_GRAD
            for post in self._recvs(rank, kind, instr):
                self._check_message(rank, *post)
        before = {Op.F: (), Op.B: (Op.F,), Op.BW: (Op.F,), Op.W: (Op.B,)}[instr.op]
        if any((op, *_key(instr)) not in rank.done for op in before):
            raise RunError(f"{instr} stands before {before}")
        if (Op.REDUCE_GRADS, instr.stage, None, None) in rank.done:
            raise RunError(f"{instr} stands after reduce_grads")
        if instr.op is Op.F:
            self._hand_over(rank, _used("act", instr, 1))
        elif instr.op in _BACKWARD:
            self._hand_over(rank, _used("grad", instr, -1))

    def _hand_over(self, rank: _Rank, used: tuple[object, ...]) -> None:
        """To the next stage, if it is here."""
        if used[1] in rank.program.stages:
            rank.have.add(used)


def _what(instr: ProgramInstr) -> tuple[object, ...]:
    return instr.op, instr.paired, *_key(instr)
