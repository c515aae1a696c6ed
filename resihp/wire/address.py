"""Where everything listens in this version."""

from __future__ import annotations

__all__ = ["LOOPBACK"]

LOOPBACK = "127.0.0.1"
