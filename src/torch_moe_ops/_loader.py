"""Loads the compiled library, and says in one line what is wrong where it cannot be loaded."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import torch

_PACKAGE = Path(__file__).parent
_REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps <the torch_moe_ops source>"


def _built_for() -> str:
    """The torch version the library was compiled against, read before any symbol is looked up."""
    try:
        from torch_moe_ops._build_info import TORCH_VERSION
    except ImportError as error:
        raise ImportError(
            f"torch_moe_ops at {_PACKAGE} has not been built: its library _C is "
            f"missing. Build it with: {_REBUILD}"
        ) from error
    return TORCH_VERSION


def _release(version: str) -> str:
    """Major and minor release: builds of one torch minor share their C++ interface."""
    return ".".join(version.split("+")[0].split(".")[:2])


def load_library() -> ModuleType:
    """Imports torch_moe_ops._C, which registers ``torch.ops.moe``.

    Raises:
        ImportError: The library was not built, was built for another torch, or another copy of it
            is in the process already.
    """
    built_for = _built_for()
    if _release(built_for) != _release(torch.__version__):
        raise ImportError(
            f"torch_moe_ops was built for torch {built_for}, this is torch {torch.__version__}. "
            f"Build it again with: {_REBUILD}"
        )
    library = importlib.import_module("torch_moe_ops._C")
    registered_by = Path(torch.ops.moe._library_path())
    if not registered_by.parent.samefile(_PACKAGE):
        raise ImportError(
            f"the moe operators are registered already by {registered_by}; the torch_moe_ops at "
            f"{_PACKAGE} is a second copy. Keep one of them on the path."
        )
    torch.ops.loaded_libraries.add(str(registered_by))
    return library
