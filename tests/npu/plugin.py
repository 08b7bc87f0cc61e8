"""Loads the stand-in for CANN before anything imports torch: ``pytest -p tests.npu.plugin``.

``tests/npu/run.py`` builds the stand-in, and starts pytest with this plugin and one worker for each
setting (product, CANN release, queue mode, ...). The settings are environment variables, which
torch_npu and the stand-in read once in a process.
"""

from __future__ import annotations

import os

from tests.cann import bootstrap

DIRECTORY = "MOE_OPS_TEST_STANDIN"  # where run.py has built it
VARIANT = "MOE_OPS_TEST_STANDIN_VARIANT"  # current, or old: a CANN without GroupedMatmulV5


def is_controller() -> bool:
    """With xdist the process that was started only hands out the tests."""
    return os.environ.get("MOE_OPS_TEST_NPU_WORKERS") == "1" and (
        "PYTEST_XDIST_WORKER" not in os.environ
    )


standin: bootstrap.Standin | None = None
if not is_controller():
    standin = bootstrap.load(os.environ[DIRECTORY], os.environ.get(VARIANT, "current"))

KINDS = (
    "tensor",
    "tensor_list",
    "int_array",
    "bool_array",
    "float_array",
    "scalar",
    "scalar_list",
    "executor",
)


def live(standin: bootstrap.Standin) -> dict[str, int]:
    """How many descriptors and executors of each kind there are."""
    return {kind: standin.live(kind) for kind in KINDS}
