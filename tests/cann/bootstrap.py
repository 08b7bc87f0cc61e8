"""Loads the stand-in for CANN into a process, and torch_npu on top of it.

load() has to come before the first import of torch:

    import bootstrap
    standin = bootstrap.load(build.build(out_dir))
    import torch  # has torch.npu
"""

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

# In the order of their dependencies.
LIBRARIES = (
    "libascendcl.so",
    "libnnopbase.so",
    "libhccl.so",
    "libacl_op_compiler.so",
    "libacl_tdt_channel.so",
    "libgraph.so",
    "libge_runner.so",
)
# With these torch_npu looks for an installed CANN.
FOREIGN = ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH", "ASCEND_CUSTOM_OPP_PATH", "ASCEND_AICPU_PATH")
INVALID = 161002
OUT_OF_MEMORY = 207001


class Standin:
    """The controls of a loaded stand-in."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._library = ctypes.CDLL(str(directory / "libnnopbase.so"))  # and its dependencies

    def live(self, kind: str) -> int:
        """Live objects: "tensor", "tensor_list", "int_array", ..., "executor", "device_bytes"."""
        count = self._number("standin_live", kind.encode())
        if count < 0:
            raise ValueError(f"nothing is counted as {kind!r}")
        return count

    def fail(self, where: str, nth: int, code: int | None = None) -> None:
        """Has the nth (1: the next) call of "phase1", "phase2" or "malloc" fail; 0 clears.

        "phase1:aclnnX" counts the calls of one operator. "malloc" fails from the nth on, until
        cleared, because the allocator tries again.
        """
        if where.split(":")[0] not in ("phase1", "phase2", "malloc"):
            raise ValueError(f"no fault can be injected into {where!r}")
        if code is None:
            code = OUT_OF_MEMORY if where == "malloc" else INVALID
        self._library.standin_fail(where.encode(), ctypes.c_int64(nth), ctypes.c_int64(code))

    def trace(self, path: str | os.PathLike[str] | None) -> None:
        """Starts a trace of the aclnn calls, or stops it (None). read_trace() reads it."""
        self._library.standin_trace(None if path is None else os.fsencode(path))

    def launches(self) -> int:
        """How many kernels were launched so far."""
        return self._number("standin_launches")

    def deterministic(self) -> int:
        """What was set last for ACL_OPT_DETERMINISTIC, -1 if nothing was."""
        return self._number("standin_deterministic")

    def _number(self, name: str, *arguments: bytes) -> int:
        function = self._library[name]
        function.restype = ctypes.c_int64
        return int(function(*arguments))


def read_trace(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The calls of a trace in the order of phase 1; "phase2" is the record of that, or None."""
    calls: dict[int, dict[str, Any]] = {}
    for line in Path(path).read_text().splitlines():
        record = json.loads(line)
        if record["phase"] == 1:
            calls[record["call"]] = {**record, "phase2": None}
        elif record["call"] in calls:
            calls[record["call"]]["phase2"] = record
    return list(calls.values())


def normalised(value: Any, storages: dict[int, int]) -> Any:
    """Arguments with each address replaced by the number of its first appearance."""
    if isinstance(value, list):
        return [normalised(item, storages) for item in value]
    if isinstance(value, dict):  # a tensor
        return {**value, "data": storages.setdefault(value["data"], len(storages))}
    return value


def load(out_dir: str | os.PathLike[str], variant: str = "current") -> Standin:
    """Loads a variant that build.build made, then torch and torch_npu."""
    directory = Path(out_dir).resolve() / variant
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already; the stand-in for CANN has to come first")
    if not (directory / "libopapi.so").exists():
        raise FileNotFoundError(f"{directory} holds no stand-in for CANN; build.build makes it")
    for name in FOREIGN:
        os.environ.pop(name, None)
    for name in LIBRARIES:
        ctypes.CDLL(str(directory / name), mode=ctypes.RTLD_GLOBAL)
    import_torch()
    import torch

    # Others dlopen it by this name, which finds what is loaded.
    ctypes.CDLL(str(directory / "libopapi.so"), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(directory / "libstandin_aten.so"))
    return Standin(directory)


def import_torch() -> None:
    """Imports torch and torch_npu, not through the autoload, whose errors hide the cause."""
    autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    try:
        import torch  # noqa: F401
        import torch_npu  # noqa: F401
    finally:
        if autoload is None:
            del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
        else:
            os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = autoload
