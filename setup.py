"""Builds torch_moe_ops against the torch that is installed.

_C: schemas and CPU kernels. _C_npu: NPU kernels, where the torch_npu wheel is; CANN is not needed.

Environment:
    MOE_OPS_BUILD_NPU=auto|0|1           build _C_npu if torch_npu is installed (auto, the default),
                                         never (0), or fail without torch_npu (1)
    MOE_OPS_SANITIZE=address,undefined   build with these sanitizers (see `make sanitize`)
    MOE_OPS_WERROR=1                     treat compiler warnings as errors
    MAX_JOBS                             compile jobs at a time (ninja)
"""

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

# A machine with torch_npu but no CANN cannot even import torch unless backends stay unloaded.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

from setuptools import Extension, setup

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


# What the NPU library has too: code that reads index values that were copied to the host.
SHARED_WITH_NPU = ("csrc/cpu/slots.cpp", "csrc/cpu/group_offsets.cpp")


def sources() -> tuple[list[str], list[str]]:
    """The C++ files of _C and of _C_npu, found by looking: a new operator touches no build file."""
    paths = sorted(path.relative_to(ROOT) for path in (ROOT / "csrc").rglob("*.cpp"))
    npu = [str(path) for path in paths if path.parent.name == "npu"]
    cpu = [str(path) for path in paths if path.parent.name != "npu"]
    common = [path for path in cpu if path.startswith(("csrc/common/", "csrc/comm/"))]
    return cpu, [*npu, *common, *SHARED_WITH_NPU]


def torch_npu_wheel() -> Path | None:
    """Where torch_npu is installed. It is not imported: that would need CANN."""
    wanted = os.environ.get("MOE_OPS_BUILD_NPU", "auto")
    if wanted not in ("auto", "0", "1"):
        sys.exit(f"MOE_OPS_BUILD_NPU must be auto, 0 or 1, got {wanted}")
    spec = importlib.util.find_spec("torch_npu") if wanted != "0" else None
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    if wanted == "1":
        sys.exit(
            "MOE_OPS_BUILD_NPU=1 builds NPU kernels, which are compiled against the torch_npu "
            "wheel, and torch_npu is not installed.\n"
            f"Install it first: pip install torch_npu=={torch.__version__.split('+')[0]}"
        )
    return None


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


def extension(
    name: str, files: list[str], npu_wheel: Path | None = None, link_flags: tuple[str, ...] = ()
) -> Extension:
    """One library of the package, linked to torch_npu if its wheel is given."""
    headers = include_paths()
    if npu_wheel is not None:
        headers += [f"{npu_wheel}/include", f"{npu_wheel}/include/third_party/acl/inc"]
    # -isystem: our own warnings, not those of others' headers.
    flags = compile_flags() + [f"-isystem{path}" for path in headers]
    return CppExtension(
        f"{PACKAGE}.{name}",
        files,
        include_dirs=[str(ROOT / "csrc")],
        library_dirs=[] if npu_wheel is None else [str(npu_wheel / "lib")],
        libraries=[] if npu_wheel is None else ["torch_npu"],
        extra_compile_args={"cxx": flags},
        # OpenMP comes with torch: linking another copy would bring a second thread pool.
        extra_link_args=["-Wl,--no-undefined-version", *link_flags, *sanitizer_flags()],
    )


def extensions() -> list[Extension]:
    """_C, and _C_npu where torch_npu is."""
    cpu_files, npu_files = sources()
    libraries = [extension("_C", cpu_files)]
    if NPU_WHEEL is not None:
        # libtorch_npu.so needs libraries of CANN, which need not be here.
        flags = ("-Wl,--allow-shlib-undefined",)
        libraries.append(extension("_C_npu", npu_files, NPU_WHEEL, flags))
    return libraries


class Build(BuildExtension):
    """Compiles torch's headers once for each library, not once for each source.

    Writes build facts beside the library; the loader reads them before it loads anything.
    """

    def build_extension(self, ext: Extension) -> None:
        """Builds one library."""
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        if b"Free Software Foundation" in subprocess.check_output([*compiler, "--version"]):
            ext.extra_compile_args["cxx"] += [
                "-Winvalid-pch",
                "-include",
                self._precompiled(ext, compiler),
            ]
        super().build_extension(ext)

    def _precompiled(self, ext: Extension, compiler: list[str]) -> str:
        """A copy of torch_headers.h with what GCC made of it beside it, in the build folder."""
        source = ROOT / "csrc" / "common" / "torch_headers.h"
        header = Path(self.build_temp).resolve() / ext.name / source.name
        compiled, made_by = (header.with_name(f"{header.name}.{end}") for end in ("gch", "command"))
        # GCC wants the flags of the sources; where they differ it reads the copy instead.
        flags = [*self.compiler.compiler_so[1:], *ext.extra_compile_args["cxx"]]
        command = [*compiler, *flags, "-x", "c++-header", str(header), "-o", str(compiled)]
        stamp = f"{shlex.join(command)}\n{torch.__version__}\n{source.read_text()}"
        if not (compiled.exists() and made_by.exists() and made_by.read_text() == stamp):
            header.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, header)
            subprocess.run(command, check=True)
            made_by.write_text(stamp)
        return str(header)

    def run(self) -> None:
        """Builds the extension, then writes ``_build_info.py``."""
        super().run()
        target = ROOT / "src" if self.inplace else Path(self.build_lib)
        lines = [
            '"""Written by setup.py."""',
            "",
            f'TORCH_VERSION = "{torch.__version__}"',
            f'TORCH_NPU_VERSION = "{NPU_VERSION}"  # empty: built without NPU kernels',
            f'CXX_FLAGS = "{" ".join(compile_flags())}"',
        ]
        (target / PACKAGE / "_build_info.py").write_text("\n".join(lines) + "\n")


NPU_WHEEL = torch_npu_wheel()
NPU_VERSION = importlib.metadata.version("torch_npu") if NPU_WHEEL is not None else ""

print(f"{PACKAGE}: torch {torch.__version__}, torch_npu {NPU_VERSION or 'none'}")
print(f"{PACKAGE}: flags: {' '.join(compile_flags())}")

setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": Build},
    # Apart, so that no build without NPU kernels packs those that an earlier build left behind.
    options={"build": {"build_base": "build/npu" if NPU_WHEEL is not None else "build/cpu"}},
)
