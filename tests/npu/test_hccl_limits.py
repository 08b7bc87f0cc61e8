"""What phase 1 of the stand-in's fused communication operators refuses, by product and release.

In a group of one rank, by the bare functions: nothing compares epWorldSize with the group there.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cann.bootstrap import Standin
from tests.npu import plugin
from tests.npu.hccl import start_hccl
from tests.npu.settings import HAS_V5, ON_950, RELEASE, SOC, SOC_NAME, only_in
from tests.ranks import Ranks

NULL, INVALID, TILING, NO_BINARY, NO_GROUP = 161001, 161002, 561002, 561003, 361001
A2, A3 = SOC["A2"] == SOC_NAME, SOC["A3"] == SOC_NAME
CURRENT = RELEASE == "9.1.0"
SMALL_VOLUME_FAILS = A3 and not CURRENT
ACL_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 27, torch.int64: 9}

Size = tuple[int, ...] | None


@dataclass(frozen=True)
class Arguments:
    """Shapes instead of tensors. The defaults are accepted, where the product has the operator."""

    x: Size
    weight: Size
    y: Size
    ep: int
    send: list[int] | None
    recv: list[int] | None
    mm_x: Size = None
    mm_weight: Size = None
    mm_y: Size = None
    permute_out: Size = None
    send_counts: Size = None
    group: bytes | None = b"alone"
    mode: bytes | None = b"ai_cpu"
    trans: bool = False
    trans_mm: bool = False
    flag: bool = False
    dense: bool = True  # outputs
    dtype: torch.dtype = torch.float16
    y_dtype: torch.dtype = torch.float16


EP = 2 if ON_950 and CURRENT else 8
ROWS, WIDTH = (32, 32768) if SMALL_VOLUME_FAILS else (2, 4)
BASE = Arguments((EP * ROWS, WIDTH), (1, WIDTH, 3), (EP * ROWS, 3), EP, [ROWS] * EP, [ROWS] * EP)
TOTAL = EP * ROWS


@contextlib.contextmanager
def communicator() -> Iterator[None]:
    """Of one rank, with the name that the arguments have."""
    assert plugin.standin is not None
    hccl = ctypes.CDLL(str(plugin.standin.directory / "libhccl.so"))
    root, comm = ctypes.create_string_buffer(4108), ctypes.c_void_p()
    config = ctypes.create_string_buffer(4096)
    config[32:38] = b"alone\0"  # HcclCommConfig.hcclCommName
    assert hccl.HcclGetRootInfo(root) == 0
    assert hccl.HcclCommInitRootInfoConfig(1, root, 0, config, ctypes.byref(comm)) == 0
    yield
    assert hccl.HcclCommDestroy(comm) == 0


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    with communicator():
        yield


class Caller:
    """Phase 1 of the bare functions, with descriptors made and given back around it."""

    def __init__(self, directory: Path) -> None:
        self.opapi = ctypes.CDLL(str(directory / "libopapi.so"))
        self.base = ctypes.CDLL(str(directory / "libnnopbase.so"))
        self.base.aclCreateTensor.restype = ctypes.c_void_p
        self.base.aclCreateIntArray.restype = ctypes.c_void_p
        self.runtime = ctypes.CDLL(str(directory / "libascendcl.so"))
        self.runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p

    def tensor(self, size: Size, dtype: torch.dtype, dense: bool = False) -> ctypes.c_void_p:
        """Unless dense, one element repeated by strides of 0: no memory for large shapes."""
        if size is None:
            return ctypes.c_void_p()
        memory = torch.zeros(size if dense else 1, dtype=dtype).npu()
        self.alive.append(memory)
        dims = (ctypes.c_int64 * len(size))(*size)
        storage = (ctypes.c_int64 * 1)(memory.numel())
        made = self.base.aclCreateTensor(
            dims,
            ctypes.c_uint64(len(size)),
            ACL_DTYPES[dtype],
            None if dense else (ctypes.c_int64 * len(size))(),
            ctypes.c_int64(0),
            2,
            storage,
            ctypes.c_uint64(1),
            ctypes.c_void_p(memory.data_ptr()),
        )
        return ctypes.c_void_p(made)

    def counts(self, values: list[int] | None) -> ctypes.c_void_p:
        if values is None:
            return ctypes.c_void_p()
        array = (ctypes.c_int64 * len(values))(*values)
        return ctypes.c_void_p(self.base.aclCreateIntArray(array, ctypes.c_uint64(len(values))))

    def __call__(self, api: str, given: Arguments) -> tuple[int, str]:
        """The status, and what it says of a refusal or else of the workspace."""
        self.alive: list[Tensor] = []
        forward = "aclnnAlltoAllv" in api
        inputs = [
            self.tensor(given.x, given.dtype),
            self.tensor(given.weight, given.dtype),
            self.tensor(given.send_counts, torch.int64),
            ctypes.c_void_p(),
            self.tensor(given.mm_x, given.dtype),
            self.tensor(given.mm_weight, given.dtype),
        ]
        arrays = [self.counts(given.send), self.counts(given.recv)]
        sizes = [given.y, given.mm_y, *([given.permute_out] if forward else [])]
        outputs = [self.tensor(size, given.y_dtype, given.dense) for size in sizes]
        flags = [given.trans, given.trans_mm, *([given.flag] if forward else [])]
        workspace, executor = ctypes.c_uint64(7), ctypes.c_void_p()
        status = self.opapi[f"{api}GetWorkspaceSize"](
            *inputs,
            ctypes.c_char_p(given.group),
            *([ctypes.c_char_p(given.mode)] if api.endswith("V2") else []),
            ctypes.c_int64(given.ep),
            *arrays,
            *map(ctypes.c_bool, flags),
            *outputs,
            ctypes.byref(workspace),
            ctypes.byref(executor),
        )
        for tensor in [*inputs, *outputs]:
            assert self.base.aclDestroyTensor(tensor) == 0
        for array in arrays:
            assert self.base.aclDestroyIntArray(array) == 0
        if status != 0:
            return status, (self.runtime.aclGetRecentErrMsg() or b"").decode()
        assert self.base.aclDestroyAclOpExecutor(executor) == 0
        return status, f"workspace {workspace.value}"


FORWARD = ["aclnnAlltoAllvGroupedMatMul", *(["aclnnAlltoAllvGroupedMatMulV2"] if HAS_V5 else [])]
REVERSE = ["aclnnGroupedMatMulAlltoAllv", *(["aclnnGroupedMatMulAlltoAllvV2"] if HAS_V5 else [])]
EVERY = [*FORWARD, *REVERSE]
V2 = [api for api in EVERY if api.endswith("V2")]
SHARED = {"mm_x": (TOTAL // 2, 9), "mm_weight": (9, 7), "mm_y": (TOTAL // 2, 7)}
MANY = 65536


def shared(**changes: Any) -> Arguments:
    return replace(BASE, **{**SHARED, **changes})


def with_experts(experts: int, ep: int = EP) -> Arguments:
    """All rows to the first expert of each rank."""
    counts = [TOTAL // ep if i % experts == 0 else 0 for i in range(ep * experts)]
    return replace(BASE, weight=(experts, WIDTH, 3), ep=ep, send=counts, recv=counts)


def all_to_one_rank(first: int) -> list[int]:
    """As many rows as there are, of which the first rank has so many."""
    return [first, TOTAL - first, *[0] * (EP - 2)]


# Refused before anything is known of the product: the arguments, the code, a part of the message.
FIRST: dict[str, tuple[Arguments, int, str]] = {
    "no x": (replace(BASE, x=None), NULL, "gmmX"),
    "no weight": (replace(BASE, weight=None), NULL, "gmmWeight"),
    "no y": (replace(BASE, y=None), NULL, "y is null|gmmY is null"),
    "counts tensor": (replace(BASE, send_counts=(EP,)), NULL, "sendCountsTensor"),
    "no group": (replace(BASE, group=None), NULL, "group"),
    "empty group": (replace(BASE, group=b""), NULL, "group"),
    "long group": (replace(BASE, group=b"x" * 128), INVALID, "shorter than 128"),
    "mm_x alone": (replace(BASE, mm_x=(TOTAL // 2, 9)), NULL, "mmX, mmWeight and mmY"),
    "no mm_y": (shared(mm_y=None), NULL, "mmX, mmWeight and mmY"),
    "no counts": (replace(BASE, send=None), INVALID, "must not be empty"),
    "empty counts": (replace(BASE, recv=[]), INVALID, "must not be empty"),
}
# Refused by a product that has the operator.
REFUSED: dict[str, tuple[Arguments, int, str]] = {
    "group of nobody": (replace(BASE, group=b"nobody"), NO_GROUP, "nobody"),
    "float32": (replace(BASE, dtype=torch.float32, y_dtype=torch.float32), INVALID, "bfloat16"),
    "two dtypes": (replace(BASE, y_dtype=torch.bfloat16), INVALID, "dtype of gmmX"),
    "rank of x": (replace(BASE, x=(TOTAL, WIDTH, 1)), TILING, "gmmX"),
    "rank of weight": (replace(BASE, weight=(WIDTH, 3)), TILING, "gmmWeight"),
    "H1": (replace(BASE, weight=(1, WIDTH + 1, 3)), TILING, "agree in H1"),
    "N1": (replace(BASE, y=(TOTAL, 4)), TILING, "gmmY"),
    "large H1": (replace(BASE, x=(TOTAL, MANY), weight=(1, MANY, 3)), TILING, "H1 must be from 1"),
    "large N1": (
        replace(BASE, weight=(1, MANY, WIDTH), trans=True, y=(TOTAL, MANY)),
        TILING,
        "N1 must be from 1",
    ),
    "ep": (with_experts(1, 1), TILING, "epWorldSize must be one of"),
    "length of counts": (replace(BASE, send=[TOTAL]), TILING, "entries"),
    "sum of sent": (replace(BASE, send=[0] + [ROWS] * (EP - 1)), TILING, "sendCounts must add up"),
    "sum of received": (replace(BASE, recv=[0] + [ROWS] * (EP - 1)), TILING, "recvCounts must add"),
    "many experts": (with_experts(49), TILING, "e must be from 1"),
    "many counts": (with_experts(32, 16 if EP == 8 else 32), TILING, r"e \* ep must be from 1"),
    "BS": (shared(mm_x=(3, 9), mm_y=(3, 7)), TILING, "multiple of BS"),
    "K": (shared(mm_x=(TOTAL, 9), mm_y=(TOTAL, 7)), TILING, "BSK / BS"),
    "H2": (shared(mm_weight=(8, 7)), TILING, "agree in H2"),
    "N2": (shared(mm_y=(TOTAL // 2, 8)), TILING, "mmY"),
    "large H2": (shared(mm_x=(TOTAL // 2, 12289), mm_weight=(12289, 7)), TILING, "H2 must be from"),
    "transposed mm_weight": (shared(trans_mm=True), TILING, "agree in H2"),
}


@pytest.mark.usefixtures("alone")
class TestPhase1:
    @pytest.fixture
    def call(self, standin: Standin) -> Caller:
        return Caller(standin.directory)

    def check(self, result: tuple[int, str], code: int, message: str = "") -> None:
        """``code`` is that of a product with the operator; 0 means accepted."""
        if A2:
            assert result == (NO_BINARY, "A2 has no such operator")
            return
        assert result[0] == code, result
        assert re.search(message or "workspace 1024", result[1])

    @pytest.mark.parametrize("api", EVERY)
    def test_accepted(self, api: str, call: Caller) -> None:
        for given in (
            BASE,
            shared(),
            with_experts(32 if EP == 8 else 16),
            replace(BASE, weight=(1, 3, WIDTH), trans=True),
            shared(mm_weight=(7, 9), trans_mm=True),
            replace(BASE, dtype=torch.bfloat16, y_dtype=torch.bfloat16),
        ):
            self.check(call(api, given), 0)

    @pytest.mark.parametrize("api", EVERY)
    @pytest.mark.parametrize("case", FIRST)
    def test_arguments(self, api: str, case: str, call: Caller) -> None:
        given, code, message = FIRST[case]
        status, said = call(api, given)
        assert status == code
        assert re.search(message, said)

    @pytest.mark.parametrize("api", EVERY)
    @pytest.mark.parametrize("case", REFUSED)
    def test_refused(self, api: str, case: str, call: Caller) -> None:
        self.check(call(api, REFUSED[case][0]), *REFUSED[case][1:])

    @pytest.mark.parametrize("api", FORWARD)
    def test_permuted_rows(self, api: str, call: Caller) -> None:
        permuted = replace(BASE, permute_out=(TOTAL, WIDTH), flag=True)
        self.check(call(api, permuted), 0)
        self.check(call(api, replace(permuted, permute_out=(TOTAL, 1))), TILING, "permuteOut")
        for given in (replace(permuted, flag=False), replace(permuted, permute_out=None)):
            assert call(api, given)[0] == NULL

    @pytest.mark.parametrize("api", EVERY)
    def test_nothing_to_write_is_no_error(self, api: str, call: Caller) -> None:
        """No shape is looked at, and phase 2 has nothing to do."""
        absurd = replace(BASE, y=(0, 77), ep=5, x=(1, 1, 1))
        self.check(call(api, absurd), 0, "workspace 0")
        self.check(call(api, replace(absurd, group=b"nobody")), NO_GROUP, "nobody")

    def test_nothing_to_send(self, call: Caller) -> None:
        for api in FORWARD:
            given = replace(BASE, x=(0, WIDTH), send=[0] * EP)
            self.check(call(api, given), TILING, "BSK must be from 1")

    @pytest.mark.skipif(SMALL_VOLUME_FAILS, reason="every rank has to send 2 MB in this setting")
    def test_zeros(self, call: Caller) -> None:
        some = replace(BASE, send=all_to_one_rank(TOTAL), recv=all_to_one_rank(0))
        for api in EVERY:
            self.check(call(api, some), 0)
        nothing = replace(BASE, x=(0, WIDTH), send=[0] * EP)
        received = shared(y=(0, 3), recv=[0] * EP)
        for forward, reverse in zip(FORWARD, REVERSE, strict=True):
            self.check(call(reverse, nothing), 0)
            self.check(call(forward, received), 0)  # the shared expert still has rows

    def test_negative_counts(self, call: Caller) -> None:
        negative = all_to_one_rank(TOTAL + 1)
        for api in FORWARD:
            sent = call(api, replace(BASE, send=negative))
            self.check(sent, TILING, "sendCounts must (not be negative|be at most)")
            received = call(api, replace(BASE, recv=negative))
            if A3:
                self.check(received, TILING, "recvCounts must (not be negative|be at most)")
            else:
                self.check(received, 0)

    @pytest.mark.parametrize("volume", [(31, 33), (33, 31)])
    def test_volume(self, call: Caller, volume: tuple[int, int]) -> None:
        """A rank with less than 2 MB, to or from it: an error on A3 before CANN 9.1."""
        counts = [*volume, *[ROWS] * (EP - 2)] if SMALL_VOLUME_FAILS else [1, 2 * ROWS - 1]
        counts += [ROWS] * (EP - len(counts))
        for api in EVERY:
            for given in (replace(BASE, send=counts), replace(BASE, recv=counts)):
                if SMALL_VOLUME_FAILS:
                    self.check(call(api, given), TILING, "at least 2 MB")
                else:
                    self.check(call(api, given), 0)

    @pytest.mark.parametrize("ep", [1, 2, 3, 4, 8, 12, 64, 128, 256])
    def test_sizes_of_the_group(self, call: Caller, ep: int) -> None:
        """Rows of 2 MB for every rank."""
        allowed = {8, 16, 32, 64} | ({128} if CURRENT else set())
        if ON_950 and CURRENT:
            allowed |= {2, 4}
        counts = [32] * ep
        given = Arguments((32 * ep, 32768), (1, 32768, 3), (32 * ep, 3), ep, counts, counts)
        for forward, reverse in zip(FORWARD, REVERSE, strict=True):
            also = {256} if ON_950 and CURRENT else set()
            refused = (TILING, "epWorldSize must be one of")
            self.check(call(forward, given), *((0,) if ep in allowed | also else refused))
            without = {128} if ON_950 else set()
            self.check(call(reverse, given), *((0,) if ep in allowed - without else refused))

    def test_size_of_the_communicator(self, call: Caller) -> None:
        """Only the reverse operator looks it up: it is 1 here."""
        for api in FORWARD:
            self.check(call(api, replace(BASE, ep=-1)), TILING, "got -1")
        for api in REVERSE:
            self.check(call(api, replace(BASE, ep=-1)), TILING, "got 1")

    @pytest.mark.skipif(
        not (ON_950 and CURRENT), reason="with more ranks there are too many counts"
    )
    def test_experts(self, call: Caller) -> None:
        for forward, reverse in zip(FORWARD, REVERSE, strict=True):
            self.check(call(forward, with_experts(48)), 0)
            self.check(call(reverse, with_experts(32)), 0)
            self.check(call(reverse, with_experts(33)), TILING, "e must be from 1 to 32")

    def test_transposition_of_no_weight(self, call: Caller) -> None:
        given = replace(BASE, trans_mm=True)
        for forward, reverse in zip(FORWARD, REVERSE, strict=True):
            self.check(call(forward, given), 0)
            self.check(call(reverse, given), TILING, "transMmWeight")

    @pytest.mark.parametrize("api", V2)
    def test_comm_mode(self, api: str, call: Caller) -> None:
        for mode in (b"aicpu", b"default", b"", None, *([] if ON_950 else [b"ccu"])):
            assert call(api, replace(BASE, mode=mode))[0] == INVALID
        if ON_950:
            self.check(call(api, replace(BASE, mode=b"ccu")), 0)

    def test_v2_came_with_9_1(self, call: Caller) -> None:
        assert hasattr(call.opapi, "aclnnGroupedMatMulAlltoAllv")
        assert hasattr(call.opapi, "aclnnGroupedMatMulAlltoAllvV2") == CURRENT
        assert hasattr(call.opapi, "aclnnAlltoAllvGroupedMatMulV2") == CURRENT


def strided_output(_rank: int) -> None:
    assert plugin.standin is not None
    with communicator():
        Caller(plugin.standin.directory)(FORWARD[0], replace(BASE, dense=False))


@only_in(4)
def test_outputs_have_to_be_contiguous(capfd: pytest.CaptureFixture[str]) -> None:
    """CANN writes through them as if they were: the stand-in ends the process."""
    outcomes = Ranks(1, start_hccl).outcomes(strided_output)
    assert outcomes[0].error == "the process ended"
    assert "an output is not contiguous" in capfd.readouterr().err
