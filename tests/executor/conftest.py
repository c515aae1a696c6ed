"""What the executor's tests share; its helper modules lie beside it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
# The generator of random plans lies with the tests of the language.
sys.path[:0] = [str(HERE), str(HERE.parent / "ir"), str(HERE.parent / "fleet")]
torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Tests with the marker `gpu` say why they do not run here."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
