"""Build facts of the compiled library (csrc/library.cpp)."""

from torch import Tensor

compiler: str
cxx_standard: int
openmp: bool

def cpu_capability() -> str: ...
def exchange_counts(send_counts: Tensor, group: str) -> tuple[int, list[list[int]]]: ...
def install_npu_entry() -> None: ...
