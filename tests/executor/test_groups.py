"""Process groups over real processes: their results, and above all how to leave them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import FAR_S, Team

from resihp.errors import CommError
from resihp.executor.groups import Communicator, GroupFactory
from resihp.wire.address import address_of


@pytest.fixture
def team() -> Iterator[Team]:
    with Team(3) as team:
        yield team


def outcomes(team: Team, ranks: list[int]) -> list[str]:
    """How the pending collectives ended, and that they did long before their own time-out."""
    start_s = time.monotonic()
    ended = team.ask_all(ranks, "outcome")
    assert time.monotonic() - start_s < FAR_S / 2
    return ended


# --- results


def test_collectives_give_every_member_its_part(team: Team):
    """Sums, parts in member order, and pieces of unequal size from everybody."""
    ranks = [0, 1, 2]
    team.build(ranks)
    for rank in ranks:
        team.tell(rank, "all_reduce", "world", [1.0 * rank, 10.0])
    assert [team.answer(rank) for rank in ranks] == [[3.0, 30.0]] * 3

    for rank in ranks:
        team.tell(rank, "all_gather", "world", [[rank, 0.5], [0.0, -rank]])
    whole = [[[rank, 0.5], [0.0, -rank]] for rank in ranks]
    assert [team.answer(rank) for rank in ranks] == [whole] * 3

    # Rank r sends j + 1 copies of 10 r + j to rank j, nothing where they add up to 3.
    def part(source: int, target: int) -> list[float]:
        return [] if source + target == 3 else [10.0 * source + target] * (target + 1)

    for rank in ranks:
        sizes = [len(part(source, rank)) for source in ranks]
        team.tell(rank, "all_to_all", "world", [part(rank, target) for target in ranks], sizes)
    for rank in ranks:
        assert team.answer(rank) == [part(source, rank) for source in ranks]


def test_members_are_in_the_order_of_the_group(team: Team):
    """Not of their ranks; and two groups of one generation do not mix."""
    groups = {"up": [0, 1, 2], "down": [2, 1, 0]}
    team.build([0, 1, 2], names=groups)
    for name, order in groups.items():
        for rank in (0, 1, 2):
            team.tell(rank, "all_gather", name, [[float(rank)]])
        assert [team.answer(rank) for rank in (0, 1, 2)] == [[[[r]] for r in order]] * 3


def test_a_late_member_is_waited_for(team: Team):
    """Longer than one slice of the wait."""
    team.build([0, 1, 2])
    team.ask_all([0, 1], "begin", "world")
    time.sleep(0.12)  # what is tested is that others wait while nothing happens
    assert team.ask_all([0, 1], "is_pending") == [True, True]
    team.ask(2, "begin", "world")
    assert outcomes(team, [0, 1, 2]) == ["done"] * 3


def test_a_group_of_one_needs_nobody():
    """No process, no store: results are what was given."""
    alone = Communicator(None, [7], 0)
    tensor = torch.arange(3.0)
    alone.all_reduce_(tensor)
    assert tensor.tolist() == [0, 1, 2]
    assert alone.all_gather(tensor).tolist() == [[0, 1, 2]]
    assert [part.tolist() for part in alone.all_to_all([tensor], [3])] == [[0, 1, 2]]
    assert alone.degree == 1
    alone.abort()
    alone.release()


class _LateWork:
    """A collective that ends right after a slice of its wait, well or not."""

    def __init__(self, error: str | None) -> None:
        self._error = error
        self._slices = 0

    def wait(self, timeout: object = None) -> bool:
        self._slices += 1
        if timeout is not None and self._slices < 3:
            raise RuntimeError("Operation timed out!")
        if self._error is not None:
            raise RuntimeError(self._error)
        return True

    def is_completed(self) -> bool:
        return self._slices == 2  # between the second time-out and the look at it


def test_a_collective_that_ends_just_after_a_slice_has_not_failed():
    """Its own end counts, not that the wait for it was cut short."""
    group = Communicator(None, [0, 1], 0)
    group._wait(lambda: _LateWork(None))
    with pytest.raises(CommError, match="ranks \\[0, 1\\] broke: Connection reset"):
        group._wait(lambda: _LateWork("Connection reset"))


# --- leaving


@pytest.mark.parametrize("what", ["all_reduce", "all_gather", "all_to_all"])
def test_abort_wakes_a_pending_collective(team: Team, what: str):
    """On every member that aborts, though the missing member never came."""
    team.build([0, 1, 2])
    team.ask_all([0, 1], "begin", "world", what)
    team.ask_all([0, 1], "abort", "world")
    assert outcomes(team, [0, 1]) == ["CommError"] * 2


def test_abort_wakes_a_collective_with_a_stopped_member(team: Team):
    """[T2] Its sockets are open and silent: no error would ever come from them."""
    team.build([0, 1, 2])
    team.ask_all([0, 1, 2], "begin", "world")
    assert outcomes(team, [0, 1, 2]) == ["done"] * 3
    team.stop(2)
    team.ask_all([0, 1], "begin", "world")
    team.ask_all([0, 1], "abort", "world")
    assert outcomes(team, [0, 1]) == ["CommError"] * 2


def test_abort_wakes_the_survivors_of_a_killed_member(team: Team):
    """Also those that do not talk to it in this collective."""
    team.build([0, 1, 2])
    team.ask_all([0, 1], "begin", "world")
    team.kill(2)
    team.ask_all([0, 1], "abort", "world")
    assert outcomes(team, [0, 1]) == ["CommError"] * 2


def test_abort_of_an_idle_group_does_no_harm(team: Team):
    """Any number of times; a collective that comes later ends at once."""
    team.build([0, 1, 2])
    for _ in range(3):
        team.ask_all([0, 1, 2], "abort", "world")
    team.ask_all([0, 1], "begin", "world")
    assert outcomes(team, [0, 1]) == ["CommError"] * 2
    team.ask_all([0, 1, 2], "release")


def test_the_groups_of_the_next_generation_work(team: Team):
    """With the survivors of a kill, over a store of its own, while the old groups are dropped."""
    team.build([0, 1, 2])
    for generation, dead, left in ((2, 1, [0, 2]), (3, 0, [2])):
        team.ask_all(left, "begin", "world")
        team.kill(dead)
        team.ask_all(left, "abort", "world")
        assert set(outcomes(team, left)) <= {"CommError"}
        team.ask_all(left, "release")
        team.build(left, generation)
        assert team.ask_all(left, "all_reduce", "world", [1.0]) == [[float(len(left))]] * len(left)


def test_one_store_serves_generations_apart(team: Team):
    """The same names, another generation: keys of the old one are not found."""
    store = team.build([0, 1, 2], generation=1)
    for generation, ranks in ((2, [0, 1, 2]), (3, [0, 2])):
        team.ask_all(ranks, "join", store, generation, FAR_S, {"world": ranks})
        assert team.ask_all(ranks, "all_reduce", "world", [1.0])[0] == [float(len(ranks))]


# --- building


def test_a_member_that_does_not_come_is_an_error(team: Team):
    """[T4] After the time-out, which names the group."""
    store = team.ask(0, "host", 1.0)
    team.tell(0, "join", store, 1, 1.0, {"world": [0, 1]})
    with pytest.raises(CommError, match="group world over ranks \\[0, 1\\] failed"):
        team.answer(0)


def test_a_store_that_is_gone_is_an_error():
    """After the time-out."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        store = address_of(server)
    with pytest.raises(CommError, match="the store of generation 5 is gone"):
        GroupFactory(store, 5, 0, connect_s=0.5, collective_s=0.5)


def listeners(port: int) -> list[str]:
    """Addresses that listen on `port`, as the kernel prints them."""
    found: list[str] = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address, _, number = local.partition(":")
            if int(number, 16) == port and state == "0A":
                found.append(address)
    return found


def test_the_store_listens_on_loopback_only(team: Team):
    """[S4] Left to itself it would listen on every interface."""
    store = team.ask(0, "host", FAR_S)
    assert listeners(store.port) == ["0100007F"]


def test_the_end_of_the_store_frees_those_who_wait_on_it(team: Team):
    """Its host lets it go when it leaves the generation; the others must not wait in vain."""
    store = team.ask(0, "host", 4 * FAR_S)
    team.tell(1, "join", store, 1, 4 * FAR_S, {"pair": [0, 1], "world": [0, 1, 2]})
    team.ask(0, "join", store, 1, 4 * FAR_S, {"pair": [0, 1]})
    team.ask(0, "close_store")
    start_s = time.monotonic()
    with pytest.raises(CommError):
        team.answer(1)
    assert time.monotonic() - start_s < FAR_S
