"""What an emulation tells: its time, its error against the simulator, what the host took."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from resihp.executor.emulation.world import Iteration
from resihp.ir.model import Plan

__all__ = ["EmulationReport", "render", "report_of"]


class EmulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the iterations; seconds."""

    devices: str = "emulated"
    time: str
    """`virtual` or `real`."""
    num_ranks: int
    num_instrs: int
    """Of all ranks in one iteration."""
    num_iterations: int
    iteration_s: float
    """In real time as the host saw it, from the common begin to the end of the last rank."""
    device_s: float
    """The same on the clock of the devices."""
    simulated_s: float | None
    """None for a plan that cannot be simulated."""
    cpu_share: float
    """Of a core, while the devices ran; in virtual time 1."""
    cpu_per_instr_s: float
    num_late: int
    """How often the host was more than a millisecond late, in all iterations."""
    worst_late_s: float

    @property
    def error(self) -> float | None:
        """Of the iteration, as a share of the simulated time."""
        return _error(self.iteration_s, self.simulated_s)

    @property
    def device_error(self) -> float | None:
        """Of the devices' clock."""
        return _error(self.device_s, self.simulated_s)


def _error(found_s: float, simulated_s: float | None) -> float | None:
    return None if not simulated_s else found_s / simulated_s - 1


def report_of(
    plan: Plan, iterations: Sequence[Iteration], simulated_s: float | None
) -> EmulationReport:
    """The report of at least one iteration."""
    sizes = {
        (replica, stream.pp): len(stream.body)
        for stream in plan.streams
        for replica in stream.replicas
    }
    num_instrs = sum(len(group.ranks) * sizes[group.replica, group.pp] for group in plan.groups)
    is_virtual = not iterations[0].host_ns
    device_s = median(each.lasts_ns for each in iterations) * 1e-9
    host_s = median(each.host_ns for each in iterations) * 1e-9
    cpu_s = median(each.cpu_ns for each in iterations) * 1e-9
    return EmulationReport(
        time="virtual" if is_virtual else "real",
        num_ranks=len(plan.active_ranks),
        num_instrs=num_instrs,
        num_iterations=len(iterations),
        iteration_s=device_s if is_virtual else host_s,
        device_s=device_s,
        simulated_s=simulated_s,
        cpu_share=1.0 if is_virtual else cpu_s / host_s,
        cpu_per_instr_s=cpu_s / num_instrs,
        num_late=sum(each.num_late for each in iterations),
        worst_late_s=iterations[-1].worst_late_ns * 1e-9,
    )


def render(report: EmulationReport) -> str:
    """The page of text; every line of a figure says that it is emulated."""
    count = report.num_iterations
    many = f", median of {count}" if count > 1 else ""
    lines = [
        f"emulated devices: {report.num_ranks} ranks in this process, {report.time} time; "
        f"nothing is computed",
        f"iteration   {report.iteration_s:.6f} s emulated{many}",
    ]
    if report.time == "real":
        lines.append(f"devices     {report.device_s:.6f} s emulated, by their own clock")
    if report.simulated_s is not None and report.error is not None:
        assert report.device_error is not None
        lines.append(f"simulated   {report.simulated_s:.6f} s")
        devices = f", of the devices' clock {_percent(report.device_error)}"
        error = f"error       {_percent(report.error)}"
        lines.append(error + devices * (report.time == "real"))
    per_instr = f"{1e6 * report.cpu_per_instr_s:.1f} us of a core per instruction"
    share = f"{report.cpu_share:.0%} of a core, " if report.time == "real" else ""
    lines.append(f"host        {share}{per_instr}, {report.num_instrs} instructions")
    if report.time == "real":
        lines.append(
            f"late        {report.num_late} times by more than 1 ms, at worst "
            f"{1e3 * report.worst_late_s:.1f} ms"
        )
    return "\n".join(lines) + "\n"


def _percent(share: float) -> str:
    """With four digits, and no sign of a rounded 0."""
    return f"{round(share, 6) + 0.0:+.4%}"
