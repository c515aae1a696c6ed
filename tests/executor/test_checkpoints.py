"""Versions on disk: whatever layout they were saved from, any other one loads the same bits."""

from __future__ import annotations

import math
import random
from pathlib import Path

import msgspec
import pytest
import torch
from cases import assert_same_bits
from layouts import MODEL, idle_plan, one_stage
from odd_model import ODD
from saved_layouts import CONFIG, POSITION, held, logical_state, random_layout, save
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load

from resihp.checkpoint.versions import complete, list_versions
from resihp.errors import CheckpointRefused, OtherModel
from resihp.executor.checkpoint.loading import VersionReader, load_holding
from resihp.executor.checkpoint.pieces import all_keys
from resihp.executor.checkpoint.saving import Division
from resihp.ir.expand import expand
from resihp.ir.model import Group, LayerRange, Mesh, Plan


def assert_loads(version: Path, plan: Plan, seed: int, updates: int = 6) -> int:
    """Every rank of `plan` gets its slices of the logical state; the bytes that all read."""
    num_bytes = 0
    for rank in plan.active_ranks:
        loaded = load_holding(ODD, CONFIG, expand(plan, rank), version)
        wanted = held(plan, rank, logical_state(seed), updates)
        for kind, expected in zip(loaded.holding.kinds(), wanted.kinds(), strict=True):
            assert_same_bits(dict(kind), dict(expected))
        assert loaded.holding.optimizer.num_steps == updates
        num_bytes += loaded.num_bytes
    return num_bytes


