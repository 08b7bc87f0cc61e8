"""Slow definitions of the operators in plain torch: what each of them means, as code.

Every function has the name and the signature of the operator that it defines. The definitions are
written to be read: no kernels, no checks (valid input is assumed), differentiable by ordinary
autograd in every floating input, and independent of the compiled library. Tests compare the real
operators with them; use them to understand an operator or to debug a model.

Letters: T tokens, K choices per token, n = T * K slots (slot ``i = t * K + k`` unless stated
otherwise), E experts, C capacity, H hidden size, M rows that are present. A "row" is a row of the
permuted (or expanded) tensor; an index tensor maps each slot to its row.
"""

from .alltoallv_grouped_matmul import alltoallv_grouped_matmul, grouped_matmul_alltoallv
from .finalize_routing_v2 import (
    finalize_routing_v2,
    finalize_routing_v2_grad,
)
from .grouped_matmul import grouped_matmul, grouped_matmul_weight_grad
from .init_routing_v2 import init_routing_v2, init_routing_v2_grad
from .swiglu import swiglu, swiglu_grad
from .token_permute import token_permute, token_permute_grad
from .token_unpermute import token_unpermute, token_unpermute_grad

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
