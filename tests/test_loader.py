"""Importing the package: from where, how often, against which torch. One process for each case."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import torch_moe_ops
from torch_moe_ops import info

ROOT = Path(__file__).parents[1]
PACKAGE = Path(torch_moe_ops.__file__).parent


def run(code: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    """Runs `code` with `path` (or the package under test) in front of the module path."""
    env = {**os.environ, "PYTHONPATH": str(path or PACKAGE.parent), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A second copy of the built package; returns the folder to put on the path."""
    shutil.copytree(PACKAGE, tmp_path / "torch_moe_ops", ignore=shutil.ignore_patterns("*.pyc"))
    return tmp_path


def last_line(result: subprocess.CompletedProcess) -> str:
    return result.stderr.strip().splitlines()[-1]


def test_source_tree_does_not_shadow_the_installed_package() -> None:
    result = run("import torch_moe_ops; print(torch_moe_ops.__file__)")
    assert result.stdout.strip() == torch_moe_ops.__file__, result.stderr
    assert not (ROOT / "torch_moe_ops").exists()


def test_import_touches_no_npu_package(tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text("raise SystemExit('torch_npu was imported')")
    path = os.pathsep.join([str(tmp_path), str(PACKAGE.parent)])
    result = run("import torch_moe_ops, sys; print('torch_npu' in sys.modules)", PYTHONPATH=path)
    assert result.stdout.strip() == "False", result.stderr


def test_import_leaves_the_compiler_alone() -> None:
    """torch._dynamo takes as long to import as torch itself."""
    result = run("import torch_moe_ops.nn, sys; print('torch._dynamo' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr


@pytest.mark.parametrize("first", ["torch", "torch_moe_ops"])
def test_import_order_does_not_matter(first: str) -> None:
    result = run(f"import {first}, torch_moe_ops, torch; print(torch.ops.moe.token_permute)")
    assert "moe.token_permute" in result.stdout, result.stderr


def test_reload_and_loading_the_library_again() -> None:
    result = run(
        "import importlib, torch, torch_moe_ops\n"
        "importlib.reload(torch_moe_ops)\n"
        "torch.ops.load_library(torch_moe_ops._C.__file__)\n"
        "rows, _ = torch_moe_ops.token_permute(torch.ones(2, 3), torch.tensor([1, 0]))\n"
        "print(rows.sum().item())"
    )
    assert result.stdout.strip() == "6.0", result.stderr


def test_second_copy_is_refused_by_name(copy: Path) -> None:
    result = run(
        "import sys, torch_moe_ops\n"
        "for name in [n for n in sys.modules if n.startswith('torch_moe_ops')]:\n"
        "    del sys.modules[name]\n"
        f"sys.path.insert(0, {str(copy)!r})\n"
        "import torch_moe_ops"
    )
    assert result.returncode == 1, result.stderr  # an error, not an abort
    message = last_line(result)
    assert message.startswith("ImportError: the moe operators are registered already by ")
    assert str(copy) in message
    assert str(PACKAGE) in message


def test_library_of_a_second_copy_loads_without_harm(copy: Path) -> None:
    library = Path(torch_moe_ops._C.__file__).name
    result = run(
        "import torch, torch_moe_ops\n"
        f"torch.ops.load_library({str(copy / 'torch_moe_ops' / library)!r})\n"
        "print(torch_moe_ops.token_permute(torch.ones(1, 2), torch.tensor([0]))[0].tolist())"
    )
    assert result.stdout.strip() == "[[1.0, 1.0]]", result.stderr


def test_other_torch_version_is_named_before_the_library_is_loaded(copy: Path) -> None:
    (copy / "torch_moe_ops" / "_build_info.py").write_text(
        'TORCH_VERSION = "2.12.1+cpu"\nCXX_FLAGS = ""\n'
    )
    # A library that cannot be loaded at all: only a check that comes first can give the message.
    (copy / "torch_moe_ops" / Path(torch_moe_ops._C.__file__).name).write_bytes(b"not a library")
    message = last_line(run("import torch_moe_ops", copy))
    assert message.startswith("ImportError: torch_moe_ops was built for torch 2.12.1+cpu, this is ")
    assert "pip install --no-build-isolation" in message


def test_missing_library_says_how_to_build(copy: Path) -> None:
    for built in [*(copy / "torch_moe_ops").glob("_C.*"), copy / "torch_moe_ops/_build_info.py"]:
        built.unlink()
    message = last_line(run("import torch_moe_ops", copy))
    assert "has not been built" in message
    assert "pip install --no-build-isolation" in message


def test_build_without_torch_names_the_command(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch in this environment')")
    result = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    assert "pip install --no-build-isolation ." in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("1", "MOE_OPS_BUILD_NPU=1 builds NPU kernels"),
        ("2", "MOE_OPS_BUILD_NPU must be auto, 0 or 1, got 2"),
        ("", "MOE_OPS_BUILD_NPU must be auto, 0 or 1, got "),
    ],
)
def test_build_of_npu_kernels_that_cannot_be(value: str, told: str) -> None:
    if value == "1" and importlib.util.find_spec("torch_npu") is not None:
        pytest.skip("torch_npu is installed: they can be built")
    result = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOT,
        env={**os.environ, "MOE_OPS_BUILD_NPU": value},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    assert result.stderr.startswith(told)
    assert ("pip install torch_npu==" in result.stderr) == (value == "1")
    assert "Traceback" not in result.stderr


# torch's device for tests in Python: its tensors have no data.
TOY_BACKEND = """
import torch, torch_moe_ops
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

print(torch_moe_ops._npu.status())
_setup_privateuseone_for_python_backend("toy")
x = torch._C._acc.create_empty_tensor((2, 3), torch.float32)
for _ in range(2):
    try:
        torch_moe_ops.token_permute(x, x)
    except NotImplementedError as error:
        print(error)
print(torch_moe_ops.token_permute(torch.ones(2, 3), torch.tensor([1, 0]))[0].sum().item())
"""


def test_another_privateuse1_backend_is_named() -> None:
    status, first, second, total = run(
        TOY_BACKEND, TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    ).stdout.splitlines()
    assert "built without them" in status or status == "torch_npu has not been imported"
    assert first.startswith(
        "moe::token_permute: the NPU kernels cannot be used: the PrivateUse1 backend of this "
        "process is toy, not torch_npu ("
    )
    assert second == first
    assert total == "6.0"


def test_other_backend_of_the_cpu_is_refused_by_name() -> None:
    result = run(
        "import torch, torch_moe_ops\n"
        "x = torch.quantize_per_tensor(torch.ones(2, 3), 1.0, 0, torch.quint8)\n"
        "torch_moe_ops.token_permute(x, torch.tensor([1, 0]))"
    )
    assert last_line(result) == (
        "NotImplementedError: moe::token_permute: the tensors must be on the CPU, an NPU or the "
        "meta device, got QuantizedCPU"
    )


def run_info(path: str = str(PACKAGE.parent), **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "torch_moe_ops.info"],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_info_lists_every_operator() -> None:
    lines = run_info().splitlines()
    for name in torch_moe_ops.ops.__all__:
        (row,) = [line for line in lines if line.split()[:1] == [name]]
        assert row.split()[1:3] == ["yes", "yes"]


def test_info_names_the_failure_of_torch_npu_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text(
        "raise ImportError('libhccl.so: cannot open shared object file\\nand more')"
    )
    path = os.pathsep.join([str(tmp_path), str(PACKAGE.parent)])
    lines = run_info(path, TORCH_DEVICE_BACKEND_AUTOLOAD="0").splitlines()
    assert lines[-1].startswith(
        "NPU kernels: not usable: torch_npu cannot be imported: libhccl.so: cannot open shared "
        "object file and more (CANN is not on the library path: source its set_env.sh."
    )
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in lines[-1]
    (row,) = [line for line in lines if line.split()[:1] == ["token_permute"]]
    assert row.split()[3] == "no"


@pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed"
)
def test_info_without_torch_npu_is_short() -> None:
    lines = run_info(TORCH_DEVICE_BACKEND_AUTOLOAD="0", MOE_OPS_CHECK_INDICES="1").splitlines()
    assert lines[2].split()[:3] == ["torch_npu", "not", "installed"]
    assert any(line.startswith("  MOE_OPS_CHECK_INDICES=1  1: ") for line in lines)
    assert not any("aclnn" in line for line in lines)
    assert lines[-1].startswith("NPU kernels: not usable: torch_")
    assert len(lines) < 45


