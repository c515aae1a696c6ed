"""The plans that a run kept, read back."""

from __future__ import annotations

from pathlib import Path

from resihp.errors import UserError
from resihp.ir.model import Plan
from resihp.ir.parser import parse
from resihp.monitor.run_dir import RunDir

__all__ = ["plan_of_run"]


def plan_of_run(run: Path, generation: int, step: int) -> Plan:
    """What a generation of the run at `run` runs in iteration `step`.

    UserError where it cannot be read.
    """
    folder = RunDir(run)
    plan, steady = _read(folder.plan_path(generation)), folder.steady_plan_path(generation)
    redoes = plan.resume is not None and plan.resume.step == step
    return plan if redoes or not steady.exists() else _read(steady)


def _read(path: Path) -> Plan:
    try:
        return parse(path.read_text(encoding="utf-8"), path=str(path)).plan
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
