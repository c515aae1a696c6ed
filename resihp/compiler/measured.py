"""A measured profile: samples of F, B and W, one JSON object a line, and the costs that fit them.

    {"op": "F", "layers": 4, "tp": 2, "tokens": 4096, "documents": [1024, 3072], "seconds": 0.0123}

`layers` 0 is the head and the loss alone. A sample is one document unless it lists them, or their
`pairs`, the sum of their squared lengths. What is measured is taken to slow down with a device,
with the all-reduces in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from resihp.compiler.costs import CostModel, FittedCost, Lengths, OpCost
from resihp.compiler.profile import Fit, fit, fit_scale
from resihp.errors import UserError

__all__ = ["MAX_PROFILE_BYTES", "Sample", "measured_costs", "samples_in"]

MAX_PROFILE_BYTES = 1 << 26
"""Longest file of samples."""
_OPS = ("F", "B", "W")

_Tokens = Annotated[int, Meta(ge=1, le=1 << 26)]


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured F, B or W."""

    op: Literal["F", "B", "W"]
    layers: Annotated[int, Meta(ge=0, le=1 << 16)]
    """Decoder layers that ran; 0: the head and the loss."""
    tp: Annotated[int, Meta(ge=1, le=1 << 10)]
    tokens: _Tokens
    seconds: Annotated[float, Meta(ge=1e-9, le=1e6)]
    documents: tuple[_Tokens, ...] | None = None
    pairs: Annotated[int, Meta(ge=1, le=1 << 52)] | None = None

    @property
    def lengths(self) -> Lengths:
        """What the time depends on."""
        if self.pairs is not None:
            return Lengths(self.tokens, self.pairs)
        return Lengths.of(self.documents or (self.tokens,))

    @property
    def each_s(self) -> float:
        """Of one layer, or of the head."""
        return self.seconds / max(self.layers, 1)


def samples_in(data: bytes, path: str) -> list[Sample]:
    """Those of a file. Raises UserError, with the line, for what is no sample."""
    decoder = msgspec.json.Decoder(Sample)
    found: list[Sample] = []
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            sample = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"{path}:{number}: no measured sample: {error}") from None
        reason = _contradiction(sample)
        if reason is not None:
            raise UserError(f"{path}:{number}: {reason}")
        found.append(sample)
    if not found:
        raise UserError(f"{path}: holds no measured sample")
    return found


def _contradiction(sample: Sample) -> str | None:
    if sample.documents is not None:
        if sample.pairs is not None:
            return "documents and pairs say the same: leave one out"
        if sum(sample.documents) != sample.tokens:
            return f"the documents have {sum(sample.documents)} tokens, not {sample.tokens}"
    elif sample.pairs is not None and not sample.tokens <= sample.pairs <= sample.tokens**2:
        return f"{sample.tokens} tokens have {sample.tokens} to {sample.tokens**2} pairs"
    return None


class _Key(NamedTuple):
    tp: int
    op: str


def measured_costs(samples: Sequence[Sample], described: CostModel) -> CostModel:
    """`described` with the coefficients that `samples` give.

    What was not measured keeps its price from FLOPs, times what the nearest TP degree that was
    measured took over its own; of the head, times what the layers took. Samples of degrees that
    `described` does not have count for nothing.

    Raises UserError where that leaves none of a layer.
    """
    of_layer, of_head = (
        _by_key([s for s in samples if s.tp in described.layer and (s.layers > 0) == has_layers])
        for has_layers in (True, False)
    )
    if not of_layer:
        degrees = ", ".join(map(str, described.degrees))
        raise UserError(f"the profile has no sample of a layer at TP {degrees}")
    fits = {key: _fit_layer(of, _of(described.layer, key)) for key, of in of_layer.items()}
    factors = {key: _factor(of, _of(described.layer, key)) for key, of in of_layer.items()}
    head_fits = {key: _scaled(of, _of(described.head, key)) for key, of in of_head.items()}
    return msgspec.structs.replace(
        described,
        layer={tp: _row(tp, described.layer[tp], fits, factors) for tp in described.layer},
        head={tp: _row(tp, described.head[tp], head_fits, factors) for tp in described.head},
        fits=(*_told("layer", fits), *_told("head", head_fits)),
    )


def _by_key(samples: Sequence[Sample]) -> dict[_Key, list[Sample]]:
    found: dict[_Key, list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: (sample.tp, _OPS.index(sample.op))):
        found.setdefault(_Key(sample.tp, sample.op), []).append(sample)
    return found


def _of(costs: dict[int, tuple[OpCost, OpCost, OpCost]], key: _Key) -> OpCost:
    return costs[key.tp][_OPS.index(key.op)]


class _Fitted(NamedTuple):
    fit: Fit
    is_scaled: bool


def _fit_layer(samples: Sequence[Sample], described: OpCost) -> _Fitted:
    """Both coefficients, or the one of W; one factor where that is all that can be told."""
    kinds = {sample.lengths.pairs / sample.lengths.tokens for sample in samples}
    if described.per_pair_s and len(kinds) < 2:
        return _scaled(samples, described)
    lengths, seconds = [s.lengths for s in samples], [s.each_s for s in samples]
    return _Fitted(fit(lengths, seconds, attention=described.per_pair_s > 0), is_scaled=False)


def _scaled(samples: Sequence[Sample], described: OpCost) -> _Fitted:
    found = fit_scale(described, [s.lengths for s in samples], [s.each_s for s in samples])
    return _Fitted(found, is_scaled=described.per_pair_s > 0)


def _factor(samples: Sequence[Sample], described: OpCost) -> float:
    """Measured over described seconds, all samples together."""
    expected_s = sum(described.seconds(sample.lengths) for sample in samples)
    return sum(sample.each_s for sample in samples) / expected_s


def _row(
    tp: int,
    described: tuple[OpCost, OpCost, OpCost],
    fits: dict[_Key, _Fitted],
    factors: dict[_Key, float],
) -> tuple[OpCost, OpCost, OpCost]:
    """F, B and W at one TP degree."""
    f, b, w = (
        fits[_Key(tp, op)].fit.cost
        if _Key(tp, op) in fits
        else cost.times(_nearest(tp, op, factors))
        for op, cost in zip(_OPS, described, strict=True)
    )
    return f, b, w


def _nearest(tp: int, op: str, factors: dict[_Key, float]) -> float:
    """Of the nearest degree; of the same operation, if it was measured there."""
    key = min(factors, key=lambda key: (abs(math.log2(key.tp / tp)), key.op != op, key))
    return factors[key]


def _told(part: Literal["layer", "head"], fits: dict[_Key, _Fitted]) -> list[FittedCost]:
    return [
        FittedCost(
            tp=key.tp,
            part=part,
            op=msgspec.convert(key.op, Literal["F", "B", "W"]),
            is_scaled=found.is_scaled,
            per_token_s=found.fit.cost.per_token_s,
            per_pair_s=found.fit.cost.per_pair_s,
            num_samples=found.fit.num_samples,
            rms_error_s=found.fit.rms_error_s,
            mean_relative_error=found.fit.mean_relative_error,
            explained=found.fit.explained,
        )
        for key, found in fits.items()
    ]
