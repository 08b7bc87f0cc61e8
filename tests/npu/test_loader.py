"""When the NPU kernels are loaded, and what is told where they cannot be. One process per case."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import torch_moe_ops
from tests.npu import settings

ROOT = Path(__file__).parents[2]
PACKAGE = Path(torch_moe_ops.__file__).parent

pytestmark = settings.only_in(2)

# Runs `before` when torch is there and torch_npu is not.
PRELUDE = """
import os, sys, threading
from tests.cann import bootstrap

import_torch = bootstrap.import_torch

def import_both():
    import torch
{before}
    import_torch()

bootstrap.import_torch = import_both
standin = bootstrap.load(os.environ["MOE_OPS_TEST_STANDIN"])
import torch, torch_npu

x = torch.arange(12.0).view(4, 3).npu()
experts = torch.tensor([1, 0, 2, 0], dtype=torch.int32).npu()

def call(tensor=x):
    return torch.ops.moe.token_permute(tensor, experts.to(tensor.device))[0]

def refusal():
    try:
        call()
    except NotImplementedError as error:
        return str(error)
    return "no error"

def check(tensor=x):
    before = standin.launches()
    assert call(tensor).tolist() == [[3, 4, 5], [9, 10, 11], [0, 1, 2], [6, 7, 8]]
    return standin.launches() - before
"""


def run(
    code: str, before: str = "pass", path: Path = PACKAGE.parent, **environment: str
) -> list[str]:
    """The lines that `code` prints; the stand-in and torch_npu are there, the package is not."""
    prelude = PRELUDE.format(before=textwrap.indent(textwrap.dedent(before), "    "))
    return run_bare(prelude + textwrap.dedent(code), path, **environment)


def run_bare(code: str, path: Path = PACKAGE.parent, **environment: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(path),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    # torch's warning about a kernel that replaces another, and torch_npu's about its fallback.
    assert "verrid" not in result.stderr
    assert "fall back" not in result.stderr
    return [line for line in result.stdout.splitlines() if not line.startswith("Warning: ASCEND")]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the built package; returns the folder to put on the path."""
    shutil.copytree(PACKAGE, tmp_path / "torch_moe_ops", ignore=shutil.ignore_patterns("*.pyc"))
    return tmp_path


def npu_library(copy: Path) -> Path:
    (library,) = (copy / "torch_moe_ops").glob("_C_npu.*.so")
    return library


def test_import_alone_neither_imports_torch_npu_nor_loads_kernels() -> None:
    code = (
        "import sys, torch_moe_ops\n"
        "print('torch_npu' in sys.modules, 'torch_moe_ops._C_npu' in sys.modules)\n"
        "print(torch_moe_ops._npu.status())"
    )
    assert run_bare(code) == ["False False", "torch_npu has not been imported"]


def test_import_after_torch_npu_loads_kernels_but_touches_no_device() -> None:
    code = """
        import os, sys
        from tests.cann import bootstrap
        bootstrap.load(os.environ["MOE_OPS_TEST_STANDIN"])
        import torch, torch_moe_ops
        print(repr(torch_moe_ops._npu.status()), "torch_moe_ops._C_npu" in sys.modules)
        print(torch.npu.is_initialized())
    """
    assert run_bare(textwrap.dedent(code)) == ["'' True", "False"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("pass", "import torch_moe_ops"),
        ("import torch_moe_ops", "pass"),
        (
            "import torch_moe_ops\n"
            "torch.ops.moe.token_permute(torch.ones(2, 3), torch.tensor([1, 0]))",
            "pass",
        ),
    ],
    ids=["torch_npu first", "torch_moe_ops first", "CPU call first"],
)
@pytest.mark.parametrize("mode", ["torch.enable_grad()", "torch.inference_mode()"])
def test_every_import_order_reaches_the_kernels(before: str, after: str, mode: str) -> None:
    code = f"{after}\nwith {mode}:\n    print(check(), check())\nprint(check(x.cpu()))"
    assert run(code, before) == ["1 1", "0"]


