"""`resihp show`: a plan as a picture, or the program of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.cli.plan_files import parse_text, read_text, report

if TYPE_CHECKING:
    import argparse

    from resihp.ir.expand import Program, ProgramInstr

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("file", metavar="PLAN", help="plan file, or - for stdin")
    parser.add_argument("--rank", type=int, help="list the program of this rank instead")
    parser.add_argument("--width", type=int, help="columns to use (default: those of the terminal)")


def run(args: argparse.Namespace) -> int:
    """Draw the plan, or list one rank's program."""
    from resihp.ir.expand import expand
    from resihp.ir.show import draw

    text = read_text(args.file)
    parsed = parse_text(text, args.file)
    if isinstance(parsed, tuple):
        report(parsed, text, args.file)
        return 1
    plan = parsed.plan
    if args.rank is not None:
        print(_program(expand(plan, args.rank)), end="")
        return 0
    print(draw(plan, width=max(40, args.width or _columns())), end="")
    return 0


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size((100, 24)).columns


def _program(program: Program) -> str:
    head = (
        f"rank {program.rank}: member {program.tp_index} of {program.tp} in {program.group}, "
        f"layers {program.layers}, stage {program.stage} of {program.num_stages}\n"
    )
    return head + "".join(f"  {_instr(instr, program)}\n" for instr in program.instrs)


def _instr(instr: ProgramInstr, program: Program) -> str:
    words = [instr.op.mnemonic]
    if instr.microbatch is not None:
        foreign = instr.home != program.group.replica
        words.append(f"{instr.microbatch}@{instr.home}" if foreign else str(instr.microbatch))
    if instr.transfers:
        arrow = "->" if instr.op.mnemonic.startswith("send") else "<-"
        cut = instr.num_chunks > 1
        ends = [f"rank {t.peer}" + (f" chunk {t.chunk}" if cut else "") for t in instr.transfers]
        words += [arrow, ", ".join(ends)]
    if instr.num_chunks > 1:
        words.append(f"of {instr.num_chunks}" if instr.transfers else f"{instr.num_chunks} chunks")
    return " ".join(words)
