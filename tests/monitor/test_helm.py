"""A coordinator on its way to the lead."""

from __future__ import annotations

from coordinator_cases import SECRET, Desk, job_of

from resihp.monitor.actions import End
from resihp.monitor.coordinator import Coordinator
from resihp.monitor.helm import Helm
from resihp.monitor.planner import Planner
from resihp.monitor.quorum.leadership import Leadership
from resihp.wire.quorum import Accepted, Promise
from resihp.wire.timing import Timing


def test_who_asks_for_the_end_before_it_leads_is_not_forgotten():
    """A monitor that follows says so at once, and once."""
    job = job_of()
    timing = Timing.from_detect_within(job.job.detect_within_s)
    coordinator = Coordinator(job, Planner(job), SECRET, 0.0)
    lead = Leadership((0,), 0, "x", 5, timing, 0.0)
    helm = Helm(coordinator, lead, {0: range(coordinator.world)}, lambda _: [])
    entry = Desk().entry(3, base=2, version=1)
    helm.connected(0, 0.0)
    for is_probe in (True, False):
        helm.answer(0, Promise(term=5, entry=entry, is_probe=is_probe), 0.0)
    assert helm.stop("stopped by SIGTERM", 143, 0.5) == []
    orders = helm.answer(0, Accepted(term=5, generation=3), 1.0)
    (end,) = (each for each in orders if isinstance(each, End))
    assert end == End(143, "stopped by SIGTERM")
