"""Pruning where the newest version is a damaged one: what can be loaded stays."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from odd_model import ODD
from saved_layouts import CONFIG, logical_state, random_layout, save

from resihp.checkpoint.versions import list_versions
from resihp.errors import CheckpointRefused
from resihp.executor.checkpoint.loading import load_holding
from resihp.ir.expand import expand
from resihp.monitor.checkpoints import complete_version

PLAN = random_layout(random.Random(0))
STATE = logical_state(1)


def save_next(directory: Path, step: int, keep: int, spared: tuple[str, ...] = ()) -> list[str]:
    """As the coordinator's process completes and prunes: the names that were pruned."""
    name = save(directory, PLAN, STATE, step=step, generation=2).name
    (manifest,) = (each.manifest for each in list_versions(directory) if each.name == name)
    assert manifest is not None
    trouble, pruned = complete_version(directory, name, manifest, keep=keep, spared=spared)
    assert not trouble
    return pruned


def loadable_steps(directory: Path) -> list[int]:
    """Of versions whose every byte is right, newest first."""
    steps: list[int] = []
    for each in list_versions(directory):
        try:
            for rank in PLAN.active_ranks:
                load_holding(ODD, CONFIG, expand(PLAN, rank), directory / each.name)
        except CheckpointRefused:
            continue
        steps.append(each.version.step)
    return steps


@pytest.mark.parametrize("is_known", [True, False], ids=["refused", "another coordinator's"])
@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_version_that_all_went_back_from_takes_no_place(
    tmp_path: Path, keep: int, is_known: bool
):
    """[T21] Step 20 is damaged, all go on from 10: of 10, 12, 14, … the newest `keep` stay."""
    save(tmp_path, PLAN, STATE, step=10)
    damaged = save(tmp_path, PLAN, STATE, step=20)
    data = next(path for path in damaged.glob("part-*.data") if path.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[3] ^= 1
    data.write_bytes(raw)
    expected = [10]
    for step in (12, 14):
        pruned = save_next(tmp_path, step, keep, (damaged.name,) if is_known else ())
        expected = [step, *expected]
        assert len(pruned) == len(expected[keep:])
        expected = expected[:keep]
        assert loadable_steps(tmp_path) == expected
    assert damaged.exists(), "somebody may want to look at it"


def test_what_is_read_now_stays_beside_the_newest(tmp_path: Path):
    """All go back to step 10 while the version of step 20 is being completed."""
    read = save(tmp_path, PLAN, STATE, step=10).name
    save(tmp_path, PLAN, STATE, step=15)
    pruned = save_next(tmp_path, 20, 1, (read,))
    assert len(pruned) == 1
    assert loadable_steps(tmp_path) == [20, 10]
