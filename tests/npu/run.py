"""Runs the NPU tests on the stand-in for CANN: ``python tests/npu/run.py [--full] [arguments]``.

Builds the stand-in first. pytest-xdist starts one worker for each setting, and each runs every
test: ``[gw2]`` in pytest's output is the third setting of the list that is printed. Further
arguments go to pytest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.cann import build  # noqa: E402
from tests.npu.settings import FULL, SAMPLED, Setting  # noqa: E402

# Each worker holds torch and torch_npu, about half a gigabyte.
BATCH = 6


def worker(setting: Setting) -> str:
    """xdist's specification of a process with this environment."""
    variables = [f"env:{name}={value}" for name, value in setting.environment().items()]
    return "//".join(["popen", *variables])


def run_pytest(
    settings: Sequence[Setting], directory: Path, arguments: Sequence[str], *, many: bool = False
) -> int:
    """One pytest session over these settings, with ``many`` random calls. Returns its status."""
    for number, setting in enumerate(settings):
        print(f"gw{number}: {setting}", flush=True)
    command = [sys.executable, "-m", "pytest", "-p", "tests.npu.plugin", "--dist", "each"]
    for setting in settings:
        command += ["--tx", worker(setting)]
    environment = {
        **os.environ,
        "MOE_OPS_TEST_STANDIN": str(directory),
        "MOE_OPS_TEST_NPU_WORKERS": "1",
        "MOE_OPS_TEST_FULL": str(int(many)),
        # The plugin loads torch_npu itself, once CANN's stand-in is there.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
    }
    named = any((ROOT / argument.split("::")[0]).exists() for argument in arguments if argument)
    tests = [] if named else ["tests/npu"]
    return subprocess.run(
        [*command, *arguments, *tests], cwd=ROOT, env=environment, check=False
    ).returncode


def main() -> int:
    """Builds, then tests in batches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="the whole matrix instead of a sample")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "cann-standin")
    options, arguments = parser.parse_known_args()
    directory = build.build(options.build)
    settings = FULL if options.full else SAMPLED
    statuses = [
        run_pytest(settings[start : start + BATCH], directory, arguments)
        for start in range(0, len(settings), BATCH)
    ]
    if options.full:
        faults = [*arguments, "tests/npu/test_faults.py"]
        statuses.append(run_pytest(SAMPLED[:1], directory, faults, many=True))
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())
