"""The device that a job file names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.executor.device.cpu import CpuDevice
from resihp.executor.device.cuda import CudaDevice

if TYPE_CHECKING:
    from resihp.config import JobConfig
    from resihp.executor.device.interface import Device

__all__ = ["device_of"]


def device_of(job: JobConfig, rank: int, *, timeout_s: float, host: str) -> Device:
    """What `[device] kind` says, for `rank` on the node `host`.

    ConfigError where this host has no such device. Emulated ones have no tensors, so none is made.
    """
    match job.device.kind:
        case "cpu":
            return CpuDevice(job.job.name, rank, timeout_s=timeout_s, host=host)
        case "cuda":
            return CudaDevice(
                job.job.name,
                rank,
                timeout_s=timeout_s,
                num_local_ranks=job.parallel.world // max(1, len(job.network.nodes)),
                host=host,
            )
        case "emulated":
            raise AssertionError("emulated devices have a backend of their own")
