"""The memory allocator that a run is measured with.

By default glibc gives every large tensor back to the system when it is freed, and the next one is
made of fresh pages whose first touch costs several times what a kernel does. To time kernels,
memory has to be kept; to see how much a call needs, nothing may be.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
RETURN_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 14),
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
}
_KNOWN = KEEP_MEMORY.keys() | RETURN_MEMORY.keys()


def restart_with(settings: Mapping[str, str]) -> None:
    """Starts this program anew with such an allocator, unless it runs with one.

    glibc reads its settings when a process begins, so there is no other way.
    """
    others = {name: value for name, value in os.environ.items() if name not in _KNOWN}
    if os.environ != {**others, **settings}:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**others, **settings})


def describe() -> str:
    """The allocator settings of this process in one line."""
    shown = _KNOWN | {"THP_MEM_ALLOC_ENABLE"}
    settings = [f"{name}={value}" for name, value in os.environ.items() if name in shown]
    preloaded = [Path(name).name for name in os.environ.get("LD_PRELOAD", "").split(":") if name]
    return " ".join([*sorted(settings), *preloaded]) or "system default"