def test_first_call_in_backward() -> None:
    """The engine's thread for the device holds no GIL when it meets the entry."""
    code = """
        rows = torch.tensor([2, 0, 3, 1], dtype=torch.int32).npu()
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2
            @staticmethod
            def backward(ctx, grad):
                return torch.ops.moe.token_permute_grad(grad, rows, 1)
        leaf = x.clone().requires_grad_()
        Double.apply(leaf).backward(x)
        print(leaf.grad.tolist() == x[rows].tolist(), standin.launches() > 0)
    """
    assert run(code, "import torch_moe_ops") == ["True True"]


def test_call_during_the_first_call_of_another_thread_waits_for_the_kernels() -> None:
    """Between the two registrations there must be no gap with torch_npu's CPU fallback in it."""
    code = """
        from torch_moe_ops import _npu
        load = _npu.importlib.import_module
        launches = []
        other = threading.Thread(target=lambda: launches.append(check()))

        def slow_load(name):
            other.start()
            other.join(1)
            print("waits:", other.is_alive())
            return load(name)

        _npu.importlib.import_module = slow_load
        call()
        other.join()
        # The calls of both threads may fall into the count of one.
        print(launches[0] in (1, 2), standin.launches())
    """
    assert run(code, "import torch_moe_ops") == ["waits: True", "True 2"]


def test_two_threads_make_the_first_call_at_once() -> None:
    code = """
        sys.setswitchinterval(1e-6)
        barrier = threading.Barrier(2)
        results = []

        def work():
            barrier.wait()
            for _ in range(20):
                results.append(call())

        threads = [threading.Thread(target=work) for _ in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        print(len(results), standin.launches(), {str(rows.tolist()) for rows in results} == {
            str(call().tolist())})
    """
    assert run(code, "import torch_moe_ops") == ["40 40 True"]


def test_reload_after_the_kernels_were_loaded() -> None:
    code = """
        import importlib, torch_moe_ops
        print(check())
        importlib.reload(torch_moe_ops)
        print(check(), repr(torch_moe_ops._npu.status()))
    """
    assert run(code) == ["1", "1 ''"]


def test_torch_npu_that_is_still_being_imported_is_left_alone() -> None:
    code = """
        version = torch_npu.__version__
        torch_npu.__spec__._initializing = True
        del torch_npu.__version__
        import torch_moe_ops
        print(torch_moe_ops._npu.status())
        torch_npu.__version__ = version
        torch_npu.__spec__._initializing = False
        print(torch_moe_ops._npu.status())
        print(check())
    """
    assert run(code) == [
        "torch_npu has not been imported",
        "the first call on an NPU tensor will load them",
        "1",
    ]


def test_fake_and_meta_tensors_load_nothing() -> None:
    code = """
        from torch._subclasses.fake_tensor import FakeTensorMode
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(tensor) for tensor in (x, experts)]
            rows = torch.ops.moe.token_permute(*fake)[0]
            print(type(rows).__name__, rows.device.type, tuple(rows.shape))
        print(call(x.to("meta")).device)
        print("torch_moe_ops._C_npu" in sys.modules)
        print(check(), "torch_moe_ops._C_npu" in sys.modules)
    """
    expected = ["FakeTensor npu (4, 3)", "meta", "False", "1 True"]
    assert run(code, "import torch_moe_ops") == expected


def test_without_cann_the_cpu_side_works() -> None:
    code = """
        import torch, torch_moe_ops

        def works():
            rows, _ = torch_moe_ops.token_permute(torch.ones(2, 3), torch.tensor([1, 0]))
            return rows.sum().item() == 6

        print(works())
        try:
            import torch_npu
        except ImportError as error:
            print(error)
        print(works(), torch_moe_ops._npu.load())
    """
    lines = run_bare(textwrap.dedent(code), LD_LIBRARY_PATH="")
    assert lines[0] == "True"
    assert "libhccl.so" in lines[1]
    assert lines[2:] == ["True torch_npu has not been imported"]


