"""A process that writes snapshots without end, to be killed: `snapshot_writer.py FOLDER`.

For each line of input it forks a writer and prints its process number. A writer of version v
fills every tensor with v.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import count
from pathlib import Path

import torch

from resihp.executor.snapshots.slots import Slots
from resihp.executor.snapshots.writer import manifest_of

SHAPES = {"a": (300, 700), "b": (5,), "empty": (0, 3), "c": (64, 1000)}


def write_for_ever(folder: Path) -> None:
    slots = Slots(folder, 3)
    keep = None
    for version in count(1):
        kinds = [
            {name: torch.full(shape, float(version)) for name, shape in SHAPES.items()}
            for _ in range(3)
        ]
        slots.write(manifest_of(3, 7, version, version, kinds[0]), kinds, keep)
        keep = 7, version


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the killed ones are nobody's to wait for
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            write_for_ever(Path(sys.argv[1]))
        print(pid, flush=True)


if __name__ == "__main__":
    main()
