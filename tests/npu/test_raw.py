"""torch_moe_ops._C_npu: the bare aclnn functions, and what it tells of the CANN that it found."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_moe_ops
from tests.cann.bootstrap import Standin, read_trace
from tests.npu.settings import HAS_V5, ON_950, RELEASE, SOC_NAME
from tests.ops import data
from torch_moe_ops import _C_npu, reference

# How the entry points that are generated say that tiling refused.
TILING = "561103 ACLNN_ERR_INNER_NULLPTR" if ON_950 else "561002 ACLNN_ERR_INNER_TILING_ERROR"

# The same codes for every product where an entry point is generated for all of them.
INVALID, TILED = "161002 ACLNN_ERR_PARAM_INVALID", "561002 ACLNN_ERR_INNER_TILING_ERROR"

TOKENS, TOP_K, WIDTH, EXPERTS, CAPACITY = 5, 2, 3, 4, 2
SLOTS = TOKENS * TOP_K
IDS = data.UNEVEN.int()
ROWS = data.row_map(IDS)
values = data.Values(torch.float32)
# None stands for an output, which has the shape and dtype of the expected value.
Raw = tuple[list[Any], list[Tensor]]
OUT = object()


def token_permute() -> Raw:
    x = values(TOKENS, WIDTH)
    return [x, IDS, 7, False, OUT, OUT], list(reference.token_permute(x, IDS, 7))


def token_permute_grad() -> Raw:
    grad = values(SLOTS, WIDTH)
    expected = reference.token_permute_grad(grad, ROWS, TOP_K)
    return [grad, ROWS, TOP_K, False, OUT], [expected]


def token_unpermute() -> Raw:
    rows, probs = values(SLOTS, WIDTH), values(TOKENS, TOP_K)
    return [rows, ROWS, probs, False, [1], OUT], [reference.token_unpermute(rows, ROWS, probs)]


def token_unpermute_grad() -> Raw:
    rows, grad, probs = values(SLOTS, WIDTH), values(TOKENS, WIDTH), values(TOKENS, TOP_K)
    expected = reference.token_unpermute_grad(rows, grad, ROWS, probs)
    return [rows, grad, ROWS, probs, False, None, OUT, OUT], list(expected)


def init_routing_v2() -> Raw:
    x = values(TOKENS, WIDTH)
    rows, index, _, before = reference.init_routing_v2(
        x,
        IDS,
        expert_capacity=CAPACITY,
        expert_num=EXPERTS,
        drop_pad_mode=1,
        expert_tokens_before_capacity_flag=True,
    )
    arguments = [x, IDS, 0, CAPACITY, EXPERTS, 1, 0, True, OUT, OUT, None, OUT]
    return arguments, [rows, index, before]


def init_routing_v2_grad() -> Raw:
    grad = values(SLOTS, WIDTH)
    return [grad, ROWS, TOP_K, 0, 0, OUT], [reference.init_routing_v2_grad(grad, ROWS, TOP_K)]


def finalize_routing_v2() -> Raw:
    rows, skips = values(SLOTS, WIDTH), [values(TOKENS, WIDTH), values(TOKENS, WIDTH)]
    bias, scales = values(EXPERTS, WIDTH), values(TOKENS, TOP_K)
    given = [rows, ROWS, *skips, bias, scales, IDS]
    return [*given, 2, OUT], [reference.finalize_routing_v2(*given, drop_pad_mode=2)]


def finalize_routing_v2_grad() -> Raw:
    grad, rows = values(TOKENS, WIDTH), values(SLOTS, WIDTH)
    bias, scales = values(EXPERTS, WIDTH), values(TOKENS, TOP_K)
    given = [grad, ROWS, rows, scales, IDS, bias]
    return [*given, 0, 0, 0, 0, OUT, OUT], list(reference.finalize_routing_v2_grad(*given))


def grouped_matmul(*tuning: Any) -> Raw:
    x, weight = values(SLOTS, WIDTH), values(EXPERTS, WIDTH, 6)
    groups = torch.tensor([3, 0, 5, 2])
    lists = [[x], [weight], *[None] * 6, groups, *[None] * 3]
    expected = reference.grouped_matmul(x, weight, groups)
    return [*lists, 2, 0, 1, 0, *tuning, [OUT], None, None], [expected]


def swiglu(dim: int) -> Raw:
    """The halves of another dimension than the last are those of the transposed matrix."""
    x = values(TOKENS + 1, 2 * WIDTH)
    if dim % 2 == 1:
        return [x, dim, OUT], [reference.swiglu(x)]
    return [x, dim, OUT], [reference.swiglu(x.t()).t().contiguous()]


def swiglu_grad() -> Raw:
    grad, x = values(TOKENS, WIDTH), values(TOKENS, 2 * WIDTH)
    return [grad, x, 1, OUT], [reference.swiglu_grad(grad, x)]


CALLS: dict[str, Callable[[], Raw]] = {
    "aclnnMoeTokenPermute": token_permute,
    "aclnnMoeTokenPermuteGrad": token_permute_grad,
    "aclnnMoeTokenUnpermute": token_unpermute,
    "aclnnMoeTokenUnpermuteGrad": token_unpermute_grad,
    "aclnnMoeInitRoutingV2": init_routing_v2,
    "aclnnMoeInitRoutingV2Grad": init_routing_v2_grad,
    "aclnnMoeFinalizeRoutingV2": finalize_routing_v2,
    "aclnnMoeFinalizeRoutingV2Grad": finalize_routing_v2_grad,
    "aclnnSwiGlu": lambda: swiglu(-1),
    "aclnnSwiGluGrad": swiglu_grad,
    "aclnnGroupedMatmulV4": grouped_matmul,
    "aclnnGroupedMatmulV5": lambda: grouped_matmul([]),
}


def communicating(*mode: str, permute: bool) -> list[Any]:
    """Arguments for a group that does not exist: test_expert_parallel.py runs in one that does."""
    x, weight, y = values(8, WIDTH), values(1, WIDTH, 6), values(8, 6)
    rows = [1] * 8
    given = [x, weight, None, None, None, None, "nobody", *mode, 8, rows, rows, False, False]
    return [*given, False, y, None, None] if permute else [*given, y, None]


COMMUNICATING: dict[str, list[Any]] = {
    "aclnnAlltoAllvGroupedMatMul": communicating(permute=True),
    "aclnnAlltoAllvGroupedMatMulV2": communicating("ai_cpu", permute=True),
    "aclnnGroupedMatMulAlltoAllv": communicating(permute=False),
    "aclnnGroupedMatMulAlltoAllvV2": communicating("ai_cpu", permute=False),
}
# What CANN releases before 9 lack here.
LATER = ("aclnnGroupedMatmulV5", "aclnnAlltoAllvGroupedMatMulV2", "aclnnGroupedMatMulAlltoAllvV2")
ALL = [*CALLS, *COMMUNICATING]
AVAILABLE = [api for api in ALL if HAS_V5 or api not in LATER]
by_api = pytest.mark.parametrize("api", [api for api in CALLS if api in AVAILABLE])
by_any_api = pytest.mark.parametrize("api", AVAILABLE)


def arguments_of(api: str) -> list[Any]:
    raw: Raw = (COMMUNICATING[api], []) if api in COMMUNICATING else CALLS[api]()
    return on_npu(raw)[0]


def on_npu(raw: Raw) -> tuple[list[Any], list[Tensor]]:
    """The arguments, with an output of NaN or -1 for each expected tensor, and those outputs."""
    given, expected = raw
    outputs = [torch.full_like(e, float("nan") if e.is_floating_point() else -1) for e in expected]
    outputs = [output.npu() for output in outputs]
    left = iter(outputs)

    def move(argument: Any) -> Any:
        if isinstance(argument, list):
            return [move(item) for item in argument]
        if isinstance(argument, Tensor):
            return argument.npu()
        return next(left) if argument is OUT else argument

    return [move(argument) for argument in given], outputs


@by_api
def test_values(api: str) -> None:
    raw = CALLS[api]()
    arguments, outputs = on_npu(raw)
    assert getattr(_C_npu, api)(*arguments) is None
    torch.testing.assert_close([output.cpu() for output in outputs], raw[1])


def test_swiglu_of_the_first_dimension() -> None:
    raw = swiglu(-2)
    arguments, outputs = on_npu(raw)
    _C_npu.aclnnSwiGlu(*arguments)
    torch.testing.assert_close([output.cpu() for output in outputs], raw[1])


@pytest.mark.parametrize(
    ("x", "dim", "out", "status", "reason"),
    [
        (torch.zeros(3, 4).t(), -1, torch.zeros(4, 1), INVALID, "x must not be strided"),
        (torch.zeros(3, 4), -1, torch.zeros(3, 2).half(), INVALID, "out must have the dtype of x"),
        (torch.zeros(3, 4), 2, torch.zeros(3, 2), TILED, "dim must be a dimension of x"),
        (torch.zeros(3, 4), 0, torch.zeros(1, 4), TILED, "x must be divisible by 2 in dimension"),
        (torch.zeros(3, 4), 1, torch.zeros(3, 4), TILED, "out must have shape (3, 2)"),
    ],
)
def test_refusals_of_swiglu(x: Tensor, dim: int, out: Tensor, status: str, reason: str) -> None:
    on_device = x.t().npu().t() if not x.is_contiguous() else x.npu()
    lines = refusal("aclnnSwiGlu", on_device, dim, out.npu())
    assert lines[0] == head("aclnnSwiGlu", status)
    assert lines[-1].startswith(reason)


def test_every_function_is_tried() -> None:
    assert {name for name in dir(_C_npu) if name.startswith("aclnn")} == set(ALL)


@by_any_api
def test_wrong_arguments(standin: Standin, tmp_path: Path, api: str) -> None:
    """Nothing is converted that C would read as something else, and nothing reaches CANN."""
    function = getattr(_C_npu, api)
    arguments = arguments_of(api)
    standin.trace(tmp_path / "trace")
    for wrong in (arguments[:-1], [*arguments, None], []):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            function(*wrong)
    for place, argument in enumerate(arguments):
        optional = argument is None or isinstance(argument, (Tensor, list))
        for bad in (1.5, object(), *([] if optional else [None])):
            with pytest.raises(TypeError, match="incompatible function arguments"):
                function(*arguments[:place], bad, *arguments[place + 1 :])
        for bad in [7] if isinstance(argument, str) else ["text"]:
            with pytest.raises(TypeError, match="incompatible function arguments"):
                function(*arguments[:place], bad, *arguments[place + 1 :])
    torch.npu.synchronize()
    standin.trace(None)
    # The message shows the tensors, which copies them.
    found = {record["api"] for record in read_trace(tmp_path / "trace")}
    assert found <= {"aclnnInplaceCopy"}


def refusal(api: str, *arguments: Any) -> list[str]:
    with pytest.raises(RuntimeError) as caught:
        getattr(_C_npu, api)(*arguments)
    assert type(caught.value) is RuntimeError
    return str(caught.value).splitlines()


def head(api: str, status: str) -> str:
    return (
        f"moe::{api}: {api} failed in phase 1 (GetWorkspaceSize): {status} "
        f"(CANN {RELEASE}, {SOC_NAME})"
    )


def test_null() -> None:
    x = torch.zeros(3, 4).npu()
    assert refusal("aclnnMoeTokenPermuteGrad", x, None, 1, False, x) == [
        head("aclnnMoeTokenPermuteGrad", "161001 ACLNN_ERR_PARAM_NULLPTR"),
        "  permutedOutputGrad: float32[3, 4]",
        "  sortedIndices: null",
        "  numTopk: 1",
        "  paddedMode: false",
        "  out: float32[3, 4]",
        "sortedIndices is null",
    ]


def test_wrong_dtype() -> None:
    x, rows = torch.zeros(3, 4).npu().half(), torch.arange(3).npu()
    assert refusal("aclnnMoeTokenPermuteGrad", x, rows, 1, False, x) == [
        head("aclnnMoeTokenPermuteGrad", "161002 ACLNN_ERR_PARAM_INVALID"),
        "  permutedOutputGrad: float16[3, 4]",
        "  sortedIndices: int64[3]",
        "  numTopk: 1",
        "  paddedMode: false",
        "  out: float16[3, 4]",
        "sortedIndices must be int32",
    ]


def test_padded_mode() -> None:
    """A true bool arrives."""
    x, rows = torch.zeros(3, 4).npu(), torch.arange(3).int().npu()
    lines = refusal("aclnnMoeTokenUnpermute", x, rows, None, True, [1, 2], x)
    assert "  paddedMode: true" in lines
    assert "  restoreShapeOptional: [1, 2]" in lines
    assert "paddedMode" in lines[-1]


def test_wrong_shape() -> None:
    """Tiling refuses it, of which the products have different codes."""
    x, out = torch.zeros(3, 4).npu().bfloat16(), torch.zeros(3, 5).npu().bfloat16()
    lines = refusal("aclnnMoeTokenPermuteGrad", x, torch.arange(3).int().npu(), 1, False, out)
    assert lines[0] == head("aclnnMoeTokenPermuteGrad", TILING)
    assert lines[1] == "  permutedOutputGrad: bfloat16[3, 4]"
    assert lines[5] == "  out: bfloat16[3, 5]"
    assert "(3, 4)" in lines[6]
    assert len(lines) == 7


def test_refusal_by_hand_written_entry_points() -> None:
    """The same code for every product, and names of optional arguments."""
    x, rows = torch.zeros(4, 3).npu(), torch.arange(4).int().npu()
    arguments = [x, rows, None, x, None, None, None, 2, x]
    assert refusal("aclnnMoeFinalizeRoutingV2", *arguments) == [
        head("aclnnMoeFinalizeRoutingV2", "561103 ACLNN_ERR_INNER_NULLPTR"),
        "  expandedX: float32[4, 3]",
        "  expandedRowIdx: int32[4]",
        "  x1Optional: null",
        "  x2Optional: float32[4, 3]",
        "  biasOptional: null",
        "  scalesOptional: null",
        "  expertIdxOptional: null",
        "  dropPadMode: 2",
        "  out: float32[4, 3]",
        "x1 must be given with x2",
    ]


def test_lists_in_a_refusal() -> None:
    x, weight, groups = torch.zeros(4, 3), torch.zeros(2, 3, 5), torch.tensor([2, 2])
    arguments, _ = on_npu(([[x, x], [weight], *[None] * 6, groups, *[None] * 3, 2, 0, 1, 0], []))
    lines = refusal("aclnnGroupedMatmulV4", *arguments, [x.npu()], None, None)
    assert lines[0] == head("aclnnGroupedMatmulV4", "161002 ACLNN_ERR_PARAM_INVALID")
    assert lines[1] == "  x: float32[4, 3], float32[4, 3]"
    assert lines[2] == "  weight: float32[2, 3, 5]"
    assert lines[9] == "  groupListOptional: int64[2]"
    assert lines[-1] == "x must be a list of one tensor in this stand-in"


def test_tensors_on_the_host() -> None:
    x, rows = torch.zeros(3, 4), torch.arange(3).int()
    lines = refusal("aclnnMoeTokenPermuteGrad", x.npu(), rows, 1, False, x.npu())
    assert lines[0].endswith("sortedIndices must be on an NPU, got cpu")


@pytest.mark.parametrize("api", [api for api in COMMUNICATING if api in AVAILABLE])
def test_unknown_group(api: str) -> None:
    """The text of the group's name is in the message, and nothing is left behind."""
    lines = refusal(api, *arguments_of(api))
    no_kernel, no_group = (
        "561003 ACLNN_ERR_INNER_FIND_KERNEL_ERROR",
        "361001 ACLNN_ERR_RUNTIME_ERROR",
    )
    assert lines[0] == head(api, no_kernel if "910B" in SOC_NAME else no_group)
    assert '  group: "nobody"' in lines