def test_info_knows_the_functions_that_the_npu_kernels_launch() -> None:
    declared = re.findall(r'kName = "aclnn(\w+)"', (ROOT / "csrc/npu/signatures.h").read_text())
    known: dict[str, set[str]] = {}
    used: dict[str, set[str]] = {}
    for path in (ROOT / "csrc" / "ops" / "npu").glob("*.cpp"):
        source = path.read_text()
        used[path.stem] = {f"aclnn{n}" for n in declared if re.search(rf"\b{n}\b", source)}
        ops = set(re.findall(r'm\.impl\("(\w+)"', source)) - {"_exchange_expert_rows"}
        known[path.stem] = {name for op in ops for name in info.ACLNN_FUNCTIONS[op]}
    assert used
    # Composed of another operator where the fused functions do not serve.
    used["alltoallv_grouped_matmul"] |= used["grouped_matmul"]
    assert known == used
    assert set(info.ACLNN_FUNCTIONS) == set(torch_moe_ops.ops.__all__)


HASH_RESULTS = """
import hashlib, torch, torch_moe_ops as m
digest = hashlib.sha256()
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(19, 133, generator=generator).to(dtype)
    ids = torch.randint(0, 5, (19, 3), generator=generator)
    for probs_dtype in (dtype, torch.float32, torch.float64):
        probs = torch.randn(19, 3, generator=generator).to(probs_dtype)
        rows, row_of_slot = m.token_permute(x, ids)
        outputs = [rows, m.token_unpermute(rows, row_of_slot, probs)]
        outputs += m.token_unpermute_grad(rows, x, row_of_slot, probs)
        outputs += [m.token_permute_grad(rows, row_of_slot, 3)]
        bias = torch.randn(5, 133, generator=generator).to(dtype)
        y = m.finalize_routing_v2(rows, row_of_slot, x, x, bias, probs, ids, drop_pad_mode=2)
        outputs += [y]
        outputs += m.finalize_routing_v2_grad(x, row_of_slot, rows, probs, ids, bias)
        gate_up = (30 * torch.randn(19, 266, generator=generator)).to(dtype)
        outputs += [m.swiglu(gate_up), m.swiglu_grad(x, gate_up)]
        for tensor in outputs:
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
print(m._C.cpu_capability(), digest.hexdigest())
"""


def test_every_instruction_set_gives_the_same_bits() -> None:
    plain = run(HASH_RESULTS, MOE_OPS_CPU_CAPABILITY="default")
    level, expected = plain.stdout.split()
    assert level == "default"
    best, digest = run(HASH_RESULTS).stdout.split()
    assert digest == expected, best
    if best == "avx512":
        level, digest = run(HASH_RESULTS, MOE_OPS_CPU_CAPABILITY="avx2").stdout.split()
        assert (level, digest) == ("avx2", expected)


def test_unknown_instruction_set_is_refused() -> None:
    result = run(HASH_RESULTS, MOE_OPS_CPU_CAPABILITY="sse9")
    assert "ValueError: MOE_OPS_CPU_CAPABILITY must be default, avx2 or avx512" in result.stderr
