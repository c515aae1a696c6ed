"""Documents that a plan was priced with, for those who price it again."""

from __future__ import annotations

import sys
from pathlib import Path

from resihp.cli.plan_files import write_text

__all__ = ["tell_documents"]


def tell_documents(documents: int, tokens: int, output: str | None) -> None:
    """Say what a micro-batch of `tokens` was taken to hold, where that is not one document.

    Beside the plan in the file `output` goes one that `--lengths` takes.
    """
    if documents == 1:
        return
    length, rest = divmod(tokens, documents)
    listed = [length] * documents + [rest] * (rest > 0)
    said = f"a micro-batch holds {documents} documents of {length} tokens"
    if output is None:
        print(f"{said}; simulate and adapt take that as --lengths", file=sys.stderr)
        return
    path = str(Path(output).with_suffix(".lengths"))
    write_text(path, f"{listed}\n")
    print(f"{said}; for simulate and adapt: --lengths {path}", file=sys.stderr)
