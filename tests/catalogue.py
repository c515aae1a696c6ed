"""What a fault may do to a job: the catalogue T1-T34, S1-S8, and the tests that hold it to that.

    python tests/catalogue.py        the table: each entry, its tests, what is left out and why

A test says in its sentence which entries it covers, as `[T5]`. `tests/test_catalogue.py` holds
both together.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
_MARK = re.compile(r"\[([TS]\d+)\]")


class Entry(NamedTuple):
    """A fault and what must hold."""

    says: str
    left_out: str = ""
    """What no test covers, and why."""


ENTRIES = {
    "T1": Entry("a rank dies at any instruction: the others end in one generation, same state"),
    "T2": Entry("a stopped rank is fenced, the others go on; continued, it finds itself fenced"),
    "T3": Entry("a rank that holds its GIL beats on; only progress judges it"),
    "T4": Entry("a rank dies before a new pair or group is first used"),
    "T5": Entry("a second failure in each phase of a recovery"),
    "T6": Entry("the coordinator dies or stops in any phase: takeover, never two plans"),
    "T7": Entry("the host of the store dies: steps go on, new groups get a new store"),
    "T8": Entry("a node's owner dies: its children die with it, the node counts as dead"),
    "T9": Entry("a partition, one way or both: exactly one side goes on"),
    "T10": Entry("ranks leave and return faster than they beat; budgets count progress"),
    "T11": Entry("all replicas of a shard are lost: a verified version, never a mix"),
    "T12": Entry("no feasible plan: a bounded end with its exit code, state saved"),
    "T13": Entry("SIGTERM: state saved, documented exit code"),
    "T14": Entry("after a recovery all replicas of each shard are equal"),
    "T15": Entry("state resharded through any TP degrees comes back bit by bit"),
    "T16": Entry("a faulted run has the losses of the fault-free one"),
    "T17": Entry("every sample weighs the same, whatever is missing, late or doubled"),
    "T18": Entry("random numbers follow step, micro-batch and layer, not the rank"),
    "T19": Entry("every sample once per epoch, over failures and resumes"),
    "T20": Entry("a save that ends anywhere loads as the version before, or as the new one"),
    "T21": Entry("a damaged checkpoint is refused by name, the version before is taken"),
    "T22": Entry("a full, failing or slow disk: training goes on, the old version stays"),
    "T23": Entry("a save in flight is discarded with its generation"),
    "T24": Entry("saving contains no collective"),
    "T25": Entry("an idle, a crowded and a clock-shifted machine: no false fence"),
    "T26": Entry("events of a dead session are not judged in the next one"),
    "T27": Entry("declared pauses are no hang"),
    "T28": Entry("lost, doubled, late beats: no verdict below the limit, one above"),
    "T29": Entry("a thousand reconfigurations leave nothing behind"),
    "T30": Entry("addresses that cannot be had: one clear error"),
    "T31": Entry("a process with a stuck group still ends in bounded time"),
    "T32": Entry("an hour of faults weighted as published, a trace replayed; the score"),
    "T33": Entry(
        "a child that cannot be killed does not block the others",
        "no process can be put into uninterruptible sleep on purpose here; a supervisor that waits "
        "for one falls silent, or its rank does not settle, and both are tested",
    ),
    "T34": Entry("two jobs of one user on one host do not meet"),
    "S1": Entry("wrong secrets, replays, old generations, reflections: closed, nothing changes"),
    "S2": Entry("absurd lengths, depths and numbers take no memory"),
    "S3": Entry("slow strangers do not hold up others"),
    "S4": Entry("nothing listens outside the chosen interface"),
    "S5": Entry("nothing runs data as code"),
    "S6": Entry("crafted manifests are refused before anything is allocated"),
    "S7": Entry("secrets are in no argument, log or environment"),
    "S8": Entry("random bytes and texts never break the readers"),
}


def marked(folder: Path = TESTS) -> Iterator[tuple[str, str]]:
    """(entry, test) of every mark in the docstring of a test."""
    for path in sorted(folder.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for mark in _MARK.findall(ast.get_docstring(node) or ""):
                yield mark, f"{path.relative_to(folder)}::{node.name}"


def by_entry(folder: Path = TESTS) -> dict[str, list[str]]:
    """The tests of each entry that has one."""
    found: dict[str, list[str]] = defaultdict(list)
    for mark, test in marked(folder):
        found[mark].append(test)
    return dict(found)


def main() -> int:
    found = by_entry()
    for name, entry in ENTRIES.items():
        print(f"{name:<4} {entry.says}")
        for test in found.get(name, []):
            print(f"       {test}")
        if entry.left_out:
            print(f"       not tested: {entry.left_out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
