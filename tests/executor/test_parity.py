"""A sample of the parity grid: real ranks against training in one process.

`make parity` runs all of it and prints a table.
The sample has every family but bf16, which is in `test_training`; `2+1` has tied tables on one
rank.
"""

from __future__ import annotations

import pytest
from fleet import Fleet
from parity_cases import grid
from parity_runs import run_case

GRID = {case.name: case for case in grid()}
SAMPLE = [
    "healthy tp1 pp4 dp2 zb-h2 tied",
    "healthy tp2 pp4 dp1 zbv tied",
    "unequal 4-2+1-4 1f1b untied",
    "unequal 2+1 1f1b tied",
    "uneven 1,4,2,1 zb-h2",
    "migrated 3 zbv",
    "adapted tp4 pp2 dp2 1f1b lost 2-9+13 untied",
    "adapted tp1 pp2 dp2 interleaved-1f1b lost 1 tied",
    "adapted tp2 pp2 dp2 zb-h1 returns",
    "random 17",
    "csv ZBVZeroBubble 2 comms",
    "fast 4-2-1 tied",
    "recompute tp2 pp2 dp2 interleaved-1f1b untied",
]


@pytest.fixture(scope="module")
def fleet():
    with Fleet(2) as fleet:
        yield fleet


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", SAMPLE)
def test_plans_train_as_one_process_does(fleet, name):
    """Every step's loss and every rank's every parameter after ten steps, all inside the bound.

    Where no sum is split over a TP group they have the bits of the reference.
    """
    result = run_case(fleet, GRID[name])
    assert result.is_right, result
