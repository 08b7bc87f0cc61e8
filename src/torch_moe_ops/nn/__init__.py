"""Mixture-of-experts layers made of the public operators and plain torch.

Nothing in here has a kernel of its own: :class:`MoE` is the shortest way to use the operators, and
an example of how to put them together.

With an ``ep_group`` the experts of a layer are spread over the ranks of a process group; the
functions for gradients, clipping and checkpoints of such a model are here as well.

Dimension letters. A local tensor name ends in the letters of its shape, a public name does not:

    ====  =============================================================================
    T     tokens: all leading dimensions of the input, flattened
    K     choices per token (top-k)
    E     experts
    C     capacity: the rows that one expert takes at most
    M     rows that the experts work on: T * K, or E * C with a capacity
    H     hidden size
    I     intermediate size of an expert
    R     rows that arrive at the experts of this rank
    ====  =============================================================================
"""

from .expert_parallel import average_expert_gradients, clip_grad_norm_, expert_parameters
from .expert_state import dtensor_expert_state, gather_expert_state, slice_expert_state
from .experts import GroupedSwiGLU, SwiGLU
from .losses import load_balancing_loss, router_z_loss
from .moe import MoE, MoEOutput
from .router import RouterOutput, TopKRouter

__all__ = [
    "GroupedSwiGLU",
    "MoE",
    "MoEOutput",
    "RouterOutput",
    "SwiGLU",
    "TopKRouter",
    "average_expert_gradients",
    "clip_grad_norm_",
    "dtensor_expert_state",
    "expert_parameters",
    "gather_expert_state",
    "load_balancing_loss",
    "router_z_loss",
    "slice_expert_state",
]
