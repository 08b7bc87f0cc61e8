"""The fused mixture-of-experts operators of Ascend's CANN for PyTorch.

Importing the package registers ``torch.ops.moe.*``. Each operator also has a typed function here;
``torch_moe_ops.nn`` holds a layer built from them, ``torch_moe_ops.reference`` their slow
definitions. ``python -m torch_moe_ops.info`` tells what is usable on this machine.
"""

from importlib.metadata import PackageNotFoundError, version

from torch_moe_ops._loader import load_library

# The operators must exist before their Python halves refer to them.
load_library()

from torch_moe_ops import _npu  # noqa: E402

_npu.start()

from torch_moe_ops.distributed import ExpertCounts, exchange_counts  # noqa: E402
from torch_moe_ops.ops import *  # noqa: E402, F403
from torch_moe_ops.ops import __all__ as _op_names  # noqa: E402

try:
    __version__ = version("torch_moe_ops")
except PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["ExpertCounts", "__version__", "exchange_counts", *_op_names]
