"""The schemas are public: names, order, types and defaults of the arguments cannot change."""

import pytest
import torch

SCHEMAS = """
moe::token_permute(Tensor tokens, Tensor indices, SymInt? num_out_tokens=None,
    bool padded_mode=False) -> (Tensor permuted_tokens, Tensor sorted_indices)
moe::token_permute_grad(Tensor permuted_output_grad, Tensor sorted_indices, SymInt num_topk,
    bool padded_mode=False) -> Tensor
moe::token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None,
    bool padded_mode=False, SymInt[]? restore_shape=None) -> Tensor
moe::token_unpermute_grad(Tensor permuted_tokens, Tensor unpermuted_tokens_grad,
    Tensor sorted_indices, Tensor? probs=None, bool padded_mode=False,
    SymInt[]? restore_shape=None) -> (Tensor permuted_tokens_grad, Tensor probs_grad)
moe::init_routing_v2(Tensor x, Tensor expert_idx, *, SymInt active_num=0, SymInt expert_capacity=0,
    SymInt expert_num=0, int drop_pad_mode=0, int expert_tokens_count_or_cumsum_flag=0,
    bool expert_tokens_before_capacity_flag=False) -> (Tensor expanded_x, Tensor expanded_row_idx,
    Tensor expert_tokens_count_or_cumsum, Tensor expert_tokens_before_capacity)
moe::init_routing_v2_grad(Tensor grad_expanded_x, Tensor expanded_row_idx, SymInt top_k,
    int drop_pad_mode=0, SymInt active_num=0) -> Tensor
moe::finalize_routing_v2(Tensor expanded_x, Tensor expanded_row_idx, Tensor? x1=None,
    Tensor? x2=None, Tensor? bias=None, Tensor? scales=None, Tensor? expert_idx=None, *,
    int drop_pad_mode=0) -> Tensor
moe::finalize_routing_v2_grad(Tensor grad_y, Tensor expanded_row_idx, Tensor? expanded_x=None,
    Tensor? scales=None, Tensor? expert_idx=None, Tensor? bias=None, *, int drop_pad_mode=0,
    SymInt active_num=0, SymInt expert_num=0, SymInt expert_capacity=0)
    -> (Tensor grad_expanded_x, Tensor grad_scales)
moe::grouped_matmul(Tensor x, Tensor weight, Tensor group_list, *, bool trans_weight=False,
    int group_list_type=1) -> Tensor
moe::grouped_matmul_weight_grad(Tensor x, Tensor grad_y, Tensor group_list, *,
    bool trans_weight=False, int group_list_type=1) -> Tensor
"""


def frozen() -> dict[str, str]:
    texts = [" ".join(part.split()) for part in SCHEMAS.split("moe::") if part.strip()]
    return {text.partition("(")[0]: f"moe::{text}" for text in texts}


@pytest.mark.parametrize("op", frozen())
def test_schema(op: str) -> None:
    packet = getattr(torch.ops.moe, op)
    assert packet.overloads() == ["default"]
    assert str(packet.default._schema) == frozen()[op]


@pytest.mark.parametrize("op", frozen())
@pytest.mark.parametrize("key", ["CPU", "Meta", "Autograd"])
def test_kernel(op: str, key: str) -> None:
    """A CPU kernel and a shape function of its own, and a gradient formula."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"moe::{op}", key)
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(
        f"moe::{op}", "CompositeImplicitAutograd"
    )
