"""Lines of processes that live longer than whoever reads them."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from resihp.wire.console import complain, say
say("first")
sys.stdin.readline()
for number in range(3):
    say("x" * 100_000)
    complain("x" * 100_000)
sys.stdout.flush()
sys.exit(7)
"""


def test_a_reader_that_left_ends_nobody() -> None:
    """Both pipes are closed: the lines are lost, the process goes on to its own end."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "first\n"
    process.stdout.close()
    process.stderr.close()
    process.stdin.write("\n")
    process.stdin.close()
    assert process.wait(30) == 7


def test_a_full_disk_ends_nobody() -> None:
    """What a log on a full disk refuses is dropped."""
    with open("/dev/full", "w", encoding="ascii") as full:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.replace('say("first")', "")],
            input="\n",
            stdout=full,
            stderr=full,
            text=True,
            timeout=30,
            check=False,
        )
    assert done.returncode == 7
