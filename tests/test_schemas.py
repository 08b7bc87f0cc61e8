"""The schemas are public API: they change on purpose or not at all."""

import inspect
from pathlib import Path

import pytest
import torch

import torch_moe_ops
from torch_moe_ops import reference

FROZEN = Path(__file__).with_name("schemas.txt").read_text().splitlines()
NAMES = [line.split("(")[0] for line in FROZEN]


@pytest.mark.parametrize("line", FROZEN, ids=NAMES)
def test_schema_is_frozen(line: str) -> None:
    name = line.split("(")[0]
    assert str(getattr(torch.ops.moe, name).default._schema) == f"moe::{line}"


def test_every_operator_is_listed() -> None:
    registered = {
        schema.name.removeprefix("moe::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("moe::") and not schema.name.startswith("moe::_")
    }
    assert registered == set(NAMES)
    assert set(torch_moe_ops.ops.__all__) == set(NAMES)


@pytest.mark.parametrize("module", [torch_moe_ops, reference], ids=["public", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_python_functions_have_the_arguments_of_the_schema(module: object, name: str) -> None:
    schema = getattr(torch.ops.moe, name).default._schema
    parameters = inspect.signature(getattr(module, name)).parameters.values()
    assert [p.name for p in parameters] == [a.name for a in schema.arguments]
    assert [p.kind is p.KEYWORD_ONLY for p in parameters] == [
        a.kwarg_only for a in schema.arguments
    ]
    for parameter, argument in zip(parameters, schema.arguments, strict=True):
        default = argument.default_value if argument.has_default_value() else parameter.empty
        assert parameter.default == default, parameter.name
