"""Pools of gloo processes that all tests of a session share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Ranks]]:
    """``pool(n)``: n processes, started when first asked for, and again after a failure."""
    pools: dict[int, Ranks] = {}
    yield lambda size: pools.setdefault(size, Ranks(size))
    for ranks in pools.values():
        ranks.close()
