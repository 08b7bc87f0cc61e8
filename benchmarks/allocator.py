"""The memory allocator that a run is measured with.

By default glibc gives every large tensor back to the system when it is freed, and the next one is
made of fresh pages whose first touch costs several times what a kernel does. To time kernels,
memory has to be kept.
"""

import os
import sys
from pathlib import Path

KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


def restart_keeping_memory() -> None:
    """Starts this program anew with an allocator that keeps memory, unless it runs with one.

    glibc reads its settings when a process begins, so there is no other way.
    """
    if any(os.environ.get(name) != value for name, value in KEEP_MEMORY.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | KEEP_MEMORY)


def describe() -> str:
    """The allocator settings of this process in one line."""
    settings = [f"{name}={value}" for name, value in os.environ.items() if name in KEEP_MEMORY]
    preloaded = [Path(name).name for name in os.environ.get("LD_PRELOAD", "").split(":") if name]
    return " ".join([*sorted(settings), *preloaded]) or "system default"
