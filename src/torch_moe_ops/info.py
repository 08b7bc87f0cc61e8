"""``python -m torch_moe_ops.info``: what is usable on this machine, and why not where it is not.

Unlike the package it imports torch_npu, where that is installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform

import torch

import torch_moe_ops
from torch_moe_ops import _C, _build_info, _npu

# Dispatch key by backend, in the order of the table's columns.
_BACKENDS = {"cpu": "CPU", "meta": "Meta", "npu": "PrivateUse1"}

# The functions of CANN behind each operator: any one of them is enough.
ACLNN_FUNCTIONS = {
    "token_permute": ("aclnnMoeTokenPermute",),
    "token_permute_grad": ("aclnnMoeTokenPermuteGrad",),
    "token_unpermute": ("aclnnMoeTokenUnpermute",),
    "token_unpermute_grad": ("aclnnMoeTokenUnpermuteGrad",),
    "init_routing_v2": ("aclnnMoeInitRoutingV2",),
    "init_routing_v2_grad": ("aclnnMoeInitRoutingV2Grad",),
    "finalize_routing_v2": ("aclnnMoeFinalizeRoutingV2",),
    "finalize_routing_v2_grad": ("aclnnMoeFinalizeRoutingV2Grad",),
    "grouped_matmul": ("aclnnGroupedMatmulV5", "aclnnGroupedMatmulV4"),
    "grouped_matmul_weight_grad": ("aclnnGroupedMatmulV5", "aclnnGroupedMatmulV4"),
    "swiglu": ("aclnnSwiGlu",),
    "swiglu_grad": ("aclnnSwiGluGrad",),
    # Without the fused functions, or outside their limits, an exchange of HCCL and grouped_matmul.
    "alltoallv_grouped_matmul": (
        "aclnnAlltoAllvGroupedMatMulV2",
        "aclnnAlltoAllvGroupedMatMul",
        "aclnnGroupedMatmulV5",
        "aclnnGroupedMatmulV4",
    ),
    "grouped_matmul_alltoallv": (
        "aclnnGroupedMatMulAlltoAllvV2",
        "aclnnGroupedMatMulAlltoAllv",
        "aclnnGroupedMatmulV5",
        "aclnnGroupedMatmulV4",
    ),
}

_SWITCHES = {
    "MOE_OPS_CPU_CAPABILITY": "default, avx2 or avx512: instruction set of the CPU kernels",
    "MOE_OPS_CHECK_INDICES": "1: NPU kernels check index values, and wait for the device to do so",
    "MOE_OPS_CHECK_COUNTS": "0, 1: whether ranks compare row counts first (CPU: yes, NPU: no)",
    "MOE_OPS_ALLOW_CPU_FALLBACK": "1: without NPU kernels, NPU tensors go through the CPU kernels",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0: `import torch` does not load torch_npu",
    "ASCEND_HOME_PATH": "where CANN is; its set_env.sh sets it",
    "ASCEND_OPP_PATH": "CANN's operator packages; operators of vendors/ come before CANN's own",
    "ASCEND_CUSTOM_OPP_PATH": "further operator packages, which come before all others",
    "TASK_QUEUE_ENABLE": "0: torch_npu launches at once, so an error is raised by the call itself",
    "ASCEND_LAUNCH_BLOCKING": "1: every launch waits for the device, as for debugging",
}


def op_names() -> list[str]:
    """The public operators, in the order of ``torch_moe_ops.ops``."""
    return list(torch_moe_ops.ops.__all__)


def backend_status(op: str, backend: str) -> str:
    """``yes`` or ``no``: whether ``moe::<op>`` can run on ``cpu``, ``meta`` or ``npu`` tensors."""
    usable = torch._C._dispatch_has_kernel_for_dispatch_key(f"moe::{op}", _BACKENDS[backend])
    if backend == "npu":
        usable = usable and not _npu.status() and not missing_functions(op)
    return "yes" if usable else "no"


def autograd_status(op: str) -> str:
    """``yes`` if the operator has a gradient formula."""
    registered = torch._C._dispatch_has_kernel_for_dispatch_key(f"moe::{op}", "Autograd")
    return "yes" if registered else "no"


def missing_functions(op: str) -> tuple[str, ...]:
    """The functions of CANN of which ``op`` needs one, if there is none; with NPU kernels only."""
    from torch_moe_ops import _C_npu

    found = _C_npu.operators()
    names = ACLNN_FUNCTIONS[op]
    return () if any(found[name] for name in names) else names


def import_torch_npu() -> str:
    """Imports torch_npu and loads the NPU kernels. Empty, or one line: why they cannot be used."""
    if importlib.util.find_spec("torch_npu") is not None:
        try:
            importlib.import_module("torch_npu")
        except Exception as error:  # whatever it is, it is what this command is asked for
            return f"torch_npu cannot be imported: {_one_line(error)}"
    reason = _npu.load()
    if reason == _npu.NOT_IMPORTED:
        return "torch_npu is not installed"
    return reason


def _one_line(error: Exception) -> str:
    line = " ".join(str(error).split()) or type(error).__name__
    if "libhccl.so" in line:
        line += (
            " (CANN is not on the library path: source its set_env.sh. On a machine without CANN "
            "set TORCH_DEVICE_BACKEND_AUTOLOAD=0, or `import torch` fails too)"
        )
    return line


def versions() -> dict[str, str]:
    """Versions and build facts, as printed by the command."""
    built_for_npu = _build_info.TORCH_NPU_VERSION or "none"
    return {
        "torch_moe_ops": torch_moe_ops.__version__,
        "torch": f"{torch.__version__} (built for {_build_info.TORCH_VERSION})",
        "torch_npu": f"{_torch_npu_version()} (built for {built_for_npu})",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "compiler": f"{_C.compiler}, C++ {_C.cxx_standard}",
        "flags": _build_info.CXX_FLAGS,
        "openmp": f"{'yes' if _C.openmp else 'no'}, {torch.get_num_threads()} threads",
        "cpu kernels": _cpu_capability(),
        "library": str(_C.__file__),
    }


def _torch_npu_version() -> str:
    if importlib.util.find_spec("torch_npu") is None:
        return "not installed"
    try:
        return importlib.metadata.version("torch_npu")
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        return "of unknown version"


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


def _print_npu() -> None:
    """Chip, CANN, and where each function was found; the NPU kernels are loaded."""
    from torch_moe_ops import _C_npu

    devices = torch.get_device_module("npu").device_count()
    print(f"\nNPU kernels: loaded from {_C_npu.__file__}")
    print(f"  chip           {_C_npu.soc_name()}, {devices} of them")
    print(f"  release        {_C_npu.cann_version()}")
    for library in _C_npu.searched_libraries():
        print(f"  searched       {library}")
    print()
    found = _C_npu.operators()
    _print_table(
        ("operator", "needs", "found in"),
        [(op, name, found[name] or "missing") for op in op_names() for name in ACLNN_FUNCTIONS[op]],
    )
    print("Of several functions for one operator, the first that is found is used.")


def main() -> None:
    """Prints versions, environment switches, the table of operators, and what the NPU has."""
    argparse.ArgumentParser(prog="python -m torch_moe_ops.info", description=__doc__).parse_args()
    reason = import_torch_npu()
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
    if reason:
        print(f"\nNPU kernels: not usable: {reason}")
    else:
        _print_npu()


if __name__ == "__main__":
    main()
