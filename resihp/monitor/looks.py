"""When processes look at each other: at the same moments, for each wake-up costs the training."""

from __future__ import annotations

import asyncio

__all__ = ["next_look"]

LEAST_SHARE = 0.1
"""Of a period, that lies between two looks at least."""


async def next_look(period_s: float) -> None:
    """Until the next whole multiple of `period_s` by the loop's clock.

    Whoever looks that often in one process, or on one machine, does so at the same moment.
    """
    left_s = period_s - asyncio.get_running_loop().time() % period_s
    await asyncio.sleep(left_s if left_s > LEAST_SHARE * period_s else left_s + period_s)
