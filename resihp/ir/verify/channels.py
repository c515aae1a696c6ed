"""Both ends of a channel name its messages in the same order.

A channel is one direction between two neighbouring groups; it carries one kind of tensor, so all
rank pairs under it see the same order.
"""

from __future__ import annotations

from itertools import pairwise

from resihp.ir.diagnostics import Related
from resihp.ir.lanes import name_of
from resihp.ir.source import Parsed
from resihp.ir.verify.dataflow import Matched
from resihp.ir.verify.findings import Findings

__all__ = ["check_channels"]


def check_channels(parsed: Parsed, matched: list[Matched], findings: Findings) -> None:
    """RHP412, at the first receive of each channel that takes another's message."""
    for channel in matched:
        in_send_order = sorted(channel.pairs, key=lambda pair: pair[1])
        for before, after in pairwise(in_send_order):
            if after[2] < before[2]:
                _report(parsed, channel, before, after, findings)
                break


def _report(
    parsed: Parsed,
    channel: Matched,
    before: tuple[object, int, int],
    after: tuple[object, int, int],
    findings: Findings,
) -> None:
    sender, receiver = channel.sender, channel.receiver
    sends, recvs = parsed.streams[sender.stream], parsed.streams[receiver.stream]

    def spell(index: int) -> str:
        micro_batch = receiver.micro_batches[index]
        assert micro_batch is not None
        return name_of(micro_batch, receiver.name.replica)

    recv, send = channel.edge.recv.mnemonic, channel.edge.send.mnemonic
    first, second = spell(before[2]), spell(after[2])
    findings.add(
        "RHP412",
        recvs.span(after[2]),
        f"`{recv} {second}` would take the {channel.edge.what} of `{send} {first}`: "
        f"{sender.name} sends {first} before {second}, {receiver.name} receives {second} first",
        related=(
            Related(f"`{send} {first}` is here", sends.span(before[1])),
            Related(f"`{send} {second}` is here", sends.span(after[1])),
            Related(f"`{recv} {first}` is here", recvs.span(before[2])),
        ),
        replica=receiver.name.replica,
    )
