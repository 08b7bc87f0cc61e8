"""Our operators and torch_npu's own ones give CANN the same calls, argument by argument.

Compared are the records that the stand-in makes of an aclnn call: dtypes, shapes, strides, offsets,
formats, storage sizes, numbers, nulls, which tensors share a storage, the workspace and phase 2.
Helper launches around it (zeros, masks) are not: only the MoE, grouped matmul and SwiGLU functions
are.

Not compared, because our call differs by intent:
- int64 row maps and expert ids of anything but token_permute: the kernels want int32, torch_npu
  passes them on and is refused. Strided ones: ours are new tensors, with checked values.
- no row asked for, and empty tensors: torch_npu passes numOutTokens 0, which means all.
- token_unpermute_grad with fewer rows than slots: torch_npu's call lets the kernel of CANN 9.1
  write past its buffers; ours has as many rows as slots. Nor with the old
  npu_moe_token_unpermute_grad, which torch_npu's autograd no longer calls: it always passes the
  rows, and [SLOTS] as the shape to restore, which no kernel reads.
- finalize_routing_v2 of float16 rows on A2 and A3: the kernel would round every step, ours gets
  float32. With fewer experts than choices, or rows cut off: the kernel refuses or misreads them.
  Strided scales in its drop/pad modes on A2 and A3: ours have 0 where a slot was dropped.
- Rows that are not read, which the kernel of token_unpermute's gradient wants without probs in old
  releases and on 950: ours is the output, torch_npu keeps the rows of the forward.
- Absent lists with TASK_QUEUE_ENABLE=2: torch_npu's deferred calls have empty ones, ours null.
- swiglu of strided tensors or more than 8 dimensions: the documents exclude them, ours are packed
  matrices.
- grouped_matmul with a size of 1, which reads as transposed, or one group; strided matrices: the
  kernel reads transposition off the strides, ours are packed first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

import torch_moe_ops
from tests.cann.bootstrap import Standin, normalised, read_trace
from tests.npu.settings import HAS_V5, ON_950, QUEUE, RELEASE
from tests.ops import data

Call = Callable[[], object]
AssertSame = Callable[..., None]

moe = torch.ops.moe
GROUPED_MATMUL = "aclnnGroupedMatmulV5" if HAS_V5 else "aclnnGroupedMatmulV4"
# Without probs the rows are not read, but the kernels of old releases and Ascend 950 want them.
NEEDS_PERMUTED = ON_950 or RELEASE < "9.1"
ONE_OUTPUT = {"split_item": 2, "group_type": 0}  # 3 would mean the same
EXACT = ("aclnnMoe", "aclnnGroupedMatmul", "aclnnSwiGlu")
TOKENS, TOP_K, WIDTH, EXPERTS, CAPACITY = 5, 2, 8, 4, 3
SLOTS = TOKENS * TOP_K
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FINALIZE_DTYPES = DTYPES if ON_950 else DTYPES[:2]  # see above

by_index_dtype = pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Float tensors as they are passed: packed or views, which neither side copies.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "packed": lambda tensor: tensor,
    **{name: data.LAYOUTS[name] for name in ("sliced", "padded_rows", "shifted", "transposed")},
}
by_layout = pytest.mark.parametrize("layout", LAYOUTS)


def floats(*shape: int, dtype: torch.dtype) -> Tensor:
    return data.Values(dtype)(*shape).npu()


def records(
    standin: Standin, path: Path, call: Call, unread: tuple[int, int] | None = None
) -> list[dict[str, Any]]:
    """What CANN was called with, without the numbers of the calls.

    Of the ``unread`` tensor (numbers of the call and of the argument) only dtype and shape stay.
    """
    torch.npu.synchronize()
    standin.trace(path)
    try:
        call()
        torch.npu.synchronize()
    finally:
        standin.trace(None)
    found = [record for record in read_trace(path) if record["api"].startswith(EXACT)]
    if unread is not None:
        tensor = found[unread[0]]["args"][unread[1]]
        found[unread[0]]["args"][unread[1]] = str((tensor["dtype"], tensor["shape"]))
    for record in found:
        del record["call"], record["phase2"]["call"]
        if QUEUE == "2":  # see above
            record["args"] = [None if argument == [] else argument for argument in record["args"]]
        record["args"] = normalised(record["args"], {})
    return found


@pytest.fixture
def assert_same(standin: Standin, tmp_path: Path) -> AssertSame:
    """Asserts that two calls launch these aclnn functions, with the same arguments."""

    def compare(
        apis: list[str], ours: Call, theirs: Call, unread: tuple[int, int] | None = None
    ) -> None:
        found = records(standin, tmp_path / "ours", ours, unread)
        expected = records(standin, tmp_path / "theirs", theirs, unread)
        assert found == expected
        assert [record["api"] for record in found] == apis
        assert all(record["status"] == record["phase2"]["status"] == 0 for record in found)

    return compare


def test_records_tell_calls_apart(standin: Standin, tmp_path: Path) -> None:
    """The comparison sees a stride, a storage size, a number, and a shared storage."""
    x = floats(SLOTS, WIDTH, dtype=torch.float32)
    index = data.row_map(data.UNEVEN).npu()

    def record(grad: Tensor, top_k: int = TOP_K) -> list[dict[str, Any]]:
        call = lambda: moe.token_permute_grad(grad, index, top_k)  # noqa: E731
        return records(standin, tmp_path / "trace", call)

    plain = record(x)
    assert plain == record(x.clone())
    assert plain[0]["args"][0]["stride"] == [WIDTH, 1]
    for other in (record(data.padded_rows(x)), record(data.shifted(x)), record(x, 1)):
        assert other != plain
    twice = [{"data": 17}, [{"data": 19}, {"data": 17}]]
    assert normalised(twice, {}) == [{"data": 0}, [{"data": 1}, {"data": 0}]]


@pytest.mark.parametrize("num_out_tokens", [None, 1, 7, SLOTS, SLOTS + 3, -1, -7])
@by_layout
@by_index_dtype
@by_dtype
def test_token_permute(
    assert_same: AssertSame,
    dtype: torch.dtype,
    index_dtype: torch.dtype,
    layout: str,
    num_out_tokens: int | None,
) -> None:
    tokens = LAYOUTS[layout](floats(TOKENS, WIDTH, dtype=dtype))
    indices = LAYOUTS[layout](data.UNEVEN.to(index_dtype).npu())
    assert_same(
        ["aclnnMoeTokenPermute"],
        lambda: torch_moe_ops.token_permute(tokens, indices, num_out_tokens),
        lambda: torch_npu.npu_moe_token_permute(tokens, indices, num_out_tokens),
    )


@by_index_dtype
@pytest.mark.parametrize("shape", [(TOKENS,), (TOKENS, 1)], ids=["1-D", "2-D"])
@by_dtype
def test_token_permute_of_one_choice(
    assert_same: AssertSame, dtype: torch.dtype, shape: tuple[int, ...], index_dtype: torch.dtype
) -> None:
    tokens = floats(TOKENS, WIDTH, dtype=dtype)
    indices = data.UNEVEN[:, 0].reshape(shape).to(index_dtype).npu()
    assert_same(
        ["aclnnMoeTokenPermute"],
        lambda: torch_moe_ops.token_permute(tokens, indices),
        lambda: torch_npu.npu_moe_token_permute(tokens, indices),
    )


@by_layout
@pytest.mark.parametrize("top_k", [1, TOP_K])
@pytest.mark.parametrize("rows", [SLOTS, 7])
@by_dtype
def test_token_permute_grad(
    assert_same: AssertSame, dtype: torch.dtype, rows: int, top_k: int, layout: str
) -> None:
    grad = LAYOUTS[layout](floats(rows, WIDTH, dtype=dtype))
    index = data.row_map(data.UNEVEN).npu()
    tokens = SLOTS // top_k
    assert_same(
        ["aclnnMoeTokenPermuteGrad"],
        lambda: moe.token_permute_grad(grad, index, top_k),
        lambda: torch_npu.npu_moe_token_permute_grad_v2(grad, index, tokens, dtype, top_k),
    )


@pytest.mark.parametrize("rows", [None, 7])
@by_dtype
def test_backward_of_token_permute(
    assert_same: AssertSame, dtype: torch.dtype, rows: int | None
) -> None:
    tokens = floats(TOKENS, WIDTH, dtype=dtype).requires_grad_()
    indices = data.UNEVEN.npu()
    grad = floats(rows or SLOTS, WIDTH, dtype=dtype)
    assert_same(
        ["aclnnMoeTokenPermute", "aclnnMoeTokenPermuteGrad"],
        lambda: torch.autograd.grad(
            torch_moe_ops.token_permute(tokens, indices, rows)[0], tokens, grad
        ),
        lambda: torch.autograd.grad(
            torch_npu.npu_moe_token_permute(tokens, indices, rows)[0], tokens, grad
        ),
    )


def probs_of(kind: str, dtype: torch.dtype) -> Tensor | None:
    """No weights, weights of the rows' dtype or float32 ones; for one or for more choices."""
    if kind == "none":
        return None
    top_k = 1 if kind == "one choice" else TOP_K
    chosen = torch.float32 if kind == "float32" else dtype
    return floats(SLOTS // top_k, top_k, dtype=chosen)


by_probs = pytest.mark.parametrize("kind", ["none", "same", "float32", "one choice"])


@by_layout
@pytest.mark.parametrize("rows", [SLOTS, 7])
@by_probs
@by_dtype
def test_token_unpermute(
    assert_same: AssertSame, dtype: torch.dtype, kind: str, rows: int, layout: str
) -> None:
    permuted = LAYOUTS[layout](floats(rows, WIDTH, dtype=dtype))
    index = data.row_map(data.UNEVEN).npu()
    probs = probs_of(kind, dtype)
    probs = None if probs is None else LAYOUTS[layout](probs)
    assert_same(
        ["aclnnMoeTokenUnpermute"],
        lambda: torch_moe_ops.token_unpermute(permuted, index, probs),
        lambda: torch_npu.npu_moe_token_unpermute(permuted, index, probs),
    )


@by_layout
@by_probs
@by_dtype
def test_token_unpermute_grad(
    assert_same: AssertSame, dtype: torch.dtype, kind: str, layout: str
) -> None:
    permuted = LAYOUTS[layout](floats(SLOTS, WIDTH, dtype=dtype))
    index = data.row_map(data.UNEVEN).npu()
    probs = probs_of(kind, dtype)
    tokens = SLOTS if probs is None else probs.shape[0]
    grad = LAYOUTS[layout](floats(tokens, WIDTH, dtype=dtype))
    # What torch_npu's autograd keeps for its backward, see the next test.
    kept = permuted if probs is not None or NEEDS_PERMUTED else None
    assert_same(
        ["aclnnMoeTokenUnpermuteGrad"],
        lambda: moe.token_unpermute_grad(permuted, grad, index, probs),
        lambda: torch_npu.npu_moe_token_unpermute_grad_v2(
            grad, index, SLOTS, dtype, probs, permuted_tokens=kept
        ),
        unread=(0, 0) if probs is None and NEEDS_PERMUTED else None,
    )


@by_probs
@by_dtype
def test_backward_of_token_unpermute(
    assert_same: AssertSame, dtype: torch.dtype, kind: str
) -> None:
    permuted = floats(SLOTS, WIDTH, dtype=dtype)
    index = data.row_map(data.UNEVEN).npu()
    probs = probs_of(kind, dtype)
    grad = floats(SLOTS if probs is None else probs.shape[0], WIDTH, dtype=dtype)

    def run(unpermute: Callable[..., Tensor]) -> Call:
        def call() -> None:
            weights = None if probs is None else probs.detach().requires_grad_()
            unpermute(permuted.detach().requires_grad_(), index, weights).backward(grad)

        return call

    assert_same(
        ["aclnnMoeTokenUnpermute", "aclnnMoeTokenUnpermuteGrad"],
        run(torch_moe_ops.token_unpermute),
        run(torch_npu.npu_moe_token_unpermute),
        unread=(1, 0) if probs is None and NEEDS_PERMUTED else None,
    )


def finalize_inputs(
    mode: int, dtype: torch.dtype, given: str, layout: str
) -> tuple[Tensor | None, ...]:
    """expanded_x, expanded_row_idx, x1, x2, bias, scales, expert_idx."""
    given = "x1 x2 bias scales" if given == "all" else given
    make = lambda *shape: LAYOUTS[layout](floats(*shape, dtype=dtype))  # noqa: E731
    top_k = TOP_K if "scales" in given else 1
    tokens = SLOTS // top_k
    if mode in (1, 3):
        expanded = make(EXPERTS, CAPACITY, WIDTH)
        rows = data.capacity_map(data.UNEVEN, CAPACITY)
    else:
        expanded = make(SLOTS, WIDTH)
        rows = data.row_map(data.UNEVEN)
    if mode < 2:
        rows = data.k_major(rows, top_k)
    scales = None
    if "scales" in given:
        wide = torch.float32 if "float32" in given else dtype
        scales = floats(tokens, top_k, dtype=wide)
        if ON_950 or mode in (0, 2):  # see above
            scales = LAYOUTS[layout](scales)
    return (
        expanded,
        rows.npu(),
        make(tokens, WIDTH) if "x1" in given else None,
        make(tokens, WIDTH) if "x2" in given else None,
        make(EXPERTS, WIDTH) if "bias" in given else None,
        scales,
        data.UNEVEN.int().reshape(tokens, top_k).npu() if "bias" in given else None,
    )


GIVEN = ["nothing", "scales", "scales float32", "scales bias", "scales x1", "x1 x2", "bias", "all"]


@pytest.mark.parametrize("layout", ["packed", "padded_rows", "shifted"])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("dtype", FINALIZE_DTYPES, ids=str)
def test_finalize_routing_v2(
    assert_same: AssertSame, dtype: torch.dtype, mode: int, given: str, layout: str
) -> None:
    rows, index, x1, x2, bias, scales, experts = finalize_inputs(mode, dtype, given, layout)
    assert_same(
        ["aclnnMoeFinalizeRoutingV2"],
        lambda: moe.finalize_routing_v2(
            rows, index, x1, x2, bias, scales, experts, drop_pad_mode=mode
        ),
        lambda: torch_npu.npu_moe_finalize_routing(
            rows, x1, x2, bias, scales, index, experts, mode
        ),
    )


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 8)], ids=str)
@pytest.mark.parametrize("layout", ["packed", "shifted"])  # others are packed first, see above
@by_dtype
def test_swiglu_and_its_backward(
    assert_same: AssertSame, dtype: torch.dtype, layout: str, shape: tuple[int, ...]
) -> None:
    x = LAYOUTS[layout](floats(*shape, dtype=dtype))
    grad = LAYOUTS[layout](floats(*shape[:-1], shape[-1] // 2, dtype=dtype))

    def run(activation: Callable[[Tensor], Tensor]) -> Call:
        return lambda: activation(x.detach().requires_grad_()).backward(grad)

    assert_same(
        ["aclnnSwiGlu", "aclnnSwiGluGrad"],
        run(torch_moe_ops.swiglu),
        run(torch_npu.npu_swiglu),
    )


def group_list(list_type: int) -> Tensor:
    """Ends of the groups (0) or their sizes (1); the second is empty."""
    return torch.tensor([[3, 3, 8, SLOTS], [3, 0, 5, SLOTS - 8]][list_type]).npu()


@pytest.mark.parametrize("layout", ["packed", "shifted"])  # others are packed first, see above
@pytest.mark.parametrize("list_type", [0, 1])
@pytest.mark.parametrize("trans_weight", [False, True])
@by_dtype
class TestGroupedMatmul:
    def test_forward(
        self,
        assert_same: AssertSame,
        dtype: torch.dtype,
        trans_weight: bool,
        list_type: int,
        layout: str,
    ) -> None:
        """torch_npu has no flag: it takes the transposed view."""
        x = LAYOUTS[layout](floats(SLOTS, WIDTH, dtype=dtype))
        shape = (EXPERTS, 6, WIDTH) if trans_weight else (EXPERTS, WIDTH, 6)
        weight = LAYOUTS[layout](floats(*shape, dtype=dtype))
        view = weight.transpose(1, 2) if trans_weight else weight
        groups = group_list(list_type)
        assert_same(
            [GROUPED_MATMUL],
            lambda: torch_moe_ops.grouped_matmul(
                x, weight, groups, trans_weight=trans_weight, group_list_type=list_type
            ),
            lambda: torch_npu.npu_grouped_matmul(
                [x], [view], group_list=groups, group_list_type=list_type, **ONE_OUTPUT
            ),
        )

    def test_weight_grad(
        self,
        assert_same: AssertSame,
        dtype: torch.dtype,
        trans_weight: bool,
        list_type: int,
        layout: str,
    ) -> None:
        x = LAYOUTS[layout](floats(SLOTS, WIDTH, dtype=dtype))
        grad = LAYOUTS[layout](floats(SLOTS, 6, dtype=dtype))
        left, right = (grad, x) if trans_weight else (x, grad)
        groups = group_list(list_type)
        options = {**ONE_OUTPUT, "group_type": 2, "group_list_type": list_type}
        assert_same(
            [GROUPED_MATMUL],
            lambda: moe.grouped_matmul_weight_grad(
                x, grad, groups, trans_weight=trans_weight, group_list_type=list_type
            ),
            lambda: torch_npu.npu_grouped_matmul([left.t()], [right], group_list=groups, **options),
        )
