"""What the executor's point-to-point backend promises to those who verify plans for it."""

from __future__ import annotations

__all__ = ["EXECUTOR_TRANSPORT"]

EXECUTOR_TRANSPORT = "edge"
"""The transport of `resihp.ir.transport` that plans are proved under.

The executor has one connection per directed rank pair, posts sends without waiting and finds
messages by tag, so it makes at least the progress of `edge`.
"""
