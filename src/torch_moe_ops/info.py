"""``python -m torch_moe_ops.info``: what is usable on this machine, and why not where it is not."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform

import torch

import torch_moe_ops
from torch_moe_ops import _C, _build_info

# Dispatch key by backend, in the order of the table's columns.
_BACKENDS = {"cpu": "CPU", "meta": "Meta", "npu": "PrivateUse1"}

_SWITCHES = {
    "MOE_OPS_CPU_CAPABILITY": "default, avx2 or avx512: instruction set of the CPU kernels",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0: `import torch` does not load torch_npu",
}


def op_names() -> list[str]:
    """The public operators, in the order of ``torch_moe_ops.ops``."""
    return list(torch_moe_ops.ops.__all__)


def backend_status(op: str, backend: str) -> str:
    """``yes``, or why ``moe::<op>`` cannot run on ``cpu``, ``meta`` or ``npu`` tensors."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"moe::{op}", _BACKENDS[backend]):
        return "yes"
    if backend == "npu":
        return "no: this version has no NPU kernels"
    return "no: not registered"


def autograd_status(op: str) -> str:
    """``yes`` if the operator has a gradient formula."""
    registered = torch._C._dispatch_has_kernel_for_dispatch_key(f"moe::{op}", "Autograd")
    return "yes" if registered else "no"


def versions() -> dict[str, str]:
    """Versions and build facts, as printed by the command."""
    has_npu = importlib.util.find_spec("torch_npu") is not None
    return {
        "torch_moe_ops": torch_moe_ops.__version__,
        "torch": f"{torch.__version__} (built for {_build_info.TORCH_VERSION})",
        "torch_npu": "installed" if has_npu else "not installed",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "compiler": f"{_C.compiler}, C++ {_C.cxx_standard}",
        "flags": _build_info.CXX_FLAGS,
        "openmp": f"{'yes' if _C.openmp else 'no'}, {torch.get_num_threads()} threads",
        "cpu kernels": _cpu_capability(),
        "library": str(_C.__file__),
    }


def _cpu_capability() -> str:
    try:
        return _C.cpu_capability()
    except ValueError as error:  # MOE_OPS_CPU_CAPABILITY names a level that is not there
        return f"unusable: {error}"


def _print_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, tuple("-" * width for width in widths), *rows]:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())


def main() -> None:
    """Prints versions, environment switches and the table of operators."""
    argparse.ArgumentParser(prog="python -m torch_moe_ops.info", description=__doc__).parse_args()
    for name, value in versions().items():
        print(f"{name:14}{value}")
    print("\nenvironment switches")
    for name, meaning in _SWITCHES.items():
        print(f"  {name}={os.environ.get(name, '(not set)')}  {meaning}")
    print()
    _print_table(
        ("operator", *_BACKENDS, "gradients"),
        [
            (op, *[backend_status(op, backend) for backend in _BACKENDS], autograd_status(op))
            for op in op_names()
        ],
    )


if __name__ == "__main__":
    main()
