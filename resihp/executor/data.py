"""Real text as byte tokens: the standard library's own sources, or a directory of text files.

A document is one file: BOS, its bytes, EOS. The order of documents is that of their paths, so
every rank that reads the same files has the same dataset, and `digest` says whether it does.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from resihp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["BOS", "EOS", "MIN_VOCAB_SIZE", "STDLIB", "Dataset", "load_dataset", "read_documents"]

BOS = 256
EOS = 257
MIN_VOCAB_SIZE = 258
STDLIB = "stdlib"
"""The source that every Python installation has."""

_SKIPPED_DIRECTORIES = {"__pycache__", "dist-packages", "site-packages"}


class Dataset(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Documents as one run of tokens; document i is `tokens_N[bounds[i]:bounds[i + 1]]`."""

    tokens_N: NDArray[np.uint16]
    bounds: NDArray[np.int64]
    digest: str
    """SHA-256 of tokens and bounds, in hex."""
    num_skipped: int
    """Files that could not be read."""

    @property
    def num_documents(self) -> int:
        """Files that were read."""
        return len(self.bounds) - 1


def load_dataset(source: str = STDLIB) -> Dataset:
    """Read every document of `source`: `STDLIB`, or the path of a directory of text files.

    Of the standard library these are the `.py` files outside site-packages; of a directory all
    regular files, at any depth. Symbolic links are not followed. Raises `ConfigError` if the
    directory does not exist or no document can be read.
    """
    is_stdlib = source == STDLIB
    root = Path(sysconfig.get_paths()["stdlib"]) if is_stdlib else Path(source)
    if not root.is_dir():
        raise ConfigError(
            f"data source {source!r} is no directory: name one, or use {STDLIB!r} for the "
            "standard library's sources"
        )
    paths = sorted(_files(root, suffix=".py" if is_stdlib else ""))
    documents, num_skipped = read_documents(root, paths)
    if not documents:
        raise ConfigError(f"data source {source!r} holds no readable file ({num_skipped} skipped)")
    return _dataset(documents, num_skipped)


def read_documents(root: Path, paths: Iterable[str]) -> tuple[list[bytes], int]:
    """Contents of the files in order, and how many could not be read."""
    documents: list[bytes] = []
    num_skipped = 0
    for path in paths:
        try:
            documents.append((root / path).read_bytes())
        except OSError:
            num_skipped += 1
    return documents, num_skipped


def _files(root: Path, suffix: str) -> Iterator[str]:
    """Paths of the regular files below `root`, relative to it, with forward slashes."""
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in _SKIPPED_DIRECTORIES]
        for name in names:
            path = Path(directory, name)
            if name.endswith(suffix) and path.is_file() and not path.is_symlink():
                yield path.relative_to(root).as_posix()


def _dataset(documents: Sequence[bytes], num_skipped: int) -> Dataset:
    bounds = np.zeros(len(documents) + 1, np.int64)
    np.cumsum([len(document) + 2 for document in documents], out=bounds[1:])
    tokens_N = np.empty(int(bounds[-1]), np.uint16)
    tokens_N[bounds[:-1]] = BOS
    tokens_N[bounds[1:] - 1] = EOS
    for document, start in zip(documents, bounds[:-1].tolist(), strict=True):
        tokens_N[start + 1 : start + 1 + len(document)] = np.frombuffer(document, np.uint8)
    digest = hashlib.sha256(tokens_N.astype("<u2", copy=False).data)
    digest.update(bounds.astype("<i8", copy=False).data)
    return Dataset(
        tokens_N=tokens_N, bounds=bounds, digest=digest.hexdigest(), num_skipped=num_skipped
    )
