"""The command line: a table of verbs, each in a module that is imported when it is used.

`resihp --help` must be there at once, so this module imports argparse and nothing heavier, and
only the verb on the command line is loaded (`tests/test_cli.py` holds it to that). A verb's
module has `add_arguments(parser)` and `run(args) -> int`, the exit status.

Exit status: 0 success, 1 findings or a failed rank, 2 wrong use or a wrong file, 4 more lost
than any plan can carry, 130 interrupted, 141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from resihp import __version__
from resihp.errors import ResihpError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class VerbModule(Protocol):
    """What a module of a verb offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it; the exit status."""
        ...


class Verb(NamedTuple):
    """One line of the table: `light` verbs work on plans and need one thread of numpy."""

    module: str
    summary: str
    light: bool


VERBS = {
    "train": Verb("resihp.cli.train", "train a job on this machine", light=False),
    "kill": Verb("resihp.cli.kill", "kill one rank of a running job", light=False),
    "inject": Verb("resihp.cli.inject", "bring a fault about in a running job", light=False),
    "chaos": Verb("resihp.cli.chaos", "run a job under many faults, with a score", light=False),
    "save": Verb("resihp.cli.save", "save a version of a running job now", light=True),
    "audit": Verb("resihp.cli.audit", "compare all replicas of a running job now", light=True),
    "where": Verb("resihp.cli.where", "tell who waits for whom in a running job", light=True),
    "doctor": Verb("resihp.cli.doctor", "look for what would cost a job", light=True),
    "checkpoints": Verb("resihp.cli.checkpoints", "list saved versions, or check them", light=True),
    "compare": Verb("resihp.cli.compare", "compare two runs step by step", light=True),
    "verify": Verb("resihp.cli.verify", "prove that plans can run, or say why not", light=True),
    "explain": Verb("resihp.cli.explain", "tell what a diagnostic code means", light=True),
    "fmt": Verb("resihp.cli.fmt", "write plans in the canonical form", light=True),
    "plan": Verb("resihp.cli.plan", "make the plan of a healthy job", light=True),
    "search": Verb("resihp.cli.search", "find the best degrees and schedule", light=True),
    "lower": Verb("resihp.cli.lower", "make the plan of a schedule", light=True),
    "show": Verb("resihp.cli.show", "draw what a plan does over time", light=True),
    "adapt": Verb("resihp.cli.adapt", "make the best plan for what is left", light=True),
    "simulate": Verb("resihp.cli.simulate", "tell how long a plan takes, and why", light=True),
    "emulate": Verb("resihp.cli.emulate", "run a plan on emulated devices", light=True),
    "expand": Verb("resihp.cli.expand", "list the program of one rank", light=True),
    "import": Verb("resihp.cli.import_csv", "make a plan of torch's pipelining CSV", light=True),
    "export": Verb("resihp.cli.export", "write a plan as torch's pipelining CSV", light=True),
    "diff": Verb("resihp.cli.diff", "tell what changed in meaning between two plans", light=True),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status (the console script `resihp`).

    A `ResihpError` becomes one message on stderr and its own exit status. Anything else is a bug
    of ours and keeps its traceback. argparse itself exits (0 help, 2 wrong use).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except ResihpError as error:
        print(f"resihp: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("resihp: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit: give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _run(arguments: list[str]) -> int:
    # The top level has only flags, so the first word is the verb.
    used = next((word for word in arguments if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(
        prog="resihp", description="Train through failures: write, verify and run pipeline plans."
    )
    parser.add_argument("--version", action="version", version=f"resihp {__version__}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    module: VerbModule | None = None
    for name, verb in VERBS.items():
        # An abbreviation would read `--run` as another option that happens to begin with it.
        subparser = subparsers.add_parser(
            name, help=verb.summary, description=verb.summary, allow_abbrev=False
        )
        if name == used:
            module = _load(verb)
            module.add_arguments(subparser)
    args = parser.parse_args(arguments)
    assert module is not None, "argparse accepts only verbs of the table"
    status = module.run(args)
    sys.stdout.flush()
    return status


def _load(verb: Verb) -> VerbModule:
    if verb.light:
        # Starting a pool of BLAS threads takes longer than verifying a plan.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return cast("VerbModule", importlib.import_module(verb.module))
