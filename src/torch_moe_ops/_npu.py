"""Loads the NPU kernels once torch_npu is in the process, and remembers why they cannot be used."""

from __future__ import annotations

import importlib
import sys
import threading
from typing import Any

import torch

from torch_moe_ops import _C
from torch_moe_ops._build_info import TORCH_NPU_VERSION, TORCH_VERSION

_BUILD = (
    "MOE_OPS_BUILD_NPU=1 pip install --no-build-isolation --force-reinstall --no-deps "
    "<the torch_moe_ops source>"
)

NOT_IMPORTED = "torch_npu has not been imported"

# Held while loading: a second first call waits for the outcome. Re-entrant, because the garbage
# collector may run a call in the middle of it.
_lock = threading.RLock()
_outcome: str | None = None  # empty: loaded; None: not tried yet


def start() -> None:
    """Called at import: loads the kernels now if torch_npu is there, else at the first call.

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
        if _outcome is None and TORCH_NPU_VERSION and _has_torch_npu():
            _outcome = _load()
        return status()


def status() -> str:
    """What ``load`` would return, without loading anything: empty only if the kernels are there."""
    if _outcome is not None:
        return _outcome
    backend = torch._C._get_privateuse1_backend_name()
    if backend not in ("npu", "privateuseone"):
        return f"the PrivateUse1 backend of this process is {backend}, not torch_npu"
    if not TORCH_NPU_VERSION:
        return f"torch_moe_ops was built without them. Build it where torch_npu is: {_BUILD}"
    return "the first call on an NPU tensor will load them" if _has_torch_npu() else NOT_IMPORTED


def communicator_name(group: str) -> str:
    """CANN's name for a process group, as its fused operators want it. Called by _C_npu.

    Makes the communicator of the current device if there is none yet, which is collective.
    """
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    backend = c10d._resolve_process_group(group)._get_backend(torch.device("npu"))
    # The rank in the whole world, also for a smaller group.
    name: str = backend.get_hccl_comm_name(c10d.get_rank(), init_comm=True)
    return name


def _has_torch_npu() -> bool:
    """False also while torch_npu is being imported: its version and library may not be there."""
    module = sys.modules.get("torch_npu")
    spec = getattr(module, "__spec__", None)
    return module is not None and not getattr(spec, "_initializing", False)


def _release(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _load() -> str:
    found = str(getattr(sys.modules["torch_npu"], "__version__", "of unknown version"))
    if _release(found) != _release(TORCH_NPU_VERSION):
        return (
            f"they were built for torch_npu {TORCH_NPU_VERSION}, this is torch_npu {found}. "
            f"Install that version, or build again: {_BUILD}"
        )
    try:
        importlib.import_module("torch_moe_ops._C_npu")
    except (ImportError, OSError) as error:
        return (
            f"the library built for torch {TORCH_VERSION} and torch_npu {TORCH_NPU_VERSION} "
            f"does not load: {error}. Build it again: {_BUILD}"
        )
    return ""
