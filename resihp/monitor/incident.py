"""One failure from the first sign to the first instruction after it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

__all__ = ["Incident", "IncidentBook", "listed"]


def listed(ranks: Iterable[int]) -> str:
    """`rank 5`, `ranks 2, 6`."""
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


class Incident(msgspec.Struct, kw_only=True):
    """Times are seconds of the machine's monotonic clock; None: not reached or not known."""

    ranks: list[int]
    evidence: str
    detected_s: float
    step: int
    """The iteration that was interrupted and is redone."""
    hit_s: float | None = None
    """When the fault hit, where the injector or the operator's kill said so."""
    noticed_s: float | None = None
    """When the last survivor knew."""
    settled_s: float | None = None
    resumed_s: float | None = None
    lost_work_s: float | None = None
    """How long the interrupted iteration had been running."""
    moved_bytes: int = 0
    num_kept: int = 0
    """Micro-batches of the interrupted iteration that are not redone."""
    num_micro_batches: int = 0
    """Of the global batch; 0: not known yet."""
    action: str = ""

    @property
    def detection_ms(self) -> float | None:
        """From the fault to the coordinator's verdict."""
        return None if self.hit_s is None else 1000 * (self.detected_s - self.hit_s)

    @property
    def recovery_ms(self) -> float | None:
        """From the verdict until all survivors run again."""
        return None if self.resumed_s is None else 1000 * (self.resumed_s - self.detected_s)

    @property
    def redone_share(self) -> float:
        """Of the micro-batches of the interrupted iteration: those that run in it once more, or
        for the first time, after the incident."""
        total = self.num_micro_batches
        return 1.0 if not total else 1 - self.num_kept / total

    def row(self) -> dict[str, object]:
        """The incident as fields of an event."""
        fields: dict[str, object] = msgspec.structs.asdict(self)
        fields["detection_ms"] = self.detection_ms
        fields["recovery_ms"] = self.recovery_ms
        fields["redone_share"] = self.redone_share
        return fields

    @property
    def line(self) -> str:
        """The incident in one line, for the console: who, evidence, cost, action."""
        detection, recovery = self.detection_ms, self.recovery_ms
        assert recovery is not None
        seen = "" if detection is None else f" seen after {detection:.0f} ms,"
        return (
            f"! lost {listed(self.ranks)} ({self.evidence}){seen} "
            f"running again after {recovery:.0f} ms: {self.action}; "
            f"step {self.step} is redone{self.kept_note}"
        )

    @property
    def kept_note(self) -> str:
        """How much of the interrupted iteration is kept; empty: nothing."""
        if not self.num_kept:
            return ""
        return f" but for {self.num_kept} of {self.num_micro_batches} micro-batches"


class IncidentBook:
    """All incidents of a job; the last one is open until everybody runs again."""

    def __init__(self) -> None:
        self.incidents: list[Incident] = []
        self._hits: dict[int, float] = {}

    @property
    def open(self) -> Incident | None:
        """The incident that the job is recovering from."""
        last = self.incidents[-1] if self.incidents else None
        return last if last is not None and last.resumed_s is None else None

    def hit(self, rank: int, at_s: float) -> None:
        """A fault is about to hit `rank`."""
        self._hits[rank] = at_s

    def ended(self, rank: int, hit_s: float | None, seen_s: float | None) -> None:
        """The executor of `rank` ended: of a fault announced at `hit_s`, or as seen at `seen_s`."""
        if hit_s is not None:
            self._hits[rank] = hit_s
        elif seen_s is not None:
            self._hits.setdefault(rank, seen_s)

    def hit_s(self, rank: int) -> float | None:
        """When what `rank` is being lost to hit it, as far as it was said."""
        return self._hits.get(rank)

    def forget(self, rank: int) -> None:
        """What hit `rank` hit an executor that no plan counts on."""
        self._hits.pop(rank, None)

    def lose(self, rank: int, evidence: str, *, now_s: float, step: int, since_s: float) -> None:
        """`rank` is lost in iteration `step`, which has been running since `since_s`."""
        hit_s = self._hits.pop(rank, None)
        incident = self.open
        if incident is not None:
            incident.ranks.append(rank)
            if incident.hit_s is None and hit_s is not None and hit_s <= incident.detected_s:
                incident.hit_s = hit_s
            incident.evidence += f"; rank {rank}: {evidence}"
            return
        self.incidents.append(
            Incident(
                ranks=[rank],
                evidence=evidence,
                detected_s=now_s,
                step=step,
                hit_s=hit_s,
                lost_work_s=now_s - since_s,
            )
        )
