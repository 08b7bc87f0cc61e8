"""The operators, one module each: public function, gradient formulas, autocast rule.

Dimension letters, in docstrings and at the end of local tensor names: T tokens, K choices per
token, n = T·K slots (slot ``i = t * K + k``), E experts, C capacity, M rows of a permuted tensor,
H hidden size, I intermediate size of an expert.
"""

from torch_moe_ops.ops.alltoallv_grouped_matmul import (
    alltoallv_grouped_matmul,
    grouped_matmul_alltoallv,
)
from torch_moe_ops.ops.finalize_routing_v2 import finalize_routing_v2, finalize_routing_v2_grad
from torch_moe_ops.ops.grouped_matmul import grouped_matmul, grouped_matmul_weight_grad
from torch_moe_ops.ops.init_routing_v2 import init_routing_v2, init_routing_v2_grad
from torch_moe_ops.ops.swiglu import swiglu, swiglu_grad
from torch_moe_ops.ops.token_permute import token_permute, token_permute_grad
from torch_moe_ops.ops.token_unpermute import token_unpermute, token_unpermute_grad

__all__ = [
    "alltoallv_grouped_matmul",
    "finalize_routing_v2",
    "finalize_routing_v2_grad",
    "grouped_matmul",
    "grouped_matmul_alltoallv",
    "grouped_matmul_weight_grad",
    "init_routing_v2",
    "init_routing_v2_grad",
    "swiglu",
    "swiglu_grad",
    "token_permute",
    "token_permute_grad",
    "token_unpermute",
    "token_unpermute_grad",
]
