"""Builds the stand-in for CANN: `python tests/cann/build.py OUT_DIR`, or build(out_dir).

Needs g++, and torch and torch_npu installed (neither is imported). OUT_DIR gets a directory for
each variant, to be given to bootstrap.load: "current" has all operators, "old" lacks those of the
sources in LATER as CANN releases before them do, and "bare" has no MoE operator at all. What is
up to date is not built again.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
JOBS = 2
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]
# -DFUNC_VISIBILITY has CANN's headers export what they declare.
CANN_FLAGS = [*FLAGS, "-DFUNC_VISIBILITY"]

LINK_FLAGS = ["-Wl,--no-as-needed", "-Wl,-z,defs", "-Wl,-rpath,$ORIGIN"]

RUNTIME = {
    "libascendcl.so": ["ascendcl.cpp", "memory.cpp", "stream.cpp"],
    "libnnopbase.so": ["nnopbase.cpp", "elements.cpp", "trace.cpp"],
    "libhccl.so": ["hccl.cpp", "hccl_calls.cpp", "hccl_data.cpp", "hccl_transport.cpp"],
}
# Libraries of stubs, and which of the symbols that torch_npu needs they hold; the last the rest.
STUBS = {
    "libacl_op_compiler.so": r"aclop|aclGenGraph",
    "libacl_tdt_channel.so": r"acltdt",
    "libgraph.so": r"_ZN?K?2ge",
    "libge_runner.so": r"",
}
# Looked up by name.
LOOKED_UP = ["aclopCompileAndExecuteV2"]
CANN_SYMBOL = re.compile(r"acl[A-Z]|acl[a-z]+[A-Z]|Hccl|Hcom|Msprof|rt[A-Z]|_ZNK?2ge")
VARIANTS = ("current", "old", "bare")
# Sources of libopapi.so with functions that came in later releases.
LATER = ("grouped_matmul_v5", "alltoallv_grouped_matmul_v2")

STUB_HEAD = """#include <cstdio>
#include <cstdlib>
#define STUB(name) extern "C" __attribute__((visibility("default"))) void name() { \\
  std::fprintf(stderr, "CANN stand-in: %s is not implemented\\n", #name); \\
  std::fflush(stderr); \\
  std::abort(); }
"""


class BuildError(RuntimeError):
    """What is missing, or what the compiler said."""


def package(name: str) -> Path:
    """The directory of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(f"the stand-in for CANN needs {name}, which is not installed")
    return Path(spec.submodule_search_locations[0])


