"""Every public name of torch_moe_ops.nn is documented, and the examples run."""

import doctest
import importlib
import inspect

import pytest

from torch_moe_ops import nn

MODULES = ("experts", "losses", "moe", "router")


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    module = importlib.import_module(f"torch_moe_ops.nn.{name}")
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("name", nn.__all__)
def test_docstring(name):
    item = getattr(nn, name)
    assert item.__doc__
    is_record = inspect.isclass(item) and issubclass(item, tuple)
    if not is_record:
        assert "Args:" in item.__doc__
        assert "Example:" in item.__doc__
        assert ">>>" in item.__doc__
