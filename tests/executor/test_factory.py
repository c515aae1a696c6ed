"""Models that a job file names by module and function."""

from __future__ import annotations

import sys

import pytest
from cases import TINY
from msgspec.structs import replace

from resihp.errors import ConfigError
from resihp.executor.models import Llama, build_model

MODULE = """
from resihp.executor.models import Llama

SIZE = 3

def whole(config):
    return Llama(config)

def short(config):
    model = Llama(config)
    model.num_layers = 3
    return model

def broken(config):
    import absent_helper
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path, monkeypatch):
    (tmp_path / "user_models.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("user_models", None)


def built_by(factory):
    return build_model(replace(TINY, factory=factory))


def test_the_function_makes_the_model():
    """It gets the sizes of the job file."""
    model = built_by("user_models:whole")
    assert isinstance(model, Llama)
    assert model.num_layers == TINY.num_hidden_layers


@pytest.mark.parametrize(
    ("factory", "complaint"),
    [
        ("absent_models:whole", "no module absent_models in"),
        ("user_models.inner:whole", "no module user_models.inner in"),
        ("user_models:absent", "no function absent in .*user_models.py"),
        ("user_models:SIZE", "no function SIZE in"),
        ("user_models:short", "num_layers is 3, and num_hidden_layers is 4; nearest valid"),
    ],
)
def test_a_factory_that_is_not_there_or_does_not_fit_is_the_users_fault(factory, complaint):
    """The message says what was looked for, and where."""
    with pytest.raises(ConfigError, match=complaint):
        built_by(factory)


@pytest.mark.parametrize(
    ("factory", "complaint"),
    [
        ("user_models:broken", r"raised ModuleNotFoundError: .*absent_helper.*user_models.py:\d+"),
        ("math:sqrt", r'factory = "math:sqrt": raised TypeError: must be real number'),
        ("builtins:repr", "it returned a str, which has no num_layers"),
    ],
)
def test_an_error_inside_the_function_is_told_with_its_place(factory, complaint):
    """And is the cause, for the log to keep its traceback."""
    with pytest.raises(ConfigError, match=complaint) as raised:
        built_by(factory)
    assert (raised.value.__cause__ is None) == ("returned" in complaint)


def test_a_module_that_cannot_be_imported_says_why(tmp_path):
    """A mistake in the user's file is no absent file."""
    (tmp_path / "torn_models.py").write_text("import absent_helper")
    with pytest.raises(ConfigError, match=r"importing it raised .*absent_helper.*torn_models.py:1"):
        built_by("torn_models:whole")
