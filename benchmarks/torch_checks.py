"""torch's checks of pipeline schedules, and ours, on the same schedules."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from result_file import Row
from torch.distributed.pipelining import schedules as torch_schedules

from resihp.errors import PlanSyntaxError
from resihp.ir.arrays import arrays_of
from resihp.ir.torch_csv import read_torch_csv
from resihp.ir.verify import verify

Rows = dict[int, list[Any]]
"""torch's actions by rank."""

_SCHEDULES = (
    ("Interleaved1F1B", 16, 4, 128),
    ("ZBVZeroBubble", 32, 2, 128),
    ("DualPipeV", 16, 2, 128),
)
"""Name, ranks, stages per rank, micro-batches."""
_UNKNOWN_TO_SIMULATOR = ("UNSHARD", "RESHARD", "REDUCE_GRAD")

_torch: Any = torch_schedules


def _schedule(name: str, num_ranks: int, per_rank: int, num_microbatches: int) -> Any:
    stages: Any = [
        SimpleNamespace(
            num_stages=num_ranks * per_rank,
            group_size=num_ranks,
            group_rank=0,
            submod=None,
            stage_index_to_group_rank={},
        )
        for _ in range(per_rank)
    ]
    return _torch.get_schedule_class(name)(stages, num_microbatches)


def _single(rows: Rows) -> Rows:
    """Without idle slots, and pairs as one after the other: the simulator knows no pairs."""
    return {
        rank: [part for one in row if one is not None for part in one.sub_actions or (one,)]
        for rank, row in rows.items()
    }


def _lower(rows: Rows, rank_of: dict[int, int]) -> Rows:
    """With sends and receives. torch's function empties what it is given."""
    rows = {rank: list(row) for rank, row in rows.items()}
    return _torch._add_send_recv(rows, rank_of.__getitem__, len(rank_of))


def speed_rows(timed: Callable[..., tuple[float, Any]]) -> dict[str, Row]:
    """Times of torch's checks, and of ours, per schedule."""
    return {
        f"{name} {num_ranks}x{per_rank}, {count} micro-batches": _speed_row(
            timed, name, num_ranks, per_rank, count
        )
        for name, num_ranks, per_rank, count in _SCHEDULES
    }


def _speed_row(
    timed: Callable[..., tuple[float, Any]], name: str, num_ranks: int, per_rank: int, count: int
) -> Row:
    made = _schedule(name, num_ranks, per_rank, count)
    num_stages = num_ranks * per_rank
    validate_s, rank_of = timed(
        lambda: _torch._validate_schedule(made.pipeline_order, num_ranks, num_stages, count)
    )
    singles = _single(made.pipeline_order)
    lower_s, lowered = timed(lambda: _lower(singles, rank_of), 3)
    simulate_s, _ = timed(
        lambda: _torch._simulate_comms_compute(lowered, rank_of.__getitem__, num_stages), 3
    )
    with tempfile.TemporaryDirectory() as folder:
        made._dump_csv(Path(folder) / "plan.csv", format="compute_comms")
        text = (Path(folder) / "plan.csv").read_text()
    read_s, parsed = timed(lambda: read_torch_csv(text), 2)
    arrays_s, _ = timed(lambda: arrays_of(parsed.plan))
    assert not verify(parsed)
    verify_s, _ = timed(lambda: verify(parsed))
    checks_s = validate_s + simulate_s
    return {
        "torch: instructions": sum(map(len, lowered.values())),
        "validate": 1e3 * validate_s,
        "lower": 1e3 * lower_s,
        "simulate": 1e3 * simulate_s,
        "ours: instructions": sum(len(stream.body) for stream in parsed.plan.streams),
        "read": 1e3 * read_s,
        "arrays": 1e3 * arrays_s,
        "verify": 1e3 * verify_s,
        "validate + simulate : verify": f"{checks_s / verify_s:.0f}x",
        "with lower": f"{(checks_s + lower_s) / verify_s:.0f}x",
        "with lower and arrays": f"{(checks_s + lower_s) / (verify_s + arrays_s):.0f}x",
    }