def test_what_is_told(standin: Standin) -> None:
    library = str(standin.directory / "libopapi.so")
    expected = {api: library if api in AVAILABLE else "" for api in ALL}
    found = _C_npu.operators()
    assert {api: path and os.path.realpath(path) for api, path in found.items()} == {
        api: path and os.path.realpath(path) for api, path in expected.items()
    }
    assert _C_npu.searched_libraries() == ["libopapi.so"]
    assert _C_npu.soc_name() == SOC_NAME
    assert _C_npu.cann_version() == f"CANN {RELEASE}"


def test_grouped_matmul_without_v5(standin: Standin, tmp_path: Path) -> None:
    """Forward and backward take V5, or V4 where CANN has no V5."""
    x = torch.zeros(4, 3).npu().requires_grad_()
    weight = torch.zeros(2, 3, 5).npu().requires_grad_()
    standin.trace(tmp_path / "trace")
    y = torch_moe_ops.grouped_matmul(x, weight, torch.tensor([2, 2]).npu())
    y.backward(torch.ones(4, 5).npu())
    torch.npu.synchronize()
    standin.trace(None)
    apis = [record["api"] for record in read_trace(tmp_path / "trace")]
    expected = "aclnnGroupedMatmulV5" if HAS_V5 else "aclnnGroupedMatmulV4"
    assert [api for api in apis if api.startswith("aclnnGrouped")] == [expected] * 3


@pytest.mark.skipif(HAS_V5, reason="this stand-in has GroupedMatmulV5")
def test_missing_function() -> None:
    arguments, _ = on_npu(CALLS["aclnnGroupedMatmulV5"]())
    with pytest.raises(NotImplementedError, match=r"^moe::aclnnGroupedMatmulV5: .* is not in the"):
        _C_npu.aclnnGroupedMatmulV5(*arguments)
