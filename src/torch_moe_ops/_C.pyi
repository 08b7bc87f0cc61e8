"""Build facts of the compiled library (csrc/library.cpp)."""

compiler: str
cxx_standard: int
openmp: bool

def cpu_capability() -> str: ...
def install_npu_entry() -> None: ...
