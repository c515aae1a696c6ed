"""Every error that ResiHP raises on purpose, drawn once.

    ResihpError                  base: has a message and the exit code the CLI ends with
    ├── UserError                the user's fault; shown without a traceback (exit 2)
    │   ├── ConfigError          the job file: unknown key, wrong type, impossible degree
    │   ├── CheckpointRefused    a saved version that is torn, damaged, crafted or of another job
    │   │   └── OtherModel       a version, intact, of another model than the job's
    │   ├── PlanSyntaxError      a plan that cannot be read; carries its diagnostics
    │   └── PlanRejected         a plan that the verifier refused; carries its diagnostics (exit 1)
    ├── Deadlock                 an emulated plan in which every rank waits for ever
    ├── NoFeasiblePlan           more is lost than any plan can carry (exit 4)
    ├── WireError                a frame, handshake or connection that must not be trusted
    │   ├── FrameError           too long, truncated or not of the schema
    │   ├── AuthError            wrong secret, job, role or generation
    │   └── PeerLost             the connection between two executors broke
    ├── CommError                a collective broke; a hint that a member is gone
    ├── JournalDamaged           a node's journal is not what was written: its monitor has no vote
    ├── CoordinatorLost          a supervisor is alone: nobody can decide what it does next
    └── GenerationClosed         work of a generation that is over; never shown to the user

Whatever is not in this tree is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resihp.ir.diagnostics import Diagnostic

__all__ = [
    "AuthError",
    "CheckpointRefused",
    "CommError",
    "ConfigError",
    "CoordinatorLost",
    "Deadlock",
    "FrameError",
    "GenerationClosed",
    "JournalDamaged",
    "NoFeasiblePlan",
    "OtherModel",
    "PeerLost",
    "PlanRejected",
    "PlanSyntaxError",
    "ResihpError",
    "UserError",
    "WireError",
]


class ResihpError(Exception):
    """Base of all errors that ResiHP raises on purpose."""

    exit_code: ClassVar[int] = 1


class UserError(ResihpError):
    """The user's fault: a message with what, where and the nearest valid choice."""

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, *, key: str | None = None) -> None:
        """`key` of the job file is to blame: whoever has the file adds the line."""
        super().__init__(message)
        self.key = key


class ConfigError(UserError):
    """The job file holds an unknown key, a wrong type or an impossible value."""


class CheckpointRefused(UserError):
    """A version of the state on disk that is torn, damaged, crafted or of another job."""


class OtherModel(CheckpointRefused):
    """A version, intact, of another model than the job's: no older one fits better."""


class PlanSyntaxError(UserError):
    """The text is no plan; `diagnostics` says where and why."""

    def __init__(self, message: str, diagnostics: Sequence[Diagnostic] = ()) -> None:
        super().__init__(message)
        self.diagnostics = tuple(diagnostics)


class PlanRejected(UserError):
    """The verifier refused the plan; `diagnostics` holds every finding."""

    exit_code: ClassVar[int] = 1

    def __init__(
        self, message: str, diagnostics: Sequence[Diagnostic] = (), *, key: str | None = None
    ) -> None:
        super().__init__(message, key=key)
        self.diagnostics = tuple(diagnostics)


class Deadlock(ResihpError):
    """Nothing can run and no timer is set: every rank of an emulated plan waits for ever."""


class NoFeasiblePlan(ResihpError):
    """More is lost than any plan can carry."""

    exit_code: ClassVar[int] = 4


class WireError(ResihpError):
    """A frame or a handshake that must not be trusted."""


class FrameError(WireError):
    """A frame that is too long, truncated or not of the schema."""


class AuthError(WireError):
    """A peer with the wrong secret, job, role or generation."""


class PeerLost(WireError):
    """The connection to or from another executor broke."""


class CommError(ResihpError):
    """A collective broke: a hint that a member is gone, never a verdict."""


class JournalDamaged(ResihpError):
    """The journal of a node cannot be trusted, so its monitor cannot vote any more."""


class CoordinatorLost(ResihpError):
    """The coordinator is gone, so nobody can decide what this rank does next."""


class GenerationClosed(ResihpError):
    """Work of a generation that is over; it is dropped, never shown to the user."""
