"""Loads the NPU kernels once torch_npu is in the process, and remembers why they cannot be used."""

from __future__ import annotations

import importlib
import sys
import threading

from torch_moe_ops import _C
from torch_moe_ops._build_info import TORCH_NPU_VERSION, TORCH_VERSION

_BUILD = (
    "MOE_OPS_BUILD_NPU=1 pip install --no-build-isolation --force-reinstall --no-deps "
    "<the torch_moe_ops source>"
)

_lock = threading.RLock()
_outcome: str | None = None  # empty: loaded; None: not tried yet


def start() -> None:
    """Called once, at import: loads the kernels now if torch_npu is there, else at the first call.

    A failure is kept for the first call on an NPU tensor; the CPU side works regardless.
    """
    _C.install_npu_entry()
    load()


def load() -> str:
    """Loads torch_moe_ops._C_npu unless it is there already. Never imports torch_npu.

    Returns:
        Empty if the kernels can be used, else why they cannot: the same reason at every call, but
        for a process that has no torch_npu yet.
    """
    global _outcome
    with _lock:
        if _outcome is None and "torch_npu" in sys.modules:
            _outcome = _load()
        return status()


def status() -> str:
    """What ``load`` would return, without loading anything: empty only if the kernels are there."""
    if _outcome is not None:
        return _outcome
    if not TORCH_NPU_VERSION:
        return f"torch_moe_ops was built without them. Build it where torch_npu is: {_BUILD}"
    return "torch_npu has not been imported"


def _release(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _load() -> str:
    if not TORCH_NPU_VERSION:
        return status()
    found = str(getattr(sys.modules["torch_npu"], "__version__", "of unknown version"))
    if _release(found) != _release(TORCH_NPU_VERSION):
        return (
            f"they were built for torch_npu {TORCH_NPU_VERSION}, this is torch_npu {found}. "
            f"Install that version, or build again: {_BUILD}"
        )
    _C.remove_npu_entry()
    try:
        importlib.import_module("torch_moe_ops._C_npu")
    except (ImportError, OSError) as error:
        _C.install_npu_entry()
        return (
            f"the library built for torch {TORCH_VERSION} and torch_npu {TORCH_NPU_VERSION} "
            f"does not load: {error}. Build it again: {_BUILD}"
        )
    return ""
