"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import resihp

sys.path.insert(0, str(Path(__file__).parent))

from jobs import Job, Run, complete


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few source files as text to train on."""
    folder = tmp_path_factory.mktemp("corpus")
    for path in sorted((Path(resihp.__file__).parent / "ir").glob("*.py")):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


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
