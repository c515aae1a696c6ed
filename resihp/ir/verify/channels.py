"""Both ends of a channel name its messages in the same order.

A channel is one direction between two groups. It carries all that one sends to the other,
activations and gradients of all stages, and all rank pairs under it see the same order.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from resihp.ir.lanes import BY_TRANSFER
from resihp.ir.model import GroupName
from resihp.ir.verify.dataflow import Matched
from resihp.ir.verify.report import Report

__all__ = ["check_channels"]


def check_channels(matched: list[Matched], report: Report) -> None:
    """RHP412, at the first receive of each channel that takes another's message."""
    channels: dict[tuple[GroupName, GroupName], list[Matched]] = defaultdict(list)
    for transfer in matched:
        channels[transfer.sender.name, transfer.receiver.name].append(transfer)
    for channel in channels.values():
        channel.sort(key=lambda transfer: transfer.send)
        for before, after in pairwise(channel):
            if after.recv < before.recv:
                _report(before, after, report)
                break


def _report(before: Matched, after: Matched, report: Report) -> None:
    sender, receiver = before.sender, before.receiver
    first, second = sender.text(before.send), sender.text(after.send)
    what = BY_TRANSFER[sender.body[before.send].op].what
    report.add(
        "RHP412",
        receiver,
        after.recv,
        f"{receiver.text(after.recv)} would take the {what} of {first}: {sender.name} posts it "
        f"before {second}, {receiver.name} receives it after",
        (
            report.here(sender, before.send, of=False),
            report.here(sender, after.send, of=False),
            report.here(receiver, before.recv, of=False),
        ),
    )
