"""Calls that autograd does not record go past the Python half of an operator, which costs time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch

from torch_moe_ops.ops import _registration

from .test_hostile_inputs import CALLS, first_tensor


@contextmanager
def functions_called() -> Iterator[list[str]]:
    """The functions of the Python half that are called meanwhile."""
    names: list[str] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename == _registration.__file__:
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_only_recorded_calls_enter_python(op: str, device: str) -> None:
    x = torch.ones(3, 2, device=device)
    parameter = torch.ones(3, 2, device=device, requires_grad=True)
    with torch.device(device):
        with functions_called() as names:
            CALLS[op](x)
            with torch.no_grad():
                CALLS[op](parameter)
        assert not names
        with functions_called() as names:
            assert first_tensor(CALLS[op](parameter)).requires_grad
        assert "kernel" in names