def num_elements(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel()


@pytest.mark.parametrize("seed", range(12))
def test_any_layout_loads_what_any_other_saved(tmp_path: Path, seed: int):
    """[T15] Odd sizes, copies of heads, tied tables, unequal degrees and stages: the same bits."""
    chosen = random.Random(seed)
    state = logical_state(seed)
    version = save(tmp_path, random_layout(chosen), state)
    for _ in range(2):
        assert_loads(version, random_layout(chosen), seed)


def test_each_box_is_written_once_and_the_work_is_shared(tmp_path: Path):
    """[T24] All ranks derive one division, in which no element is there twice."""
    plan = one_stage({0: 4, 1: 2, 2: 4}, 3, 3)
    division = Division(MODEL, plan)
    items = [item for rank in division.ranks for item in division.share(rank).plan.items]
    assert len({item.index for item in items}) == len(items)
    sizes = [sum(map(num_elements, division.share(rank).plan.items)) for rank in division.ranks]
    assert sum(sizes) == sum(math.prod(shape) for shape in all_keys(MODEL).values())
    assert max(sizes) < 2 * sum(sizes) / len(sizes)
    for rank in division.ranks:
        assert Division(MODEL, plan).share(rank) == division.share(rank)


def test_the_next_step_is_that_of_a_run_that_was_never_saved(tmp_path: Path):
    """[T15] Saved at TP 8, loaded at TP 1 with AdamW's count: the update has the same bits."""
    plan, other = random_layout(random.Random(3)), random_layout(random.Random(5), max_tp=1)
    version = save(tmp_path, plan, logical_state(0))
    grads = logical_state(9)[0]
    for rank in other.active_ranks:
        program = expand(other, rank)
        kept = held(other, rank, logical_state(0), 6).optimizer
        loaded = load_holding(ODD, CONFIG, program, version).holding.optimizer
        for optimizer in (kept, loaded):
            mine = {
                name: held(other, rank, (grads, grads, grads), 0).parameters[name]
                for name in optimizer.parameters
            }
            optimizer.step(mine, 1e-2)
        assert_same_bits(loaded.parameters, kept.parameters)
        assert_same_bits(loaded.exp_avg_sq, kept.exp_avg_sq)


def test_working_copies_are_made_anew(tmp_path: Path):
    """bf16 copies are not saved: they follow from the parameters."""
    plan = random_layout(random.Random(2))
    version = save(tmp_path, plan, logical_state(0))
    rank = min(plan.active_ranks)
    program = msgspec.structs.replace(expand(plan, rank), precision="bf16")
    holding = load_holding(ODD, CONFIG, program, version).holding
    assert {tensor.dtype for tensor in holding.working.values()} == {torch.bfloat16}
    for name, parameter in holding.parameters.items():
        assert torch.equal(holding.working[name], parameter.to(torch.bfloat16))


def test_a_tied_table_is_saved_once(tmp_path: Path):
    """Both of its sides are loaded from the input side."""
    assert "parameters.table" in all_keys(ODD)
    assert "parameters.head" not in all_keys(ODD)
    plan = random_layout(random.Random(4))
    version = save(tmp_path, plan, logical_state(1))
    assert_loads(version, random_layout(random.Random(6)), 1)


def test_a_few_survivors_save_everything(tmp_path: Path):
    """One holder of each shard is enough, whoever else is lost."""
    mesh = Mesh(tp=2, pp=1, dp=2)
    layers = (LayerRange(0, ODD.num_layers - 1),)
    groups = [
        Group(replica=replica, pp=0, ranks=(2 * replica, 2 * replica + 1), layers=layers)
        for replica in (0, 1)
    ]
    version = save(tmp_path, idle_plan(mesh, groups), logical_state(4), alive=[1, 2])
    assert_loads(version, random_layout(random.Random(0)), 4)


def test_what_is_missing_is_never_called_complete(tmp_path: Path):
    """Survivors that lack a shard: the version gets no marker."""
    mesh = Mesh(tp=2, pp=1, dp=1)
    layers = (LayerRange(0, ODD.num_layers - 1),)
    plan = idle_plan(mesh, [Group(replica=0, pp=0, ranks=(0, 1), layers=layers)])
    with pytest.raises(CheckpointRefused, match="is missing"):
        save(tmp_path, plan, logical_state(4), alive=[1])
    assert [each.manifest for each in list_versions(tmp_path)] == [None]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_itself_reads_a_version(tmp_path: Path):
    """Through our reader, whole logical tensors by their keys."""
    state = logical_state(3)
    version = save(tmp_path, random_layout(random.Random(8)), state)
    wanted = {f"parameters.{name}": tensor for name, tensor in state[0].items() if name != "head"}
    read = {key: torch.empty_like(tensor) for key, tensor in wanted.items()}
    load(read, storage_reader=VersionReader(version), no_dist=True)
    assert_same_bits(read, wanted)


def test_a_version_of_another_model_is_refused(tmp_path: Path):
    """By the first tensor that differs, before anything is loaded."""
    version = save(tmp_path, random_layout(random.Random(1)), logical_state(0))
    program = expand(one_stage({0: 1}, 1, 1), 0)
    with pytest.raises(OtherModel, match="another model"):
        load_holding(MODEL, CONFIG, program, version)


def test_the_list_shows_what_was_saved(tmp_path: Path):
    """The newest first, with its manifest."""
    for step in (3, 11, 7):
        save(tmp_path, random_layout(random.Random(step)), logical_state(0), step=step)
    found = list_versions(tmp_path)
    assert [each.version.step for each in found] == [11, 7, 3]
    assert all(each.manifest is not None for each in found)
    assert found[0].manifest is not None
    assert found[0].manifest.position == POSITION


def test_a_version_can_be_completed_again(tmp_path: Path):
    """By a coordinator that took over: what is complete stays, what is half-way is done anew."""
    plan = random_layout(random.Random(5))
    version = save(tmp_path, plan, logical_state(1))
    marker = (version / "complete").read_bytes()
    manifest = list_versions(tmp_path)[0].manifest
    assert manifest is not None
    complete(tmp_path, version.name, manifest)
    assert (version / "complete").read_bytes() == marker
    (version / "complete").rename(version / "complete.new")
    (version / "manifest.json").write_bytes(b"half of it")
    complete(tmp_path, version.name, manifest)
    assert (version / "complete").read_bytes() == marker
    assert_loads(version, random_layout(random.Random(7)), 1)
