"""One failure from the first sign to the first instruction after it."""

from __future__ import annotations

import msgspec

__all__ = ["Incident"]


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
    action: str = ""

    @property
    def detection_ms(self) -> float | None:
        """From the fault to the coordinator's verdict."""
        return None if self.hit_s is None else 1000 * (self.detected_s - self.hit_s)

    @property
    def recovery_ms(self) -> float | None:
        """From the verdict until all survivors run again."""
        return None if self.resumed_s is None else 1000 * (self.resumed_s - self.detected_s)

    def row(self) -> dict[str, object]:
        """The incident as fields of an event."""
        fields: dict[str, object] = msgspec.structs.asdict(self)
        fields["detection_ms"] = self.detection_ms
        fields["recovery_ms"] = self.recovery_ms
        return fields