_BROKEN = {
    "right (compute)": ("compute", "0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"),
    "right (with communication)": (
        "comms",
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD",
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD",
    ),
    "text after an action": ("compute", "0F0xyz,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"),
    "no micro-batch": ("compute", "0F,0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"),
    "micro-batch 7 of 2": ("compute", "0F0,0F7,0B0,0B7", "1F0,1B0,1F7,1B7"),
    "forward twice": ("compute", "0F0,0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"),
    "backward twice": ("compute", "0F0,0F1,0B0,0B0,0B1", "1F0,1B0,1F1,1B1"),
    "backward before forward": ("compute", "0F0,0B1,0F1,0B0", "1F0,1B0,1F1,1B1"),
    "weight gradient missing": ("compute", "0F0,0F1,0I0,0W0,0I1", "1F0,1B0,1F1,1B1"),
    "ranks wait for each other": ("compute", "0F0,0B0,0F1,0B1", "1F1,1B1,1F0,1B0"),
    "receives in another order than sends": (
        "comms",
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD",
        "1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD",
    ),
    "send missing": (
        "comms",
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD",
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1REDUCE_GRAD",
    ),
    "receive missing": (
        "comms",
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0B1,0REDUCE_GRAD",
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD",
    ),
    "message twice": (
        "comms",
        "0F0,0SEND_F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD",
        "1RECV_F0,1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD",
    ),
    "sent before it is made": (
        "comms",
        "0SEND_F0,0F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD",
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD",
    ),
    "gradient awaited before the activation goes": (
        "comms",
        "0F0,0RECV_B0,0B0,0SEND_F0,0F1,0SEND_F1,0RECV_B1,0B1,0REDUCE_GRAD",
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD",
    ),
    "last stage runs backward first": (
        "comms",
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD",
        "1RECV_F0,1B0,1F0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD",
    ),
    "gradients never reduced": (
        "comms",
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD",
    ),
    "gradients reduced too early": (
        "comms",
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0REDUCE_GRAD,0RECV_B1,0B1",
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD",
    ),
    "parameters given back before use": (
        "comms",
        "0UNSHARD,0F0,0RESHARD,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD",
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD",
    ),
}
"""Two ranks, two stages, two micro-batches: (kind of file, row 0, row 1)."""


def broken_rows() -> dict[str, Row]:
    """What torch and we say of small schedules, nearly all of them wrong."""
    return {
        label: {"file": kind, "torch": _torch_says(kind, rows), "ours": _ours(kind, rows)}
        for label, (kind, *rows) in _BROKEN.items()
    }


def _torch_says(kind: str, texts: list[str]) -> str:
    """All that torch can check: cells, schedule, lowering where it lowers, simulation."""
    try:
        rows: Rows = {
            rank: [_torch._Action.from_str(cell) for cell in text.split(",")]
            for rank, text in enumerate(texts)
        }
        rank_of = _torch._validate_schedule(rows, 2, 2, 2)
        known = {
            rank: [one for one in row if one.computation_type.name not in _UNKNOWN_TO_SIMULATOR]
            for rank, row in rows.items()
        }
        with contextlib.redirect_stdout(io.StringIO()):
            lowered = known if kind == "comms" else _lower(known, rank_of)
            _torch._simulate_comms_compute(lowered, rank_of.__getitem__, 2)
    except Exception as error:  # torch raises whatever its code comes across
        message = str(error).strip().split("\n", 1)[0]
        return f"{type(error).__name__}: {message}"[:60]
    return "accepted"


def _ours(kind: str, texts: list[str]) -> str:
    try:
        parsed = read_torch_csv("\n".join(texts), kind=kind, num_microbatches=2)  # type: ignore[arg-type]
    except PlanSyntaxError as error:
        found = error.diagnostics
    else:
        found = tuple(verify(msgspec.structs.replace(parsed)))
    return ", ".join(sorted({finding.code for finding in found})) or "accepted"
