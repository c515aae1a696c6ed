"""What is lost and slow in the words of a command line, as `Health`.

| `fail` | `rank=5`, `rank=5,8..11`, `node=2`  | these ranks are gone |
| `slow` | `rank=12:0.5`, `node=2:0.9`          | their share of a healthy speed |
| `link` | `3-4:x2`, `3-4:+30ms`, `3-4:x2+5ms`  | transfers between two nodes take longer |

Of two statements about the same rank or the same two nodes the later one counts; a rank that is
gone is not slow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from resihp.compiler.cluster import Cluster, Health, SlowLink
from resihp.errors import UserError

__all__ = ["MAX_FILE_BYTES", "Incident", "Incidents", "health_of", "incidents_in"]

MAX_FILE_BYTES = 1 << 22
"""Longest file of incidents."""

_INTERVAL = r"[0-9]{1,9}(?:\.\.[0-9]{1,9})?"
_PLACE = re.compile(rf"(rank|node)=({_INTERVAL}(?:,{_INTERVAL})*)")
_FACTOR = r"x([0-9]+(?:\.[0-9]+)?)"
_DELAY = r"\+([0-9]+(?:\.[0-9]+)?)(s|ms|us)"
_LINK = re.compile(rf"([0-9]{{1,9}})-([0-9]{{1,9}}):(?:{_FACTOR})?(?:{_DELAY})?")
_UNIT_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_MAX_FACTOR = 1e6
_MAX_DELAY_S = 3600.0


class Incident(NamedTuple):
    """One statement, and how errors name its place."""

    where: str
    """`--fail`, or `health.toml: fail`."""
    text: str


class Incidents(NamedTuple):
    """All statements of each kind, in order."""

    fail: Sequence[Incident] = ()
    slow: Sequence[Incident] = ()
    link: Sequence[Incident] = ()


def health_of(incidents: Incidents, cluster: Cluster, num_ranks: int) -> Health:
    """The state that `incidents` leave a job of `num_ranks` ranks on `cluster` in.

    Raises UserError for words that cannot be read, and ranks or nodes that the job does not use.
    """
    job = _Job(cluster.cluster.gpus_per_node, num_ranks)
    lost = frozenset(rank for said in incidents.fail for rank in _ranks(said, said.text, job))
    speed: dict[int, float] = {}
    for said in incidents.slow:
        place, _, share = said.text.partition(":")
        value = _speed(said, share)
        speed.update(dict.fromkeys(_ranks(said, place, job), value))
    links = {frozenset(link.nodes): link for link in (_link(s, job) for s in incidents.link)}
    slow = {rank: value for rank, value in speed.items() if rank not in lost and value < 1.0}
    return Health(lost=lost, speed=slow, links=tuple(links.values()))


_KINDS = Incidents._fields


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`fail = ["rank=5"]` and so on, in TOML or JSON."""

    fail: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    link: tuple[str, ...] = ()


def incidents_in(data: bytes, path: str) -> Incidents:
    """Those that a file holds: JSON if its `path` ends so, else TOML. Raises UserError."""
    decode = msgspec.json.decode if path.lower().endswith(".json") else msgspec.toml.decode
    try:
        words = decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: no file of incidents: {error}") from None
    return Incidents(
        *([Incident(f"{path}: {kind}", text) for text in getattr(words, kind)] for kind in _KINDS)
    )


class _Job(NamedTuple):
    gpus_per_node: int
    num_ranks: int

    @property
    def num_nodes(self) -> int:
        return -(-self.num_ranks // self.gpus_per_node)


def _ranks(said: Incident, place: str, job: _Job) -> Iterator[int]:
    """The ranks of `rank=...` or `node=...`."""
    found = _PLACE.fullmatch(place)
    if found is None:
        wanted = "rank=5, rank=5,8..11 or node=2"
        if said.text != place or "slow" in said.where:
            wanted = "rank=12:0.5 or node=2:0.9"
        raise _wrong(said, f"wanted is {wanted}")
    kind, listed = found.groups()
    size = job.num_ranks if kind == "rank" else job.num_nodes
    for interval in listed.split(","):
        first, _, last = interval.partition("..")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers:
            raise _wrong(said, f"{interval} runs backwards; nearest valid: {last}..{first}")
        if numbers[-1] >= size:
            raise _wrong(said, f"the job has {kind}s 0..{size - 1}; nearest valid: {size - 1}")
        if kind == "rank":
            yield from numbers
        else:
            ends = numbers[0] * job.gpus_per_node, (numbers[-1] + 1) * job.gpus_per_node
            yield from range(ends[0], min(ends[1], job.num_ranks))


def _speed(said: Incident, share: str) -> float:
    try:
        value = float(share)
    except ValueError:
        raise _wrong(said, "wanted is a share of a healthy speed, as in rank=12:0.5") from None
    if value <= 0.0:
        raise _wrong(said, "a rank without any speed is lost: use --fail")
    if not value <= 1.0:
        raise _wrong(said, "1 is a healthy speed, 0.5 half of it; nearest valid: 1")
    return value


def _link(said: Incident, job: _Job) -> SlowLink:
    found = _LINK.fullmatch(said.text)
    if found is None or said.text.endswith(":"):
        raise _wrong(said, "wanted is NODE-NODE and how much slower: 3-4:x2 or 3-4:+30ms")
    one, other = int(found[1]), int(found[2])
    if one == other:
        raise _wrong(said, f"a link is between two nodes, not inside node {one}")
    if max(one, other) >= job.num_nodes:
        last = job.num_nodes - 1
        raise _wrong(said, f"the job has nodes 0..{last}; nearest valid: {last}")
    factor = float(found[3] or 1.0)
    delay_s = float(found[4] or 0.0) * _UNIT_S[found[5] or "s"]
    if not 1.0 <= factor <= _MAX_FACTOR:
        raise _wrong(said, f"a slow link takes 1 to {_MAX_FACTOR:.0f} times as long")
    if delay_s > _MAX_DELAY_S:
        raise _wrong(said, f"the delay is longer than {_MAX_DELAY_S:.0f}s")
    return SlowLink(nodes=(one, other), factor=factor, delay_s=delay_s)


def _wrong(said: Incident, why: str) -> UserError:
    return UserError(f"{said.where} {said.text}: {why}")
