"""What the NPU kernels refuse: limits of the hardware, float64, a CANN or chip that lacks things.

Also where the functions of CANN are looked for, and the deterministic mode. What concerns a whole
process has a process of its own, in the first setting only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor
from torch.utils._pytree import tree_map

import torch_moe_ops
from tests.cann.bootstrap import Standin
from tests.npu import plugin
from tests.npu.settings import ON_950, only_in

moe = torch.ops.moe
ROOT = Path(__file__).parents[2]
in_one_setting = only_in(0)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """One zero in memory, seen as many."""
    return torch.zeros((), dtype=dtype, device="npu").expand(shape)


def ints(*shape: int) -> Tensor:
    return zeros(*shape, dtype=torch.int32)


def refusal_of(call: Callable[[], object]) -> str:
    with pytest.raises(NotImplementedError) as caught:
        call()
    return str(caught.value).splitlines()[0]


# ---- limits -------------------------------------------------------------------------------------
def ones(device: str, *shape: int) -> Tensor:
    return torch.ones((), device=device).expand(shape)


def slots(count: int, device: str = "npu") -> Tensor:
    return torch.arange(count - 1, -1, -1, dtype=torch.int32, device=device)


def grouped(device: str, inner: int, outer: int) -> Tensor:
    x, weight = ones(device, 2, inner), ones(device, 2, inner, outer)
    return moe.grouped_matmul(x, weight, torch.tensor([2, 0], device=device))


def grouped_grad(device: str, inner: int, outer: int) -> Tensor:
    x, grad = ones(device, 2, inner), ones(device, 2, outer)
    return moe.grouped_matmul_weight_grad(x, grad, torch.tensor([2, 0], device=device))


CHOICES, X_COLUMNS, Y_COLUMNS = 512, "number of columns of x", "number of columns of the output"
# A call of this size on a device, what has too much of it, and the last size that A2 and A3 take.
NOT_ON_950: dict[str, tuple[Callable[[int, str], Any], str, int]] = {
    "token_permute": (
        lambda k, on: moe.token_permute(ones(on, 1, 2), slots(k, on).view(1, k)),
        "size of indices in dimension 1",
        CHOICES,
    ),
    "token_permute_grad": (
        lambda k, on: moe.token_permute_grad(ones(on, k, 2), slots(k, on), k),
        "num_topk",
        CHOICES,
    ),
    "token_unpermute": (
        lambda k, on: moe.token_unpermute(ones(on, k, 2), slots(k, on), ones(on, 1, k)),
        "size of probs in dimension 1",
        CHOICES,
    ),
    "token_unpermute_grad": (
        lambda k, on: moe.token_unpermute_grad(
            ones(on, k, 2), ones(on, 1, 2), slots(k, on), ones(on, 1, k)
        ),
        "size of probs in dimension 1",
        CHOICES,
    ),
    "grouped_matmul x": (lambda n, on: grouped(on, n, 2), X_COLUMNS, 65535),
    "grouped_matmul output": (lambda n, on: grouped(on, 2, n), Y_COLUMNS, 65535),
    "grouped_matmul_weight_grad x": (lambda n, on: grouped_grad(on, n, 2), X_COLUMNS, 65535),
    "grouped_matmul_weight_grad output": (lambda n, on: grouped_grad(on, 2, n), Y_COLUMNS, 65535),
}


@pytest.mark.parametrize("name", NOT_ON_950)
def test_limits_of_a2_and_a3(name: str) -> None:
    """The last size works everywhere, the next on Ascend 950 only."""
    call, what, limit = NOT_ON_950[name]
    for size in (limit, limit + 1):
        if size > limit and not ON_950:
            assert refusal_of(lambda: call(limit + 1, "npu")) == (
                f"moe::{name.split()[0]}: {what} must be at most {limit} on this NPU, "
                f"got {limit + 1}"
            )
        else:
            on_npu = tree_map(Tensor.cpu, call(size, "npu"))
            torch.testing.assert_close(on_npu, call(size, "cpu"), rtol=0, atol=0)


MANY = 2**24 - 1
LIMITS: dict[str, tuple[Callable[[], object], str]] = {
    "token_permute": (
        lambda: moe.token_permute(zeros(MANY, 1), ints(MANY), 1),
        f"number of indices must be at most {MANY - 1} on this NPU, got {MANY}",
    ),
    "init_routing_v2": (
        lambda: moe.init_routing_v2(zeros(MANY, 1), ints(MANY, 1), active_num=1),
        f"number of expert_idx must be at most {MANY - 1} on this NPU, got {MANY}",
    ),
    "init_routing_v2 experts": (
        lambda: moe.init_routing_v2(zeros(1, 1), ints(1, 1), expert_num=MANY + 2),
        f"expert_num must be at most {MANY + 1} on this NPU, got {MANY + 2}",
    ),
    "grouped_matmul": (
        lambda: moe.grouped_matmul(zeros(1, 2), zeros(1025, 2, 2), zeros(1025).long()),
        "size of group_list in dimension 0 must be at most 1024 on this NPU, got 1025",
    ),
    "grouped_matmul_weight_grad": (
        lambda: moe.grouped_matmul_weight_grad(zeros(1, 2), zeros(1, 2), zeros(1025).long()),
        "size of group_list in dimension 0 must be at most 1024 on this NPU, got 1025",
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_of_every_product(name: str) -> None:
    call, text = LIMITS[name]
    assert refusal_of(call) == f"moe::{name.split()[0]}: {text}"


def test_1024_groups() -> None:
    sizes = torch.zeros(1024, dtype=torch.int64)
    sizes[-1] = 1
    weight = torch.ones(1, 2, 2).npu().expand(1024, 2, 2)
    y = moe.grouped_matmul(torch.ones(1, 2).npu(), weight, sizes.npu())
    assert y.tolist() == [[2.0, 2.0]]


# ---- dtypes -------------------------------------------------------------------------------------
def doubles(*shape: int) -> Tensor:
    return zeros(*shape, dtype=torch.float64)


FLOAT64: dict[str, tuple[Callable[[], object], str]] = {
    "token_permute": (lambda: moe.token_permute(doubles(4, 2), slots(4)), "tokens"),
    "token_permute_grad": (
        lambda: moe.token_permute_grad(doubles(4, 2), slots(4), 1),
        "permuted_output_grad",
    ),
    "token_unpermute": (lambda: moe.token_unpermute(doubles(4, 2), slots(4)), "permuted_tokens"),
    "token_unpermute probs": (
        lambda: moe.token_unpermute(zeros(4, 2), slots(4), doubles(4, 1)),
        "probs",
    ),
    "token_unpermute_grad": (
        lambda: moe.token_unpermute_grad(doubles(4, 2), doubles(4, 2), slots(4)),
        "permuted_tokens",
    ),
    "token_unpermute_grad probs": (
        lambda: moe.token_unpermute_grad(zeros(4, 2), zeros(4, 2), slots(4), doubles(4, 1)),
        "probs",
    ),
    "init_routing_v2": (lambda: moe.init_routing_v2(doubles(4, 2), ints(4, 1)), "x"),
    "init_routing_v2_grad": (
        lambda: moe.init_routing_v2_grad(doubles(4, 2), slots(4), 1),
        "grad_expanded_x",
    ),
    "finalize_routing_v2": (
        lambda: moe.finalize_routing_v2(doubles(4, 2), slots(4), drop_pad_mode=2),
        "expanded_x",
    ),
    "finalize_routing_v2 scales": (
        lambda: moe.finalize_routing_v2(
            zeros(4, 2), slots(4), scales=doubles(4, 1), drop_pad_mode=2
        ),
        "scales",
    ),
    "finalize_routing_v2_grad": (
        lambda: moe.finalize_routing_v2_grad(doubles(4, 2), slots(4)),
        "grad_y",
    ),
    "finalize_routing_v2_grad scales": (
        lambda: moe.finalize_routing_v2_grad(zeros(4, 2), slots(4), zeros(4, 2), doubles(4, 1)),
        "scales",
    ),
    "grouped_matmul": (
        lambda: moe.grouped_matmul(doubles(2, 2), doubles(2, 2, 2), slots(2)),
        "x",
    ),
    "grouped_matmul_weight_grad": (
        lambda: moe.grouped_matmul_weight_grad(doubles(2, 2), doubles(2, 2), slots(2)),
        "x",
    ),
}


@pytest.mark.parametrize("name", FLOAT64)
def test_float64(name: str) -> None:
    """Every operator, and every argument that may have a dtype of its own."""
    call, argument = FLOAT64[name]
    assert refusal_of(call) == (
        f"moe::{name.split()[0]}: {argument} must be float32, bfloat16 or float16 on an NPU, "
        "got float64"
    )


# ---- deterministic mode -------------------------------------------------------------------------
def test_private_format() -> None:
    """A tensor that torch_npu keeps in a format of its own, where strides do not tell the place."""
    torch.npu.config.allow_internal_format = True
    weight = torch_npu.empty_with_format((2, 32, 32), device="npu", acl_format=29)
    torch.npu.config.allow_internal_format = False  # the default
    x, counts = torch.ones(3, 32).npu(), torch.tensor([1, 2]).npu()
    with pytest.raises(NotImplementedError) as caught:
        torch_moe_ops.grouped_matmul(x, weight, counts)
    assert str(caught.value).startswith(
        "moe::grouped_matmul: weight must be in a plain format, got format 29 (29 is FRACTAL_NZ)"
    )


def test_deterministic_mode(standin: Standin) -> None:
    """CANN is told at every call, in the thread of the caller."""
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for wanted in (True, False, True):
            torch.use_deterministic_algorithms(wanted)
            moe.token_permute(zeros(4, 2), slots(4))
            assert standin.deterministic() == int(wanted)
    finally:
        torch.use_deterministic_algorithms(before)
    moe.token_permute(zeros(4, 2), slots(4))
    assert standin.deterministic() == int(before)


# ---- a process of its own -----------------------------------------------------------------------
PREAMBLE = """
import json, os, sys
from tests.cann import bootstrap
standin = bootstrap.load(sys.argv[1], sys.argv[2])
os.environ.update(json.loads(sys.argv[3]))
import torch, torch_moe_ops
from torch_moe_ops import _C_npu
moe = torch.ops.moe
x, rows, groups = torch.zeros(4, 2).npu(), torch.arange(4).npu(), torch.tensor([2, 2]).npu()
CALLS = {
    "token_permute": lambda: moe.token_permute(x, rows),
    "token_permute_grad": lambda: moe.token_permute_grad(x, rows, 1),
    "token_unpermute": lambda: moe.token_unpermute(x, rows),
    "token_unpermute_grad": lambda: moe.token_unpermute_grad(x, x, rows),
    "init_routing_v2": lambda: moe.init_routing_v2(x, rows),
    "init_routing_v2_grad": lambda: moe.init_routing_v2_grad(x, rows, 1),
    "finalize_routing_v2": lambda: moe.finalize_routing_v2(x, rows, drop_pad_mode=2),
    "finalize_routing_v2_grad": lambda: moe.finalize_routing_v2_grad(x, rows),
    "grouped_matmul": lambda: moe.grouped_matmul(x, torch.zeros(2, 2, 3).npu(), groups),
    "grouped_matmul_weight_grad": lambda: moe.grouped_matmul_weight_grad(x, x, groups),
    "swiglu": lambda: moe.swiglu(x),
    "swiglu_grad": lambda: moe.swiglu_grad(x[:, :1], x),
}
def outcome(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"
def tell(result):
    torch.npu.synchronize()
    with open(sys.argv[4], "w") as file:
        json.dump(result, file)
"""


def in_process(
    code: str, result: Path, variant: str = "current", environment: dict[str, str] | None = None
) -> Any:
    """What the code gave to tell(); `environment` is set once torch_npu has been imported."""
    arguments = [os.environ[plugin.DIRECTORY], variant, json.dumps(environment or {}), result]
    command = [sys.executable, "-c", PREAMBLE + code, *arguments]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(result.read_text())


FUNCTIONS = {
    "token_permute": "aclnnMoeTokenPermute",
    "token_permute_grad": "aclnnMoeTokenPermuteGrad",
    "token_unpermute": "aclnnMoeTokenUnpermute",
    "token_unpermute_grad": "aclnnMoeTokenUnpermuteGrad",
    "init_routing_v2": "aclnnMoeInitRoutingV2",
    "init_routing_v2_grad": "aclnnMoeInitRoutingV2Grad",
    "finalize_routing_v2": "aclnnMoeFinalizeRoutingV2",
    "finalize_routing_v2_grad": "aclnnMoeFinalizeRoutingV2Grad",
    "grouped_matmul": "aclnnGroupedMatmulV4",
    "grouped_matmul_weight_grad": "aclnnGroupedMatmulV4",
    "swiglu": "aclnnSwiGlu",
    "swiglu_grad": "aclnnSwiGluGrad",
}


@in_one_setting
def test_cann_without_moe_operators(tmp_path: Path) -> None:
    code = "tell([{op: outcome(call) for op, call in CALLS.items()}, _C_npu.operators()])"
    refusals, operators = in_process(code, tmp_path / "result", "bare")
    for op, function in FUNCTIONS.items():
        assert refusals[op] == (
            f"NotImplementedError: moe::{op}: {function}GetWorkspaceSize is not in the CANN that "
            f"is installed (CANN 9.1.0, Ascend910B2). Searched:\n  libopapi.so\n"
            "Install a CANN release that has this operator, or set ASCEND_HOME_PATH (source "
            "set_env.sh) if it is elsewhere; `python -m torch_moe_ops.info` shows what is found."
        )
    assert set(refusals) == set(FUNCTIONS)
    assert set(operators.values()) == {""}


@in_one_setting
def test_unknown_chip(tmp_path: Path) -> None:
    """The stand-in has no other chips: its answer is changed where it keeps it."""
    code = """
import ctypes
get = ctypes.CDLL("libascendcl.so").aclrtGetSocName
get.restype = ctypes.c_void_p
ctypes.memmove(get(), b"Ascend310P3", 11)
tell([_C_npu.soc_name(), outcome(CALLS["grouped_matmul"]), outcome(CALLS["token_permute_grad"])])
"""
    name, *refusals = in_process(code, tmp_path / "result")
    assert name == "Ascend310P3"
    assert refusals == [
        f"NotImplementedError: moe::{op}: the NPU must be an Ascend910B (A2), Ascend910_93 (A3) "
        "or Ascend950, got Ascend310P3"
        for op in ("grouped_matmul", "token_permute_grad")
    ]


def fake_library(path: Path, status: int, ops: list[str]) -> None:
    """A library whose functions all refuse with this status."""
    functions = {FUNCTIONS[op] + phase for op in ops for phase in ("", "GetWorkspaceSize")}
    source = path.with_suffix(".cpp")
    path.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(
        "".join(f'extern "C" int {name}() {{ return {status}; }}\n' for name in sorted(functions))
    )
    compiler = shutil.which("g++")
    assert compiler is not None
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, source], check=True)


@in_one_setting
def test_order_of_search(tmp_path: Path) -> None:
    """Each library has one operator more than the one before, which must have been asked first."""
    custom, opp, home = tmp_path / "custom", tmp_path / "opp", tmp_path / "home"
    places = [
        custom / "one" / "op_api" / "lib" / "libcust_opapi.so",
        custom / "two" / "op_api" / "lib" / "libcust_opapi.so",
        opp / "vendors" / "zeta" / "op_api" / "lib" / "libcust_opapi.so",
        opp / "vendors" / "alpha" / "op_api" / "lib" / "libcust_opapi.so",
        home / "lib64" / "libopapi_a.so",
        home / "lib64" / "libopapi_b.so",
    ]
    ops = list(FUNCTIONS)
    for number, place in enumerate(places):
        fake_library(place, 161001 + number, ops[: number + 1])
    fake_library(home / "lib64" / "libother.so", 7, ops)
    fake_library(opp / "vendors" / "unnamed" / "op_api" / "lib" / "libcust_opapi.so", 7, ops)
    (opp / "vendors" / "config.ini").write_text("[priority]\nload_priority=zeta,none,alpha\n")
    environment = {
        "ASCEND_CUSTOM_OPP_PATH": f"{custom / 'one'}:{custom / 'empty'}::{custom / 'two'}",
        "ASCEND_OPP_PATH": str(opp),
        "ASCEND_HOME_PATH": str(home),
    }
    code = """
tell([_C_npu.searched_libraries(), _C_npu.operators(),
      {op: outcome(call) for op, call in CALLS.items()}])
"""
    searched, found, outcomes = in_process(code, tmp_path / "result", environment=environment)

    def missing(path: Path) -> str:
        library = path / "op_api" / "lib" / "libcust_opapi.so"
        return f"{library} ({library}: cannot open shared object file: No such file or directory)"

    one, two, zeta, alpha, *split = map(str, places)
    nowhere = (missing(custom / "empty"), missing(opp / "vendors" / "none"))
    assert searched == [one, nowhere[0], two, zeta, nowhere[1], alpha, *split, "libopapi.so"]
    for number, (op, place) in enumerate(zip(ops, places, strict=False)):
        assert found[FUNCTIONS[op]] == str(place)
        message = f"RuntimeError: moe::{op}: {FUNCTIONS[op]} failed in phase 1 (GetWorkspaceSize): "
        assert outcomes[op].startswith(f"{message}{161001 + number} ")
    for op in ops[len(places) :]:
        assert found[FUNCTIONS[op]].endswith("libopapi.so")
        assert outcomes[op] == "done"
