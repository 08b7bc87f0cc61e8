"""Written by setup.py beside the library."""

TORCH_VERSION: str
CXX_FLAGS: str
