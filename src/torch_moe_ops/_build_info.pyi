"""Written by setup.py beside the library."""

TORCH_VERSION: str
TORCH_NPU_VERSION: str
CXX_FLAGS: str
