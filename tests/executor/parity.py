"""The parity grid: `make parity`.

    python tests/executor/parity.py                  all of it, a table, status 1 if a case fails
    python tests/executor/parity.py random 'tp2 pp2' only cases whose names have one of the words

Every case trains ten steps with real ranks and is compared with training in one process, see
`parity_bounds`. At the end a fleet trains 100 plans of 10 iterations each, to see what they leave.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

LEAK_PLANS, LEAK_ITERATIONS, LEAK_WARM = 100, 10, 19


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="parity.py", description="The parity grid")
    parser.add_argument("words", nargs="*", help="only cases whose names have one of these")
    parser.add_argument("--processes", type=int, default=2, help="that share the ranks")
    parser.add_argument("--list", action="store_true", help="names only")
    options = parser.parse_args(arguments)
    from parity_cases import grid

    cases = [
        case
        for case in grid()
        if not options.words or any(word in case.name for word in options.words)
    ]
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    return _run(cases, options.processes) or (0 if options.words else _leak())


def _run(cases: Sequence[object], num_processes: int) -> int:
    from fleet import Fleet, FleetError, HangError
    from parity_cases import Case
    from parity_runs import Result, run_case

    begin_s = time.monotonic()
    done: list[tuple[Case, Result]] = []
    num_failed = 0
    print(f"{'case':56}{'ranks':>6}{'loss':>8}{'params':>8}  {'bits':6}{'s':>6}")
    with Fleet(num_processes) as fleet:
        for case in cases:
            assert isinstance(case, Case)
            try:
                result = run_case(fleet, case)
            except (FleetError, HangError, AssertionError) as error:
                num_failed += 1
                print(f"{case.name:56} FAILED {type(error).__name__}: {error}", flush=True)
                continue
            num_failed += not result.is_right
            done.append((case, result))
            print(_line(case.name, result), flush=True)
    families = dict.fromkeys(case.family for case, _ in done)
    print("\nby family: cases, farthest loss and parameter as shares of the bound, bitwise equal")
    for family in families:
        found = [result for case, result in done if case.family == family]
        bits = [result for result in found if result.has_same_bits is not None]
        print(
            f"{family:12}{len(found):5}{max(r.loss_share for r in found):8.2f}"
            f"{max(r.parameter_share for r in found):8.2f}"
            f"{sum(r.has_same_bits is True for r in bits):6} of {len(bits)}"
        )
    print(f"{len(done)} ran, {num_failed} failed, {time.monotonic() - begin_s:.0f} s")
    return int(num_failed > 0)


def _leak() -> int:
    """1,000 iterations and 100 changes of plan; status 1 if something is left behind."""
    from leaks import leaks

    begin_s = time.monotonic()
    found = leaks(num_plans=LEAK_PLANS, num_iterations=LEAK_ITERATIONS, num_warm=LEAK_WARM)
    print(
        f"\n{LEAK_PLANS} plans of {LEAK_ITERATIONS} iterations, {time.monotonic() - begin_s:.0f} s"
    )
    for name, before, after in zip(found.before._fields, found.before, found.after, strict=True):
        print(f"{name:16}{before:>14,} after {LEAK_WARM}, {after:>14,} after all")
    return int(not found.are_none)


def _line(name: str, result: object) -> str:
    from parity_runs import Result

    assert isinstance(result, Result)
    bits = {True: "same", False: "OTHER", None: "-"}[result.has_same_bits]
    verdict = "" if result.is_right else f"  WRONG {result.worst}"
    return (
        f"{name:56}{result.num_ranks:6}{result.loss_share:8.2f}{result.parameter_share:8.2f}  "
        f"{bits:6}{result.seconds:6.1f}{verdict}"
    )


if __name__ == "__main__":
    from pathlib import Path

    TESTS = Path(__file__).parent.parent
    sys.path[:0] = [str(TESTS / "ir"), str(TESTS / "fleet")]
    sys.exit(main())
