"""Connections between processes: in order, as slow as it comes, broken or cut off at any moment."""

from __future__ import annotations

from typing import Any, Protocol

from sim_time import Process, Timeline, Work


class End(Protocol):
    """A process that holds connections."""

    dead: bool

    def do(self, work: Work) -> None: ...
    def hear(self, wire: Wire, message: Any) -> None: ...
    def hung_up(self, wire: Wire) -> None: ...


class Wire:
    """A connection. What was sent and not received when it breaks is lost."""

    def __init__(self, net: Net, ends: tuple[End, End], nodes: tuple[int, int]) -> None:
        self._net = net
        self.ends = ends
        self.nodes = nodes
        self.is_open = True
        self._last_s = [0.0, 0.0]

    def other(self, end: End) -> End:
        return self.ends[1 - self._side(end)]

    def node_beyond(self, end: End) -> int:
        """The node that the other end is on."""
        return self.nodes[1 - self._side(end)]

    def send(self, sender: End, message: object) -> None:
        """From one of the ends to the other."""
        if self.is_open:
            other = self.other(sender)
            self._pass(sender, lambda: self.is_open and other.hear(self, message))

    def hang_up(self, end: End) -> None:
        """`end` closes it, or died; the other end hears of it if anything gets through."""
        if self.is_open:
            self.is_open = False
            other = self.other(end)
            self._pass(end, lambda: other.hung_up(self))

    def snap(self) -> None:
        """It breaks in the middle: both ends notice."""
        if self.is_open:
            self.is_open = False
            for end in self.ends:
                self._pass(self.other(end), lambda end=end: end.hung_up(self))

    def _pass(self, sender: End, work: Work) -> None:
        side = self._side(sender)
        time = self._net.time
        self._last_s[side] = max(self._last_s[side], time.now_s + self._net.delay(*self.nodes))
        source, target = self.nodes[side], self.nodes[1 - side]
        other = self.other(sender)
        time.at(self._last_s[side], lambda: self._net.arrive(source, target, other, work))

    def _side(self, end: End) -> int:
        return 0 if self.ends[0] is end else 1


class Net:
    """What gets from one node to another. Whatever is cut off arrives when the cut is mended."""

    def __init__(self, time: Timeline) -> None:
        self.time = time
        self._cut: set[tuple[int, int]] = set()
        self._held: dict[tuple[int, int], list[Work]] = {}
        self._slow: dict[int, float] = {}

    def slow_down(self, source: int, scale: float) -> None:
        """Messages from `source` take longer."""
        self._slow[source] = scale

    def delay(self, source: int, target: int) -> float:
        near = 0.2 if source == target else 1.0
        return self.time.delay(near * self._slow.get(source, 1.0))

    def passes(self, source: int, target: int) -> bool:
        return (source, target) not in self._cut

    def cut(self, source: int, target: int) -> None:
        """Nothing gets from `source` to `target` any more; the other direction may work."""
        if source != target:
            self._cut.add((source, target))

    def mend_all(self) -> None:
        held, self._held = self._held, {}
        self._cut.clear()
        for works in held.values():
            for work in works:
                self.time.at(self.time.now_s, work)

    def arrive(self, source: int, target: int, receiver: End | Process, work: Work) -> None:
        """Now, or when the way is open again."""
        if self.passes(source, target):
            receiver.do(work)
        else:
            again = lambda: self.arrive(source, target, receiver, work)  # noqa: E731
            self._held.setdefault((source, target), []).append(again)
