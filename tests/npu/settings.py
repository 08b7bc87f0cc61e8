"""The settings in which the NPU tests run: product, CANN release, torch_npu's queue, the streams.

Each is the environment of one process.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass

import pytest

SOC = {"A2": "Ascend910B2", "A3": "Ascend910_9391", "950": "Ascend950PR_9589"}
# The release before and after TokenUnpermuteGrad changed its row bound. The old one has no
# GroupedMatmulV5 here.
RELEASES = ("8.5.0", "9.1.0")

# The setting of this process, with what holds where a variable is not set.
SOC_NAME = os.environ.get("CANN_STANDIN_SOC", SOC["A2"])
ON_950 = SOC["950"] == SOC_NAME
RELEASE = os.environ.get("CANN_STANDIN_VERSION", "9.1.0")
HAS_V5 = os.environ.get("MOE_OPS_TEST_STANDIN_VARIANT") != "old"
STREAMS = os.environ.get("CANN_STANDIN_ASYNC", "0")
BLOCKING = os.environ.get("ASCEND_LAUNCH_BLOCKING") == "1"  # turns the queue off
QUEUE = "0" if BLOCKING else os.environ.get("TASK_QUEUE_ENABLE", "1")
CACHING = os.environ.get("PYTORCH_NO_NPU_MEMORY_CACHING") != "1"
CHECKS_INDICES = os.environ.get("MOE_OPS_CHECK_INDICES") == "1"
FULL_COUNTS = os.environ.get("MOE_OPS_TEST_FULL") == "1"


@dataclass(frozen=True)
class Setting:
    """One row of the matrix."""

    product: str
    release: str
    queue: str = "0"  # TASK_QUEUE_ENABLE
    streams: str = "0"  # 0: kernels run at once; 1: on a thread of the stream; delay: late
    unsettled: bool = False  # where no source says what a kernel does, do the other thing
    check_indices: bool = False
    blocking: bool = False
    caching: bool = True  # without it, every allocation is fresh, and so poisoned

    def environment(self) -> dict[str, str]:
        """The variables, for torch_npu, the stand-in and this package."""
        return {
            "CANN_STANDIN_SOC": SOC[self.product],
            "CANN_STANDIN_VERSION": self.release,
            "CANN_STANDIN_ASYNC": self.streams,
            "CANN_STANDIN_UNSETTLED": str(int(self.unsettled)),
            "MOE_OPS_TEST_STANDIN_VARIANT": "old" if self.release < "9" else "current",
            "TASK_QUEUE_ENABLE": self.queue,
            "ASCEND_LAUNCH_BLOCKING": str(int(self.blocking)),
            "MOE_OPS_CHECK_INDICES": str(int(self.check_indices)),
            "PYTORCH_NO_NPU_MEMORY_CACHING": str(int(not self.caching)),
        }

    def __str__(self) -> str:
        flags = [name for name in ("unsettled", "check_indices", "blocking") if getattr(self, name)]
        flags += [] if self.caching else ["no_caching"]
        return " ".join(
            [self.product, self.release, f"queue={self.queue}", f"streams={self.streams}", *flags]
        )


# What every run covers: each product on both releases, every queue mode and kind of stream.
SAMPLED = (
    Setting("A2", "9.1.0", caching=False, check_indices=True),
    Setting("A2", "8.5.0", queue="1", streams="delay"),
    Setting("A3", "8.5.0", unsettled=True),
    Setting("A3", "9.1.0", queue="2", streams="1"),
    Setting("950", "9.1.0", queue="1", streams="1", unsettled=True),
    Setting("950", "8.5.0", queue="2", streams="delay", caching=False),
)

# (queue, streams, blocking) worth a difference: without a queue the host waits for nothing else.
_MODES = (
    ("0", "0", False),
    ("0", "delay", False),
    ("1", "0", False),
    ("1", "1", False),
    ("1", "delay", True),
    ("2", "1", False),
    ("2", "delay", False),
)

FULL = tuple(
    Setting(
        product,
        release,
        queue,
        streams,
        unsettled=number % 2 == 1,
        check_indices=queue == "0" and streams == "0",
        blocking=blocking,
        caching=streams != "0",
    )
    for number, (product, release, (queue, streams, blocking)) in enumerate(
        itertools.product(SOC, RELEASES, _MODES)
    )
)


def only_in(number: int) -> pytest.MarkDecorator:
    """For tests that start processes of their own, which takes long: one sampled setting is enough.

    They are spread over the settings, since these run side by side.
    """
    setting = SAMPLED[number]
    here = all(os.environ.get(name) == value for name, value in setting.environment().items())
    return pytest.mark.skipif(
        not here, reason=f"starts processes of its own, in one setting only: {setting}"
    )
