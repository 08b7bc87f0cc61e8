"""What the machine can do at best, measured in the same turns as the operators.

For bytes: the fastest of torch's copy, memmove and streaming stores on all threads. For products:
one ``torch.mm`` of the same size.
"""

import ctypes
import functools
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], Any]

_SOURCE = Path(__file__).parent / "stream_copy.cpp"


def copies(num_bytes: int) -> dict[str, Call]:
    """Ways to copy half as many bytes, which read and write ``num_bytes`` in all."""
    source = torch.ones(max(num_bytes // 2, 1), dtype=torch.uint8)
    target = torch.empty_like(source)
    calls: dict[str, Call] = {"copy_": lambda: target.copy_(source)}
    library = _compiled_copies()
    if library is None:
        return calls
    threads = torch.get_num_threads()

    def call(copy: Callable[..., None]) -> Call:
        return lambda: copy(target.data_ptr(), source.data_ptr(), source.numel(), threads)

    return calls | {"memmove": call(library.memmove_copy), "stream": call(library.stream_copy)}


def matmul(m: int, k: int, n: int, dtype: torch.dtype) -> Call:
    """One product; its right factor is stored transposed: the layout in which no dtype is slow."""
    left, right = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype).t()
    out = torch.empty(m, n, dtype=dtype)
    return lambda: torch.mm(left, right, out=out)


@functools.cache
def _compiled_copies() -> ctypes.CDLL | None:
    """stream_copy.cpp for this processor, or None without a compiler."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "stream_copy.so"
        flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        command = [os.environ.get("CXX", "c++"), *flags, str(_SOURCE), "-o", str(path)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        library = ctypes.CDLL(str(path))
    for function in (library.stream_copy, library.memmove_copy):
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        function.restype = None
    return library
