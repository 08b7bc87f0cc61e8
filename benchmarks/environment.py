"""Facts about machine and software that a stored measurement needs to be understood later."""

import importlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import allocator
import torch_moe_ops

PEERS = ("transformers", "torchtitan", "megatron-core")

# By name, as the compiled module has no types.
_C = importlib.import_module("torch_moe_ops._C")


def describe() -> dict[str, Any]:
    """One record. It names neither the host nor any path."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 1),  # others at work here make times worthless
        "capability": _C.cpu_capability(),
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "torch_moe_ops": torch_moe_ops.__version__,
        "compiler": _C.compiler,
        "peers": {name: _version(name) for name in PEERS},
        "python": platform.python_version(),
        "allocator": allocator.describe(),
        "transparent_huge_pages": _huge_pages(),
        "git": _git_commit(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _huge_pages() -> str | None:
    """always, madvise or never: the word that Linux shows in brackets."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists():
        return None
    return setting.read_text().partition("[")[2].partition("]")[0]


def _git_commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        result = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
