"""Random choices that depend on their name only, never on who draws them or in which order.

Data order and initial weights are drawn here, so that any rank in any layout derives the same.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

__all__ = ["keyed_permutation", "keyed_seed"]


def keyed_seed(*key: int | str) -> int:
    """A 63-bit seed from the parts of `key`; distinct keys give unrelated seeds."""
    text = "\0".join(f"{type(part).__name__}={part}" for part in key)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def keyed_permutation(num_items: int, *key: int | str) -> NDArray[np.int64]:
    """A permutation of `range(num_items)` that is a pure function of `key`.

    It sorts raw draws of a counter-based generator: numpy keeps those stable between versions,
    which it does not promise for `Generator.permutation`.
    """
    draws = np.random.Philox(key=keyed_seed(*key)).random_raw(num_items)
    return np.argsort(np.atleast_1d(draws), kind="stable").astype(np.int64)
