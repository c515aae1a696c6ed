"""The job file alone tells which tensors a version of its model has."""

from __future__ import annotations

import msgspec
import pytest
from layouts import SMALL

from resihp.executor.checkpoint.pieces import all_keys
from resihp.executor.models import build_model
from resihp.monitor.saved_model import model_difference, saved_shapes


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_model_is_known_by_its_job_file(model_type: str, tied: bool, bias: bool) -> None:
    """The same names and shapes as of the tensors that the executor saves."""
    model = msgspec.structs.replace(
        SMALL, model_type=model_type, tie_word_embeddings=tied, attention_bias=bias
    )
    keys = all_keys(build_model(model))
    assert saved_shapes(model) == keys
    assert not model_difference(keys, model)
