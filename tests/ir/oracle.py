"""The verifier against its oracles, at length: `make oracle`.

    python tests/ir/oracle.py                        both parts, a table, status 1 if they disagree
    python tests/ir/oracle.py --seed 17              one plan of the first part, and all about it
    python tests/ir/oracle.py --seed 17 --executed   one of the second part, and run it

Part one asks the verifier and the slow oracle about random plans and mutants, under all
transports. Part two also runs them with the executor's interpreter. Every case follows from its
seed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the processes of a team import this file too: it must cost them nothing
    from plan_runner import Outcome, Runner
    from trial import Case

CASES, EXECUTED = 3000, 320


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="oracle.py", description="The verifier against its oracles"
    )
    parser.add_argument("--cases", type=int, default=CASES, help="plans and mutants to verify")
    parser.add_argument("--runs", type=int, default=EXECUTED, help="plans and mutants to run")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, help="only this one, with its text")
    parser.add_argument("--executed", action="store_true", help="the seed is one of those run")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return _show(options.seed, executed=options.executed)
    first = options.first_seed
    bad = _compare(range(first, first + options.cases))
    return int(_execute(range(first, first + options.runs)) or bad)


def _compare(seeds: range) -> bool:
    """Part one; whether verifier and oracle disagree somewhere."""
    from trial import case_of, findings_of, why_refused

    start, table, bad = time.monotonic(), Counter[tuple[bool, bool]](), False
    mutants = 0
    for seed in seeds:
        case = case_of(seed)
        found, why = findings_of(case), why_refused(case)
        mutants += bool(case.mutations)
        table[not found, why is None] += 1
        if (not found) != (why is None):
            bad = True
            print(f"seed {seed} {' '.join(case.mutations)}: verifier {found}, oracle {why}")
    print(
        f"\n{len(seeds) - mutants} plans and {mutants} mutants, edge, pair, rank and eager, in "
        f"{time.monotonic() - start:.0f} s\n"
        f"{'':20}{'oracle accepts':>16}{'oracle refuses':>16}"
    )
    for accepted in (True, False):
        print(
            f"{'verifier accepts' if accepted else 'verifier refuses':20}"
            f"{table[accepted, True]:16}{table[accepted, False]:16}"
        )
    return bad


def _execute(seeds: range) -> bool:
    """Part two; whether a plan that is accepted does not train right."""
    from plan_runner import Runner
    from trial import executable_case_of, findings_of

    start, table, bad = time.monotonic(), Counter[tuple[bool, str]](), False
    strict: Counter[str] = Counter()
    with Runner() as runner:
        for seed in seeds:
            case = executable_case_of(seed)
            found = findings_of(case)
            outcome = _outcome(runner, case, expect_right=not found)
            table[not found, outcome.verdict] += 1
            if not found and outcome.verdict != "right":
                bad = True
                print(f"seed {seed} {' '.join(case.mutations)}: accepted, but {outcome}")
            if found and outcome.verdict == "right":
                strict[" ".join(found)] += 1
    verdicts = ("right", "wrong", "hang", "error")
    print(f"\n{len(seeds)} of them run by the interpreter in {time.monotonic() - start:.0f} s")
    print(f"{'':20}" + "".join(f"{verdict:>10}" for verdict in verdicts))
    for accepted in (True, False):
        print(
            f"{'verifier accepts' if accepted else 'verifier refuses':20}"
            + "".join(f"{table[accepted, verdict]:10}" for verdict in verdicts)
        )
    print("refused though they ran right, by code:")
    for codes, count in strict.most_common():
        print(f"  {count:3}  {codes}")
    return bad


def _outcome(runner: Runner, case: Case, *, expect_right: bool) -> Outcome:
    """A plan that is expected to end gets more time, should the machine be busy."""
    outcome = runner.run(case.plan)
    if outcome.verdict == "hang" and expect_right:
        return runner.run(case.plan, quiet_s=10)
    return outcome


def _show(seed: int, *, executed: bool) -> int:
    from plan_runner import Runner
    from trial import case_of, executable_case_of, why_refused

    from resihp.ir.parser import parse
    from resihp.ir.printer import print_plan
    from resihp.ir.render import render_text
    from resihp.ir.verify import verify

    case = executable_case_of(seed) if executed else case_of(seed)
    text = print_plan(case.plan)
    print(text)
    print(f"mutations: {' '.join(case.mutations) or 'none'}; transport {case.transport}")
    parsed = parse(text)
    transport = None if case.plan.transport else case.transport
    print(render_text(verify(parsed, transport=transport), text))
    print(f"oracle: {why_refused(case) or 'accepts'}")
    if executed:
        with Runner() as runner:
            print(f"run: {runner.run(case.plan)}")
    return 0


if __name__ == "__main__":
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parent.parent / "fleet"))
    sys.exit(main())
