"""``python -m torch_moe_ops.info`` where the NPU kernels are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import torch_moe_ops
from tests.npu import settings
from torch_moe_ops import _C_npu, info

ROOT = Path(__file__).parents[2]

pytestmark = settings.only_in(4)

RUN = """
import os, runpy, sys
from tests.cann import bootstrap

standin = bootstrap.load(os.environ["MOE_OPS_TEST_STANDIN"], sys.argv.pop())
{before}
runpy.run_module("torch_moe_ops.info", run_name="__main__")
"""


def run_info(variant: str, before: str = "", **environment: str) -> list[str]:
    """The lines of its output on a variant of the stand-in."""
    result = subprocess.run(
        [sys.executable, "-c", RUN.format(before=before), variant],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(Path(info.__file__).parents[1]), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def row(lines: list[str], *first: str) -> list[str]:
    """The rest of the only line that starts with these words."""
    (found,) = [line.split() for line in lines if line.split()[: len(first)] == list(first)]
    return found[len(first) :]


def npu_column(lines: list[str]) -> dict[str, str]:
    start = next(i for i, line in enumerate(lines) if line.split()[-1:] == ["gradients"])
    rows = [line.split() for line in lines[start + 2 : start + 2 + len(info.op_names())]]
    return {row[0]: row[3] for row in rows}


@pytest.mark.parametrize(("product", "release"), [("A2", "9.1.0"), ("950", "8.5.0")])
def test_chip_release_and_functions(product: str, release: str) -> None:
    soc = settings.SOC[product]
    lines = run_info("current", CANN_STANDIN_SOC=soc, CANN_STANDIN_VERSION=release)
    assert row(lines, "chip")[0] == f"{soc},"
    assert row(lines, "release") == ["CANN", release]
    assert row(lines, "searched") == ["libopapi.so"]
    assert row(lines, "torch_npu")[:3] == ["2.13.0", "(built", "for"]
    assert set(npu_column(lines).values()) == {"yes"}
    library = str(Path(os.environ["MOE_OPS_TEST_STANDIN"], "current", "libopapi.so").resolve())
    for op, names in info.ACLNN_FUNCTIONS.items():
        for name in names:
            assert row(lines, op, name) == [library]


def test_one_of_two_functions_is_enough() -> None:
    lines = run_info("old")
    for op in ("grouped_matmul", "grouped_matmul_weight_grad"):
        assert row(lines, op, "aclnnGroupedMatmulV5") == ["missing"]
        assert row(lines, op, "aclnnGroupedMatmulV4")[0].endswith("libopapi.so")
    assert set(npu_column(lines).values()) == {"yes"}


def test_cann_without_these_operators() -> None:
    lines = run_info("bare", ASCEND_CUSTOM_OPP_PATH="")
    for op, names in info.ACLNN_FUNCTIONS.items():
        assert all(row(lines, op, name) == ["missing"] for name in names)
    assert set(npu_column(lines).values()) == {"no"}


def test_reason_is_given_once() -> None:
    lines = run_info("current", "import torch_npu\ntorch_npu.__version__ = '2.12.0'")
    assert set(npu_column(lines).values()) == {"no"}
    assert lines[-1].startswith("NPU kernels: not usable: they were built for torch_npu ")
    assert "this is torch_npu 2.12.0" in lines[-1]
    assert not any("aclnn" in line for line in lines)


def test_functions_are_those_of_the_signatures() -> None:
    named = {name for names in info.ACLNN_FUNCTIONS.values() for name in names}
    assert named == set(_C_npu.operators())
    assert set(info.ACLNN_FUNCTIONS) == set(torch_moe_ops.ops.__all__)
