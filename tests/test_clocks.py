"""Verdicts never depend on the wall clock: it may jump."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "resihp"
WALL = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now", "datetime.utcnow"}
MAY = {"monitor/run_dir.py", "monitor/node/operators.py", "monitor/doctor/clocks.py"}
"""Say for the reader of events when they happened, and let the doctor compare clocks of nodes."""


def test_only_what_people_read_knows_the_time_of_day():
    """[T25] Control plane and executor use monotonic clocks."""
    users = {
        str(path.relative_to(PACKAGE))
        for part in ("monitor", "wire", "executor", "chaos")
        for path in (PACKAGE / part).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in WALL
    }
    assert users <= MAY
