"""Several policies on one situation, beside the job without any fault."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from resihp.compiler.adaptation import Situation
from resihp.compiler.cluster import Health
from resihp.compiler.policies import outcomes
from resihp.compiler.pricing import Pricing
from resihp.compiler.simulate import simulate

__all__ = ["Comparison", "Row", "compared", "render"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One policy."""

    policy: str
    iteration_s: float | None
    """None where the job stops."""
    tokens_per_s: float
    """0 where the job stops."""
    of_fault_free: float
    """Share of the throughput without any fault."""
    num_gpus: int | None
    """That take part; None where there is no plan."""
    note: str


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All of them."""

    fault_free_s: float
    """An iteration of the plan on healthy devices and links."""
    rows: tuple[Row, ...]


def compared(situation: Situation, names: Iterable[str]) -> Comparison:
    """What each of the policies makes of `situation`."""
    pricing, plan = situation.pricing, situation.previous
    healthy = Pricing(pricing.shape, pricing.costs, pricing.cluster, Health())
    fault_free_s = simulate(plan, healthy).iteration_s
    tokens = plan.mesh.dp * plan.batch.microbatches * plan.batch.tokens
    rows: list[Row] = []
    for outcome in outcomes(situation, names):
        seconds = outcome.iteration_s
        used = None if outcome.plan is None else len(outcome.plan.active_ranks)
        rows.append(
            Row(
                policy=outcome.name,
                iteration_s=seconds,
                tokens_per_s=0.0 if seconds is None else tokens / seconds,
                of_fault_free=0.0 if seconds is None else fault_free_s / seconds,
                num_gpus=used,
                note=outcome.note,
            )
        )
    return Comparison(fault_free_s=fault_free_s, rows=tuple(rows))


def render(comparison: Comparison) -> str:
    """A table, the policies in their order."""
    head = ("policy", "iteration s", "tokens/s", "of fault-free", "GPUs", "")
    lines = [head, ("fault-free", f"{comparison.fault_free_s:.4g}", "", "100 %", "", "")]
    for row in comparison.rows:
        seconds = "stops" if row.iteration_s is None else f"{row.iteration_s:.4g}"
        gpus = "" if row.num_gpus is None else str(row.num_gpus)
        share = f"{100 * row.of_fault_free:.1f} %"
        lines.append((row.policy, seconds, f"{row.tokens_per_s:,.0f}", share, gpus, row.note))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "".join(
        "  ".join(
            cell.rjust(width) if 0 < index < 5 else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        + "\n"
        for line in lines
    )
