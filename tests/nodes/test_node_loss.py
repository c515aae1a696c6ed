"""A job on three nodes that loses one of them, or hears nothing of it: exactly one side goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Job, tagged, wait_gone
from netns import Network, network, processes_in, why_no_relay, why_not
from node_jobs import NodeRun, network_section, running_on

from resihp.monitor.listening import job_processes, listeners_of

pytestmark = pytest.mark.timeout(400, func_only=False)

STEPS = 24


def job_on(net: Network, folder: Path) -> Job:
    """A replica on each node. Emulated: control plane and transport are real, and start fast."""
    sections = network_section(net, folder) + '[device]\nkind = "emulated"\n'
    return Job(steps=STEPS, tp=1, pp=2, dp=len(net.spaces), tokens=1024, sections=sections)


@pytest.fixture
def net():
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with network(3) as made:
        yield made


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Emulated jobs read no data, but the file must name some."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "text").write_text("text " * 1000)
    return folder


def assert_all_steps_once(run: NodeRun) -> None:
    assert [row["step"] for row in run.rows("ledger")] == list(range(STEPS)), run.text


def assert_one_history(run: NodeRun) -> None:
    """Never two plans of one generation."""
    generations = [row["generation"] for row in run.events("plan")]
    assert len(generations) == len(set(generations)), generations


def assert_own_addresses_only(net: Network, run: NodeRun) -> None:
    """Of our own processes; torchrun's store, on the first node, is its own affair."""
    for node, space in enumerate(net.spaces):
        ours = processes_in(space) - {run.agents[node].pid}
        hosts = {listener.address.host for listener in listeners_of(ours)}
        assert hosts == {net.addresses[node]}


def executors_in(net: Network, node: int) -> set[int]:
    here = processes_in(net.spaces[node])
    return {each.pid for each in job_processes() if each.module == "resihp.executor"} & here


@pytest.mark.parametrize("node", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_the_loss_of_a_node(node: int, net: Network, tmp_path: Path, corpus: Path):
    """[T8] [S4] Agent, monitor, supervisors and executors at one moment; also of the node whose
    monitor started the coordinator. Before, nothing listened but at its node's address."""
    with running_on(net, job_on(net, tmp_path), tmp_path, corpus) as run:
        run.wait_for_step(5)
        assert_own_addresses_only(net, run)
        run.lose(node)
        left = [other for other in range(3) if other != node]
        codes = {other: run.wait_for_end(other) for other in left}
        assert codes == dict.fromkeys(left, 0), run.text
        assert_all_steps_once(run)
        assert_one_history(run)
        assert not wait_gone(tagged(str(tmp_path)))


def test_a_partition_in_both_directions(net: Network, tmp_path: Path, corpus: Path):
    """[T9] Node 0, with the coordinator, is cut off with every socket open: the other two go on,
    and its own ranks are killed by its monitor."""
    with running_on(net, job_on(net, tmp_path), tmp_path, corpus) as run:
        run.wait_for_step(5)
        net.part([0], [1, 2])
        run.wait_for_finish()
        run.wait_for(lambda: not executors_in(net, 0), "the fence of node 0")
        assert_all_steps_once(run)
        assert_one_history(run)


@pytest.mark.nightly
def test_a_partition_in_one_direction(net: Network, tmp_path: Path, corpus: Path):
    """[T9] What node 0 sends to node 2 is lost, the other direction works: one history of
    steps, and all of them."""
    with running_on(net, job_on(net, tmp_path), tmp_path, corpus) as run:
        run.wait_for_step(5)
        net.cut(0, 2)
        run.wait_for_finish()
        assert_all_steps_once(run)
        assert_one_history(run)


@pytest.mark.nightly
def test_links_that_are_slow_and_lose_packets_cost_nobody(
    net: Network, tmp_path: Path, corpus: Path
):
    """[T9] All that nodes say to each other is 20 ms late, and a packet in a hundred is lost."""
    if (reason := why_no_relay()) is not None:
        pytest.skip(reason)
    for node in range(3):
        net.disturb(node, delay_s=0.02, loss=0.01, seed=node)
    with running_on(net, job_on(net, tmp_path), tmp_path, corpus) as run:
        codes = [run.wait_for_end(node) for node in range(3)]
        assert codes == [0, 0, 0], run.text
        assert_all_steps_once(run)
        assert not run.events("rank_lost") + run.events("evict"), run.text
        assert len(run.events("plan")) == 1
