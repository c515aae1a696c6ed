"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import faulty_models
from jobs import Job, Run, complete, copy_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text to train on."""
    folder = tmp_path_factory.mktemp("corpus")
    copy_corpus(folder)
    return folder


@pytest.fixture
def own_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors find `faulty_models`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


@pytest.fixture
def pipe(tmp_path: Path, own_models: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `faulty_models:hanging` stops until somebody opens the other end."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    monkeypatch.setenv(faulty_models.PIPE, str(path))
    return path


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Run:
    """TP 2 x PP 2 x DP 2, ten steps, no failure."""
    code, run = complete(Job(), tmp_path_factory.mktemp("healthy"), corpus)
    assert code == 0, run.text
    return run


@pytest.fixture(scope="session")
def killed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Run:
    """The same job; rank 5 is killed in step 3, rank 2 in step 6: two TP groups shrink."""
    job = Job(kills=((5, 3), (2, 6)))
    code, run = complete(job, tmp_path_factory.mktemp("killed"), corpus)
    assert code == 0, run.text
    return run


@pytest.fixture(scope="session")
def dropped(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Run:
    """The same job; ranks 4 and 5, all of one stage of replica 1, are killed in step 4."""
    job = Job(kills=((4, 4), (5, 4)))
    code, run = complete(job, tmp_path_factory.mktemp("dropped"), corpus)
    assert code == 0, run.text
    return run
