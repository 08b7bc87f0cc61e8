"""What the NPU tests share. They run only on the stand-in for CANN (tests/npu/run.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.npu import plugin


@pytest.fixture
def standin() -> plugin.bootstrap.Standin:
    """The controls of the stand-in."""
    assert plugin.standin is not None
    return plugin.standin


@pytest.fixture(autouse=True)
def _nothing_is_left(standin: plugin.bootstrap.Standin) -> Iterator[None]:
    """Every test gives back every descriptor and executor, those of torch_npu included."""
    import torch

    torch.npu.synchronize()
    before = plugin.live(standin)
    yield
    torch.npu.synchronize()
    assert plugin.live(standin) == before
