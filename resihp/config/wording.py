"""What a value of a job file must be, in words, with the nearest valid choice if there is one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from msgspec import Meta, ValidationError

__all__ = ["bounds_in_words", "wanted"]


def wanted(value: object, value_type: object, error: ValidationError) -> str:
    """What is said of `value`, which msgspec refused with `error` as a `value_type`."""
    if value_type is bool:
        close = {0: "false", 1: "true"}.get(value) if isinstance(value, int) else None
        return f"must be true or false{_nearest(close)}"
    metas = list(_metas(value_type))
    said = next((meta.description for meta in metas if meta.description is not None), None)
    if said is not None:
        return f"must be {said}"
    words = str(error).replace("`", "")
    close = _closest(value, metas) if isinstance(value, int | float) else None
    return words[:1].lower() + words[1:] + _nearest(close)


def bounds_in_words(value_type: object) -> str:
    """Such as `must be more than 0 and at most 1`; '' where the type has no bounds."""
    words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "below"}
    said = [
        f"{text} {bound:.12g}"
        for meta in _metas(value_type)
        for name, text in words.items()
        if (bound := getattr(meta, name)) is not None
    ]
    return f"must be {' and '.join(said)}" if said else ""


def _nearest(choice: object) -> str:
    return "" if choice is None else f"; nearest valid: {choice}"


def _metas(value_type: object) -> Iterator[Meta]:
    """What is said of the type, also of one that may be None."""
    if isinstance(value_type, Meta):
        yield value_type
    elif get_origin(value_type) is not Literal:
        own: tuple[Any, ...] = getattr(value_type, "__metadata__", ())
        for inner in (*get_args(value_type), *own):
            yield from _metas(inner)


def _bounds(metas: list[Meta]) -> tuple[float | None, float | None]:
    """Lowest and highest valid value, where they can be reached."""
    lows = (meta.ge for meta in metas if meta.ge is not None)
    highs = (meta.le for meta in metas if meta.le is not None)
    return next(lows, None), next(highs, None)


def _closest(value: float, metas: list[Meta]) -> float | None:
    """The bound that `value` passes; None for one inside both, or past a bound that is open."""
    low, high = _bounds(metas)
    if math.isnan(value):
        return None
    if low is not None and value < low:
        return low
    return high if high is not None and value > high else None
