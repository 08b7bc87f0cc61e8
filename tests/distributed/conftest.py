"""Pools of gloo processes that all tests of a session share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ranks import Ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With xdist, one worker for all of them: each would start pools of its own."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Ranks]]:
    """``pool(n)``: n processes, started when first asked for, and again after a failure."""
    pools: dict[int, Ranks] = {}
    yield lambda size: pools.setdefault(size, Ranks(size))
    for ranks in pools.values():
        ranks.close()