WRONG_VERSION = 'right = torch_npu.__version__\ntorch_npu.__version__ = "2.12.0"\n'
TELL = """
import torch_moe_ops
print(check(x.cpu()))
first = refusal()
print(first)
print(refusal() == first, standin.launches())
"""
INFO = "`python -m torch_moe_ops.info` shows what is there"


def assert_told(lines: list[str], *parts: str) -> None:
    on_cpu, message, rest = lines
    assert on_cpu == "0"
    assert message.startswith("moe::token_permute: the NPU kernels cannot be used: ")
    for part in [*parts, "MOE_OPS_BUILD_NPU=1 pip install", INFO, "MOE_OPS_ALLOW_CPU_FALLBACK=1"]:
        assert part in message
    assert rest == "True 0"


def test_other_torch_npu_version_is_told_at_every_call() -> None:
    built_for = torch_moe_ops._npu.TORCH_NPU_VERSION
    # The reason is remembered: the version is right again at the second call, the library is not.
    code = TELL.replace("print(refusal() ==", "torch_npu.__version__ = right\nprint(refusal() ==")
    lines = run(WRONG_VERSION + code)
    assert_told(lines, f"built for torch_npu {built_for}, this is torch_npu 2.12.0")


def test_library_that_is_no_library(copy: Path) -> None:
    npu_library(copy).write_bytes(b"not a library")
    assert_told(run(TELL, path=copy), "does not load: ", npu_library(copy).name)


def test_library_that_is_missing(copy: Path) -> None:
    npu_library(copy).unlink()
    assert_told(run(TELL, path=copy), "does not load: No module named 'torch_moe_ops._C_npu'")


def test_built_without_npu_kernels(copy: Path) -> None:
    npu_library(copy).unlink()
    with (copy / "torch_moe_ops" / "_build_info.py").open("a") as facts:
        facts.write('TORCH_NPU_VERSION = ""\n')
    assert_told(run(TELL, path=copy), "torch_moe_ops was built without them.")


def test_operator_without_a_kernel_is_refused() -> None:
    """A library of another state of the source, say. It must not call itself without end."""
    code = """
        import torch_moe_ops
        torch_moe_ops._npu._outcome = ""
        print(refusal())
    """
    (message,) = run(code, "import torch_moe_ops")
    assert "cannot be used: none is registered for this operator" in message


def test_cpu_fallback_on_request() -> None:
    code = """
        import torch_moe_ops
        os.dup2(1, 2)  # outside of autograd torch prints warnings without asking Python
        leaf = x.detach().requires_grad_()
        launches = [check(), check()]
        for _ in range(2):
            rows = call(leaf)
            rows.backward(rows.detach())
        print(launches, standin.launches())
        print(rows.device.type, leaf.grad.device.type, leaf.grad.tolist() == (2 * x).tolist())
    """
    lines = run(
        WRONG_VERSION + textwrap.dedent(code),
        MOE_OPS_ALLOW_CPU_FALLBACK="1",
        PYTHONWARNINGS="always",
    )
    assert lines[-2:] == ["[0, 0] 0", "npu npu True"]
    text = ": runs on the CPU, with copies there and back (MOE_OPS_ALLOW_CPU_FALLBACK=1): they were"
    warned = [line for line in lines if "runs on the CPU" in line]
    assert len(warned) == 2
    for op, line in zip(("token_permute", "token_permute_grad"), warned, strict=True):
        assert f"moe::{op}{text}" in line
        assert "this is torch_npu 2.12.0" in line


def test_cpu_fallback_is_not_taken_where_the_kernels_are() -> None:
    code = "import torch_moe_ops\nprint(check())"
    assert run(code, "import torch_moe_ops", MOE_OPS_ALLOW_CPU_FALLBACK="1") == ["1"]
