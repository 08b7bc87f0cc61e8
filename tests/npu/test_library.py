"""The compiled library: it loads beside any CANN, because it links none of CANN's libraries."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import torch_npu

import torch_moe_ops

LIBRARY = next(Path(torch_moe_ops.__file__).parent.glob("_C_npu*.so"))
WHEEL = Path(torch_npu.__file__).parent / "lib" / "libtorch_npu.so"


def symbols(library: Path, which: str) -> set[str]:
    lines = subprocess.check_output(["nm", "-D", which, str(library)], text=True).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines}


def test_everything_of_torch_npu_is_exported_by_the_wheel() -> None:
    needed = {
        name
        for name in symbols(LIBRARY, "--undefined-only")
        if re.search(r"npu|NPU|CANN|^acl|^Hccl|^rt[A-Z]", name)
    }
    assert any("RunOpApiV2" in name for name in needed)
    assert needed <= symbols(WHEEL, "--defined-only")


def test_no_library_of_cann_is_linked() -> None:
    dynamic = subprocess.check_output(["readelf", "-d", str(LIBRARY)], text=True)
    linked = set(re.findall(r"NEEDED.*\[(lib[^.]+)\.so", dynamic))
    assert "libtorch_npu" in linked
    assert linked <= {
        *("libtorch_npu", "libtorch", "libtorch_cpu", "libtorch_python", "libc10"),
        *("libstdc++", "libgcc_s", "libm", "libc", "libgomp", "ld-linux-x86-64"),
    }
