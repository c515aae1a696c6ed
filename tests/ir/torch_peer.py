"""torch's own schedules and its own reader of CSV files, without processes or devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
SINGLE = ("GPipe", "1F1B")
FORMATS: dict[str, Any] = {"compute": "compute_only", "comms": "compute_comms"}


def stages(num_ranks, per_rank) -> list[Any]:
    """What a schedule asks its stages before it runs."""
    return [
        SimpleNamespace(
            num_stages=num_ranks * per_rank,
            group_size=num_ranks,
            group_rank=0,
            submod=None,
            stage_index_to_group_rank={},
        )
        for _ in range(per_rank)
    ]


def schedule(name, num_ranks, per_rank, num_microbatches, *, defer=False):
    """A schedule of torch by the name that users give."""
    made: Any = torch_schedules.get_schedule_class(name)
    if name in SINGLE:
        return made(stages(num_ranks, 1)[0], num_microbatches)
    options = {"defer_pp_recv": True} if defer else {}
    return made(stages(num_ranks, per_rank), num_microbatches, **options)


def dumped(made, kind, folder):
    """The file that torch writes."""
    path = folder / "torch.csv"
    writer: Any = torch_schedules.PipelineScheduleMulti._dump_csv
    if isinstance(made, torch_schedules.PipelineScheduleSingle):
        assert kind == "compute", "torch lowers only schedules of several stages"
        writer(made, path)
    else:
        made._dump_csv(path, format=FORMATS[kind])
    return path.read_bytes().decode()


def load(text, kind, num_microbatches, folder):
    """torch's runtime after it has read, checked and, if need be, lowered the file."""
    path = folder / "ours.csv"
    path.write_bytes(text.encode())
    rows = actions(text)
    (stage,) = stages(len(rows), 1)
    stage.num_stages = len(
        {part.stage_index for row in rows for one in row for part in one.sub_actions or (one,)}
    )
    runtime = torch_schedules._PipelineScheduleRuntime([stage], num_microbatches)
    runtime._load_csv(str(path), format=FORMATS[kind])
    return runtime


def actions(text):
    """The actions of each row by torch's reader of cells, without idle slots."""
    rows = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    cells = [map(torch_schedules._Action.from_str, row.split(",")) for row in rows]
    return [[action for action in row if action is not None] for row in cells]
