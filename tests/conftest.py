"""Settings that hold for every test."""

import os

import hypothesis
import pytest
import torch

# The suite's helpers assert too: have pytest show the values there as it does in test files.
pytest.register_assert_rewrite("tests.ops.accuracy", "tests.ops.common", "tests.ops.tracing")

# The same examples on every run and machine: a failure in CI is a failure at home.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")

HUGE = "MOE_OPS_TEST_HUGE"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(HUGE) == "1":
        return
    reason = f"needs about 10 GB of memory; set {HUGE}=1 to run it"
    for item in items:
        if item.get_closest_marker("huge"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    """Every test starts from the same seed, on one thread: the tests run in parallel."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
