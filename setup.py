"""Builds torch_moe_ops._C (schemas and CPU kernels) against the torch that is installed.

Environment:
    MOE_OPS_SANITIZE=address,undefined   build with these sanitizers (see `make sanitize`)
    MOE_OPS_WERROR=1                     treat compiler warnings as errors
    MAX_JOBS                             compile jobs at a time (ninja)
"""

import os
import sys
from pathlib import Path

# A machine with torch_npu but no CANN cannot even import torch unless backends stay unloaded.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

from setuptools import setup

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths
except ImportError as error:
    sys.exit(
        "torch_moe_ops is compiled against the torch that you use, and this build cannot import "
        f"it ({error}).\n"
        "Install torch 2.13.0 first, then build without isolation:\n"
        "    pip install torch==2.13.0 setuptools ninja\n"
        "    pip install --no-build-isolation ."
    )

ROOT = Path(__file__).parent
PACKAGE = "torch_moe_ops"


def sources() -> list[str]:
    """Every C++ file of the CPU library, found by looking: a new operator touches no build file."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp"))


def compile_flags() -> list[str]:
    """The flags of every C++ file."""
    # -g0: debug information for torch's headers takes a third of the compile time.
    flags = ["-O3", "-g0", "-std=c++20", "-fvisibility=hidden", "-Wall", "-Wextra", "-fopenmp"]
    # The same operations on every processor and compiler: no fused multiply-add behind our back.
    flags.append("-ffp-contract=off")
    if os.environ.get("MOE_OPS_WERROR") == "1":
        flags.append("-Werror")
    return flags + sanitizer_flags()


def sanitizer_flags() -> list[str]:
    """The flags that MOE_OPS_SANITIZE asks for, none by default."""
    names = os.environ.get("MOE_OPS_SANITIZE", "")
    return [f"-fsanitize={names}", "-fno-omit-frame-pointer", "-g"] if names else []


class Build(BuildExtension):
    """Writes build facts beside the library; the loader reads them before it loads anything."""

    def run(self) -> None:
        """Builds the extension, then writes ``_build_info.py``."""
        super().run()
        target = ROOT / "src" if self.inplace else Path(self.build_lib)
        lines = [
            '"""Written by setup.py."""',
            "",
            f'TORCH_VERSION = "{torch.__version__}"',
            f'CXX_FLAGS = "{" ".join(compile_flags())}"',
        ]
        (target / PACKAGE / "_build_info.py").write_text("\n".join(lines) + "\n")


print(f"{PACKAGE}: torch {torch.__version__}, flags: {' '.join(compile_flags())}")

setup(
    ext_modules=[
        CppExtension(
            f"{PACKAGE}._C",
            sources(),
            include_dirs=[str(ROOT / "csrc")],
            # -isystem: our own warnings, not those of torch's headers.
            extra_compile_args={
                "cxx": compile_flags() + [f"-isystem{path}" for path in include_paths()]
            },
            # OpenMP comes with torch: linking another copy would bring a second thread pool.
            extra_link_args=["-Wl,--no-undefined-version", *sanitizer_flags()],
        )
    ],
    cmdclass={"build_ext": Build},
)
