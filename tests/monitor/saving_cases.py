"""A coordinator that has versions saved, and ranks that write them."""

from __future__ import annotations

import msgspec
from coordinator_cases import Desk, job_of

from resihp.checkpoint.manifest import Position
from resihp.checkpoint.versions import version_name
from resihp.config import CheckpointConfig, JobConfig
from resihp.monitor.checkpoints import SavedVersion, SavePlace
from resihp.wire.messages import PartSaved

RUN = "run"
POSITION = Position(dataset="d", seed=0, tokens=64, num_microbatches=4)


def saved(step: int, **changes: object) -> SavedVersion:
    position = msgspec.structs.replace(POSITION, **changes)
    return SavedVersion(step, version_name(step, RUN, 1), step, position, 3 << 20)


def desk_of(*versions: SavedVersion, resume: bool = False, job: JobConfig | None = None) -> Desk:
    """`job` that saves, with versions there already; not started."""
    job = msgspec.structs.replace(
        job or job_of(steps=9), checkpoint=CheckpointConfig(dir="d", every=2, resume=resume)
    )
    return Desk(job, place=SavePlace("/d", RUN, versions, ()))


def part(desk: Desk, step: int, generation: int | None = None) -> PartSaved:
    generation = desk.generation if generation is None else generation
    return PartSaved(
        generation=generation,
        name=version_name(step, RUN, generation),
        version=step,
        updates=step,
        loss=1.0,
        part_bytes=10,
        part_sha256="0" * 64,
        data_bytes=1 << 20,
        stalled_s=0.0,
        took_s=0.1,
    )


def save(desk: Desk, step: int, trouble: str = "") -> str:
    """All write their parts, and the disk completes the version; its name."""
    desk.say_all(part(desk, step))
    name = version_name(step, RUN, desk.generation)
    desk.do(desk.coordinator.completed(name, trouble, [], desk.clock.now_s()))
    return name
