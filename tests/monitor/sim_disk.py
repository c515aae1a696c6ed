"""Where the ranks of a simulated cluster save: parts, and versions that are complete."""

from __future__ import annotations

from resihp.checkpoint.manifest import Manifest
from resihp.monitor.checkpoints import SavedVersion, SavePlace, saved_version

RUN = "run"


class VersionDisk:
    """Seen by all nodes. AssertionError where two saves meet."""

    def __init__(self) -> None:
        self._parts: set[tuple[str, int]] = set()
        self.versions: list[SavedVersion] = []
        """Complete, the newest first."""

    def place(self) -> SavePlace:
        """As a coordinator that begins finds it."""
        return SavePlace("/d", RUN, tuple(self.versions), ())

    def begin(self, name: str, rank: int) -> None:
        """`rank` makes the file of its part."""
        assert (name, rank) not in self._parts, f"part of rank {rank} of {name} is there already"
        self._parts.add((name, rank))

    def complete(self, name: str, manifest: Manifest) -> None:
        """All parts are there, and now the marker too."""
        missing = [each.rank for each in manifest.parts if (name, each.rank) not in self._parts]
        assert not missing, f"no parts of ranks {missing}"
        self.versions.insert(0, saved_version(name, manifest))
        self.versions.sort(reverse=True, key=lambda each: each.step)

    def drop(self, name: str) -> None:
        """A version that will not be complete."""
        assert all(each.name != name for each in self.versions), "a complete version was dropped"
        self._parts = {part for part in self._parts if part[0] != name}
