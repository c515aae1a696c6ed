"""Two runs side by side: the loss of every step, and the samples that it used."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TypeVar

import msgspec

from resihp.errors import UserError

__all__ = ["Comparison", "compare"]


_T = TypeVar("_T", bound=msgspec.Struct)


class _Metric(msgspec.Struct, frozen=True):
    step: int
    loss: float | None
    """None where it was not finite."""
    generation: int
    emulated: bool = False


class _Entry(msgspec.Struct, frozen=True):
    step: int
    samples: tuple[int, ...]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run is from its reference."""

    num_steps: int
    num_generations: int
    first_difference: int | None
    """The first step whose loss is not bitwise equal."""
    worst_step: int
    worst: float
    """Largest relative difference of a loss, and where it is."""
    final_losses: tuple[float, float]
    same_samples: bool
    num_samples: int
    num_repeated: int
    """Samples that were used more than once."""

    def equal_within(self, tolerance: float) -> bool:
        """Whether every loss is equal within the relative `tolerance`, from the same samples."""
        return self.worst <= tolerance and self.same_samples

    @property
    def text(self) -> str:
        """The result in a few lines."""
        if self.first_difference is None:
            losses = "every loss is bitwise equal"
        else:
            losses = (
                f"losses are bitwise equal before step {self.first_difference}, from there on "
                f"they differ by at most {self.worst:.1e} relative (step {self.worst_step})"
            )
        samples = "the same samples" if self.same_samples else "OTHER samples"
        generations = "generation" if self.num_generations == 1 else "generations"
        return "\n".join(
            (
                f"{self.num_steps} steps in {self.num_generations} {generations}: {losses}",
                f"final loss {self.final_losses[0]:.6f}, reference {self.final_losses[1]:.6f}",
                f"each step used {samples} as the reference: {self.num_samples}, "
                f"{self.num_repeated} of them more than once",
            )
        )


def compare(run: Path, reference: Path) -> Comparison:
    """Compare two run directories. UserError where they hold no comparable runs."""
    metrics, others = _read(run, "metrics", _Metric), _read(reference, "metrics", _Metric)
    if len(metrics) != len(others):
        raise UserError(
            f"{run} has {len(metrics)} steps and {reference} has {len(others)}: "
            "compare runs of the same length"
        )
    if not metrics:
        raise UserError(f"{run} has no finished step")
    for path, rows in ((run, metrics), (reference, others)):
        if any(row.emulated for row in rows):
            raise UserError(f"{path} was emulated: nothing was computed, so there are no losses")
    differences = [
        _difference(mine.loss, other.loss) for mine, other in zip(metrics, others, strict=True)
    ]
    worst = max(range(len(differences)), key=differences.__getitem__)
    ledger = _read(run, "ledger", _Entry)
    used = [sample for entry in ledger for sample in entry.samples]
    return Comparison(
        num_steps=len(metrics),
        num_generations=len({metric.generation for metric in metrics}),
        first_difference=next((step for step, d in enumerate(differences) if d != 0), None),
        worst_step=worst,
        worst=differences[worst],
        final_losses=(_shown(metrics[-1].loss), _shown(others[-1].loss)),
        same_samples=ledger == _read(reference, "ledger", _Entry),
        num_samples=len(used),
        num_repeated=len(used) - len(set(used)),
    )


def _shown(loss: float | None) -> float:
    return math.nan if loss is None else loss


def _difference(loss: float | None, reference: float | None) -> float:
    """Relative; infinite where one is not finite (two of these are never equal)."""
    if loss is None or reference is None:
        return math.inf
    return abs(loss - reference) / abs(reference)


def _read(run: Path, name: str, kind: type[_T]) -> list[_T]:
    path = run / f"{name}.jsonl"
    try:
        lines = path.read_bytes().splitlines()
        return [msgspec.json.decode(line, type=kind) for line in lines]
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{run} is not the directory of a run: {error}") from error
