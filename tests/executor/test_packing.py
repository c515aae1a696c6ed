"""Windows over documents: every token once, every next token of a document a target."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from cases import dataset_of
from hypothesis import given
from hypothesis import strategies as st

from resihp.errors import ConfigError
from resihp.executor.data import BOS, EOS
from resihp.executor.packing import IGNORED_TARGET, Packing

TEXTS = st.lists(st.binary(max_size=40), min_size=1, max_size=12)


def pack(texts: list[bytes], num_tokens: int, seed: int = 0) -> Packing:
    with tempfile.TemporaryDirectory() as directory:
        return Packing(dataset_of(Path(directory), texts), num_tokens, seed)


def windows(packing: Packing):
    return [packing.micro_batch(sample_id) for sample_id in range(packing.num_windows)]


def stream(packing: Packing) -> list[int]:
    return [token for window in windows(packing) for token in window.input_ids_T.tolist()]


def split_documents(tokens: list[int]) -> list[list[int]]:
    """The documents of a stream; the last one may be cut off."""
    found: list[list[int]] = []
    for token in tokens:
        if token == BOS:
            found.append([])
        found[-1].append(token)
    return found


@given(TEXTS, st.integers(1, 23), st.integers(0, 3))
def test_documents_are_laid_whole_and_once(texts, num_tokens, seed):
    """With windows of one token nothing is dropped: the stream is a permutation of documents."""
    laid = split_documents(stream(pack(texts, 1, seed)))
    assert sorted(laid) == sorted([BOS, *text, EOS] for text in texts)
    total = sum(len(text) + 2 for text in texts)
    if total >= num_tokens:
        wider = stream(pack(texts, num_tokens, seed))
        whole = [token for document in laid for token in document]
        assert wider == whole[: total - total % num_tokens]


@given(TEXTS, st.integers(1, 23))
def test_targets_are_the_next_tokens_of_the_document(texts, num_tokens):
    """Also across the end of a window; only EOS has none. Every target counts once."""
    if sum(len(text) + 2 for text in texts) < num_tokens:
        return
    packing = pack(texts, num_tokens)
    whole = stream(pack(texts, 1))
    found = [target for window in windows(packing) for target in window.targets_T.tolist()]
    oracle = [IGNORED_TARGET if token == EOS else whole[i + 1] for i, token in enumerate(whole)]
    assert found == oracle[: len(found)]
    for window in windows(packing):
        counted = int((window.targets_T != IGNORED_TARGET).sum())
        assert window.num_targets == counted == packing.num_targets(window.sample_id)


@given(TEXTS, st.integers(1, 23))
def test_segments_are_the_pieces_of_documents(texts, num_tokens):
    """A segment begins at the window's start or at BOS, and its positions count from 0."""
    if sum(len(text) + 2 for text in texts) < num_tokens:
        return
    for window in windows(pack(texts, num_tokens)):
        ids = window.input_ids_T.tolist()
        starts = sorted({0} | {i for i, token in enumerate(ids) if token == BOS})
        assert window.cu_seqlens == (*starts, num_tokens)
        lengths = [b - a for a, b in zip(window.cu_seqlens, window.cu_seqlens[1:], strict=False)]
        assert window.position_ids_T.tolist() == [p for n in lengths for p in range(n)]


def test_the_order_of_documents_is_the_seeds(tmp_path):
    """The same seed lays the same stream, another seed another one."""
    texts = [bytes([65 + i]) * 3 for i in range(20)]
    assert stream(pack(texts, 5, seed=1)) == stream(pack(texts, 5, seed=1))
    assert stream(pack(texts, 5, seed=1)) != stream(pack(texts, 5, seed=2))


def test_too_little_data_is_refused():
    """Fewer tokens than one window is the user's fault, with both numbers."""
    with pytest.raises(ConfigError, match=r"5 tokens.*64"):
        pack([b"abc"], 64)
