"""Reading documents: which files, as which tokens, under which digest."""

from __future__ import annotations

import numpy as np
import pytest
from cases import dataset_of

from resihp.errors import ConfigError
from resihp.executor.data import BOS, EOS, STDLIB, load_dataset, read_documents


def documents(dataset) -> list[list[int]]:
    bounds = dataset.bounds.tolist()
    return [
        dataset.tokens_N[bounds[i] : bounds[i + 1]].tolist() for i in range(dataset.num_documents)
    ]


def test_a_document_is_its_bytes_between_two_marks(tmp_path):
    """Every byte value is a token of its own; an empty file is a document too."""
    every_byte = bytes(range(256))
    dataset = dataset_of(tmp_path, [b"ab", b"", every_byte])
    assert documents(dataset) == [[BOS, 97, 98, EOS], [BOS, EOS], [BOS, *range(256), EOS]]


def test_documents_come_in_order_of_their_paths(tmp_path):
    """Whatever the file system lists first."""
    for name in ("b.txt", "a/z.txt", "a.txt", "a/b/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    read = [bytes(document[1:-1]).decode() for document in documents(load_dataset(str(tmp_path)))]
    assert read == ["a.txt", "a/b/c.txt", "a/z.txt", "b.txt"]


def test_caches_packages_and_links_are_no_documents(tmp_path):
    """Only regular files that are the source's own."""
    (tmp_path / "kept.txt").write_bytes(b"kept")
    for directory in ("__pycache__", "site-packages", "dist-packages"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "other.txt").write_bytes(b"other")
    (tmp_path / "link.txt").symlink_to(tmp_path / "kept.txt")
    (tmp_path / "linked").symlink_to(tmp_path / "site-packages")
    assert documents(load_dataset(str(tmp_path))) == [[BOS, *b"kept", EOS]]


def test_unreadable_files_are_skipped_and_counted(tmp_path):
    """A file that vanished since it was listed costs one document, not the run."""
    (tmp_path / "here").write_bytes(b"x")
    assert read_documents(tmp_path, ["gone", "here"]) == ([b"x"], 1)


def test_the_digest_tells_datasets_apart(tmp_path):
    """The same files agree; another byte, or the same bytes cut elsewhere, do not."""
    cases = {
        "one": [b"abc", b"d"],
        "same": [b"abc", b"d"],
        "byte": [b"abd", b"d"],
        "cut": [b"abcd"],
    }
    digests = {}
    for name, contents in cases.items():
        (tmp_path / name).mkdir()
        digests[name] = dataset_of(tmp_path / name, contents).digest
    assert digests["one"] == digests["same"]
    assert len(set(digests.values())) == 3


def test_the_standard_library_is_a_dataset():
    """Every Python has it: many documents, each between its marks, the same twice."""
    dataset = load_dataset(STDLIB)
    assert dataset.num_documents > 100
    assert dataset.tokens_N.dtype == np.uint16
    assert (dataset.tokens_N[dataset.bounds[:-1]] == BOS).all()
    assert (dataset.tokens_N[dataset.bounds[1:] - 1] == EOS).all()
    assert load_dataset().digest == dataset.digest


@pytest.mark.parametrize("make", [False, True])
def test_a_source_without_documents_is_refused(tmp_path, make):
    """A missing directory, and an empty one, name the source."""
    source = tmp_path / "texts"
    if make:
        source.mkdir()
    with pytest.raises(ConfigError, match="texts"):
        load_dataset(str(source))