def run(command: list[str | Path]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        shown = " ".join(map(str, command))
        raise BuildError(f"{shown}\n{done.stdout}{done.stderr}")
    sys.stderr.write(done.stderr)  # warnings
    return done.stdout


def wanted(variant: str, operator: str) -> bool:
    """Whether a variant of libopapi.so has the operators of a source of that name."""
    if variant == "bare":
        return operator == "aten"
    return variant == "current" or operator not in LATER


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class Builder:
    """Compiles and links into one directory, by the hash of what goes in."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.objects = out / "obj"
        self.lib = out / "lib"
        for directory in (self.objects, self.lib):
            directory.mkdir(parents=True, exist_ok=True)
        self.torch = package("torch")
        self.torch_npu = package("torch_npu")
        compiler = shutil.which("g++")
        if compiler is None:
            raise BuildError("the stand-in for CANN needs g++, which is not installed")
        self.compiler = compiler
        self.versions = [importlib.metadata.version(name) for name in ("torch", "torch_npu")]
        headers = sorted([*HERE.glob("*.h"), *HERE.glob("opapi/*.h")])
        self.headers = [path.read_text() for path in headers]

    def compile(self, source: Path, flags: list[str], headers: list[str]) -> Path:
        key = digest(source.read_text(), flags, headers, self.versions)
        target = self.objects / f"{source.stem}-{key}.o"
        if not target.exists():
            partial = target.with_suffix(".part")
            run([self.compiler, *flags, "-c", source, "-o", partial])
            partial.replace(target)
        return target

    def compile_cann(self, source: Path) -> Path:
        include = self.torch_npu / "include"
        flags = [*CANN_FLAGS, f"-I{HERE}", f"-isystem{include}"]
        return self.compile(source, flags, self.headers)

    def compile_override(self) -> Path:
        include = self.torch / "include"
        api = include / "torch" / "csrc" / "api" / "include"
        flags = [*FLAGS, f"-isystem{include}", f"-isystem{api}"]
        return self.compile(HERE / "aten_override.cpp", flags, [])

    def link(self, target: Path, objects: list[Path], needed: list[Path]) -> None:
        flags = ["-shared", "-pthread", f"-Wl,-soname,{target.name}", *LINK_FLAGS]
        stamp = self.objects / f"{target.parent.name}-{target.name}.stamp"
        key = digest([path.name for path in objects], flags, [path.name for path in needed])
        if target.exists() and stamp.exists() and stamp.read_text() == key:
            return
        partial = target.with_suffix(".part")
        run([self.compiler, *flags, *objects, *needed, "-o", partial])
        partial.replace(target)
        stamp.write_text(key)

    def symbols(self, libraries: list[Path], which: str) -> set[str]:
        lines = run(["nm", "-D", which, *libraries]).splitlines()
        return {line.split()[-1].split("@")[0] for line in lines if len(line.split()) > 1}

    def write_stubs(self) -> dict[str, Path]:
        """Sources of stubs for all that torch_npu's libraries need and the runtime lacks."""
        libraries = [*(self.torch_npu / "lib").glob("lib*.so"), *self.torch_npu.glob("_C*.so")]
        atb = "libop_plugin_atb.so"  # loaded only where the ATB library is
        needed = self.symbols([path for path in libraries if path.name != atb], "--undefined-only")
        have = self.symbols([self.lib / name for name in RUNTIME], "--defined-only")
        missing = sorted(name for name in needed - have if CANN_SYMBOL.match(name))
        left = [*missing, *LOOKED_UP]
        sources = {}
        for library, pattern in STUBS.items():
            mine = [name for name in left if re.match(pattern, name)]
            left = [name for name in left if name not in mine]
            source = self.objects / f"stubs_{Path(library).stem}.cpp"
            source.write_text(STUB_HEAD + "".join(f"STUB({name})\n" for name in mine))
            sources[library] = source
        return sources

    def build(self) -> None:
        operators = sorted((HERE / "opapi").glob("*.cpp"))
        runtime = [HERE / name for names in RUNTIME.values() for name in names]
        with ThreadPoolExecutor(JOBS) as pool:
            override = pool.submit(self.compile_override)
            compiled = dict(
                zip(
                    [*runtime, *operators],
                    pool.map(self.compile_cann, [*runtime, *operators]),
                    strict=True,
                )
            )
            self.link_runtime(compiled)
            self.link_operators({path.stem: compiled[path] for path in operators})
            libraries = [self.torch / "lib" / f"lib{name}.so" for name in ("torch_cpu", "c10")]
            self.link(self.lib / "libstandin_aten.so", [override.result()], libraries)

    def link_runtime(self, compiled: dict[Path, Path]) -> None:
        needed: list[Path] = []
        for library, names in RUNTIME.items():
            objects = [compiled[HERE / name] for name in names]
            self.link(self.lib / library, objects, needed)
            needed.append(self.lib / library)
        # torch_npu looks up runtime functions in libacl_op_compiler.so too: as its dependencies.
        runtime = [self.lib / "libascendcl.so"]
        for library, source in self.write_stubs().items():
            self.link(self.lib / library, [self.compile(source, FLAGS, [])], runtime)

    def link_operators(self, objects: dict[str, Path]) -> None:
        for variant in VARIANTS:
            directory = self.out / variant
            directory.mkdir(exist_ok=True)
            for library in (*RUNTIME, *STUBS, "libstandin_aten.so"):
                shared = directory / library
                if not shared.is_symlink():
                    shared.symlink_to(Path("..") / "lib" / library)
            chosen = [objects[name] for name in objects if wanted(variant, name)]
            self.link(directory / "libopapi.so", chosen, [self.lib / name for name in RUNTIME])


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """One build at a time, also of several processes."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(out_dir: str | os.PathLike[str]) -> Path:
    """Builds all variants into a directory, which is returned."""
    out = Path(out_dir).resolve()
    with locked(out):
        Builder(out).build()
    return out


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: build.py OUT_DIR")
    try:
        print(build(sys.argv[1]))
    except BuildError as error:
        sys.exit(str(error))
