"""Faults injected into every step of every operator: the error, what is left, the call after it.

Only the package's own aclnn functions fail here: torch_npu's operators leak their descriptors.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torch_moe_ops
from tests.cann import bootstrap
from tests.npu import plugin
from tests.npu.plugin import live
from tests.npu.settings import CACHING, FULL_COUNTS, ON_950, QUEUE
from tests.npu.test_ops import BEYOND_NPU, SUITES, cpu, has_float64
from tests.ops.accuracy import backward
from tests.ops.data import Sample, assert_same_bits
from tests.ops.tracing import upstream_for

ROOT = Path(__file__).parents[2]
RANDOM_CALLS = 10_000 if FULL_COUNTS else 1_500

# Who calls each aclnn function.
CALLERS = {
    "aclnnMoeTokenPermute": "token_permute",
    "aclnnMoeTokenPermuteGrad": "token_permute_grad",
    "aclnnMoeTokenUnpermute": "token_unpermute",
    "aclnnMoeTokenUnpermuteGrad": "token_unpermute_grad",
    "aclnnMoeInitRoutingV2": "init_routing_v2",
    "aclnnMoeInitRoutingV2Grad": "init_routing_v2_grad",
    "aclnnMoeFinalizeRoutingV2": "finalize_routing_v2",
    "aclnnMoeFinalizeRoutingV2Grad": "finalize_routing_v2_grad",
    "aclnnGroupedMatmulV4": "grouped_matmul(_weight_grad)?",
    "aclnnGroupedMatmulV5": "grouped_matmul(_weight_grad)?",
    "aclnnSwiGlu": "swiglu",
    "aclnnSwiGluGrad": "swiglu_grad",
}
PHASES = {"phase1": "phase 1 (GetWorkspaceSize)", "phase2": "phase 2"}
CODES = {
    161001: "161001 ACLNN_ERR_PARAM_NULLPTR",
    161002: "161002 ACLNN_ERR_PARAM_INVALID",
    361001: "361001 ACLNN_ERR_RUNTIME_ERROR",
    561002: "561002 ACLNN_ERR_INNER_TILING_ERROR",
    507018: "507018",  # the runtime's, without a name here
}

needs_no_queue = pytest.mark.skipif(QUEUE != "0", reason="the call itself fails without a queue")
needs_queue = pytest.mark.skipif(QUEUE == "0", reason="there is no queue in this setting")
# Each test starts a process. The queue is torch_npu's and does not depend on the chip.
needs_queue_process = pytest.mark.skipif(
    QUEUE == "0" or ON_950,
    reason="there is no queue, or it is left to the settings of A2 and A3, to save time",
)


class Prepared:
    """A sample on the NPU, with what it gives when nothing fails."""

    def __init__(self, op: str, sample: Sample, device: str = "npu") -> None:
        self.function = getattr(torch_moe_ops, op)
        self.label = f"{op} {sample.name}"
        upstream = upstream_for(sample.call(self.function))
        self.sample = sample.map(lambda tensor: tensor.to(device))
        self.upstream = [gradient.to(device) for gradient in upstream]
        self.expected = {both: self.run(both=both) for both in (False, True)}

    def run(self, *, both: bool) -> list[Tensor]:
        """The outputs, and the gradients too with ``both``, on the CPU."""
        if not both:
            return cpu(self.sample.call(self.function))
        leaves = self.sample.leaves()
        outputs = leaves.call(self.function)
        gradients = backward(leaves, outputs, self.upstream)
        return cpu([output.detach() for output in outputs] + gradients)

    def check(self, *, both: bool) -> None:
        assert_same_bits(self.run(both=both), self.expected[both])

    def steps(self, standin: bootstrap.Standin, trace: Path, *, both: bool) -> list[str]:
        """The aclnn functions of the package that a run calls, in order."""
        standin.trace(trace)
        self.run(both=both)
        standin.trace(None)
        calls = [call["api"] for call in bootstrap.read_trace(trace)]
        return [api for api in calls if api in CALLERS]


@functools.cache
def prepared(op: str) -> tuple[Prepared, ...]:
    """A handful of samples of an operator."""
    samples = [
        sample
        for sample in SUITES[op].samples(torch.float32)
        if (op, sample.name) not in BEYOND_NPU and not has_float64(sample)
    ]
    return tuple(Prepared(op, sample) for sample in samples[:: max(1, len(samples) // 5)])


def error_text(phase: str, api: str, code: int) -> str:
    """How the message begins, as a regular expression."""
    reason = re.escape(f"{api} failed in {PHASES[phase]}: {CODES[code]} (CANN ")
    return rf"moe::{CALLERS[api]}: {reason}"


@pytest.fixture(autouse=True)
def _no_fault_stays(standin: bootstrap.Standin) -> Iterator[None]:
    yield
    for phase, api in itertools.product(PHASES, CALLERS):
        standin.fail(f"{phase}:{api}", 0)
    standin.fail("malloc", 0)


@needs_no_queue
class TestEveryStep:
    @pytest.mark.parametrize("phase", PHASES)
    @pytest.mark.parametrize("op", SUITES)
    def test_phases(self, op: str, phase: str, standin: bootstrap.Standin, tmp_path: Path) -> None:
        codes = itertools.cycle(CODES)
        faults = 0
        for case in prepared(op):
            steps = case.steps(standin, tmp_path / "trace", both=True)
            before = live(standin)
            for api in dict.fromkeys(steps):
                for nth in range(1, steps.count(api) + 1):
                    code = next(codes)
                    standin.fail(f"{phase}:{api}", nth, code)
                    with pytest.raises(RuntimeError) as caught:
                        case.run(both=True)
                    text = str(caught.value)
                    assert re.match(error_text(phase, api, code), text), text
                    assert text.endswith(f"{api}: injected fault in {phase}")
                    assert live(standin) == before, case.label
                    case.check(both=True)
                    faults += 1
                standin.fail(f"{phase}:{api}", steps.count(api) + 1)
                case.check(both=True)  # no further call
                standin.fail(f"{phase}:{api}", 0)
        print(f"{op}: {faults} faults in {phase}")
        assert faults > 0

    def test_random_sequence(self, standin: bootstrap.Standin, tmp_path: Path) -> None:
        """Forward and backward of all operators, half of them with a fault somewhere."""
        draw = random.Random(0)
        cases = [case for op in SUITES for case in prepared(op)]
        steps = {
            (case, both): case.steps(standin, tmp_path / "trace", both=both)
            for case in cases
            for both in (False, True)
        }
        before = live(standin)
        faults = 0
        for _ in range(RANDOM_CALLS):
            case, both = draw.choice(cases), draw.random() < 0.5
            apis = steps[case, both]
            if not apis or draw.random() < 0.5:
                case.check(both=both)
                continue
            place = draw.randrange(len(apis))
            phase, api, code = draw.choice(list(PHASES)), apis[place], draw.choice(list(CODES))
            standin.fail(f"{phase}:{api}", apis[: place + 1].count(api), code)
            with pytest.raises(RuntimeError, match=error_text(phase, api, code)):
                case.run(both=both)
            assert live(standin) == before, case.label
            faults += 1
        print(f"{RANDOM_CALLS} calls, {faults} faults")
        assert faults > RANDOM_CALLS // 4


@needs_no_queue
@pytest.mark.skipif(CACHING, reason="torch's cache gives memory when the device has none")
class TestEveryAllocation:
    @pytest.fixture(autouse=True)
    def _nothing_is_left(self) -> None:
        """Instead of the check for all tests: torch_npu's own operators leak. See below."""

    @pytest.mark.parametrize("op", SUITES)
    def test_allocations(self, op: str, standin: bootstrap.Standin, tmp_path: Path) -> None:
        """Outputs, temporaries and workspaces, until a run needs no further allocation."""
        faults = 0
        workspaces = 0
        for case in prepared(op):
            for nth in itertools.count(1):
                before = live(standin)
                standin.trace(tmp_path / "trace")
                standin.fail("malloc", nth)
                try:
                    case.run(both=True)
                except RuntimeError as error:
                    text = str(error)
                else:
                    break
                finally:
                    standin.fail("malloc", 0)
                    standin.trace(None)
                assert "aclrtMalloc: injected fault" in text
                faults += 1
                self.check_left(standin, tmp_path / "trace", before)
                workspaces += self.unfinished(tmp_path / "trace") in CALLERS
                if nth % 4 == 0:
                    case.check(both=True)
            case.check(both=True)
        print(f"{op}: {faults} failed allocations, {workspaces} of a workspace")
        assert workspaces > 0

    def unfinished(self, trace: Path) -> str:
        """The aclnn function that got no workspace, if one was waiting for it."""
        calls = bootstrap.read_trace(trace)
        return calls[-1]["api"] if calls and calls[-1]["phase2"] is None else ""

    def check_left(self, standin: bootstrap.Standin, trace: Path, before: dict[str, int]) -> None:
        """Nothing, but for a copy of torch_npu's that got no workspace."""
        api = self.unfinished(trace)
        if api and api not in CALLERS:
            assert api == "aclnnInplaceCopy"
            before = {
                **before,
                "tensor": before["tensor"] + 2,
                "executor": before["executor"] + 1,
            }
        assert live(standin) == before


# ---- with a queue: after a failure torch_npu gives wrong results, so each case has its process --


def _settle(standin: bootstrap.Standin, before: dict[str, int]) -> None:
    """Waits until the queue has run the call that fails, without asking torch_npu."""
    deadline = time.monotonic() + 20
    while live(standin) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert live(standin) == before
    time.sleep(0.1)  # from the release of the handles to the end of the queued function


def _errors(*actions: str, case: Prepared) -> list[str]:
    """What the actions raise, empty texts for those that do not."""
    texts = []
    for action in actions:
        text = ""
        try:
            torch.npu.synchronize() if action == "synchronize" else case.sample.call(case.function)
        except RuntimeError as error:
            text = str(error)
        texts.append(text)
    return texts


def fail_in_queue(scenario: str) -> None:
    """What a process of its own does: see TestQueue."""
    standin = plugin.standin
    assert standin is not None
    api = "aclnnMoeTokenPermuteGrad" if scenario == "backward" else "aclnnMoeTokenPermute"
    case = Prepared("token_permute", SUITES["token_permute"].samples(torch.float32)[0])
    torch.npu.synchronize()
    before = live(standin)
    launches = standin.launches()
    standin.fail(f"phase2:{api}", 1, 561002)
    if scenario == "backward":
        leaves = case.sample.leaves()
        backward(leaves, leaves.call(case.function), case.upstream)
    else:
        case.sample.call(case.function)
    if scenario != "exit":
        _settle(standin, before)
        actions = ("synchronize", "call") if scenario == "synchronize" else ("call", "synchronize")
        errors = _errors(*actions, case=case)
        ours = [text for text in errors if re.search(error_text("phase2", api, 561002), text)]
        assert len(ours) == 1, errors
        assert ours[0].startswith("an earlier call failed in torch_npu's task queue")
        assert errors.index(ours[0]) == actions.index("call"), errors
        assert _errors("call", case=case) == [""]  # told once
        torch.npu.synchronize()
        assert live(standin) == before
        assert standin.launches() - launches >= (scenario == "backward")
    print("to the end")


def run_alone(function: str, argument: str) -> str:
    """Runs a function of this package's tests in a new process of the same setting."""
    module, name = function.rsplit(".", 1)
    code = f"from tests.npu import plugin\nfrom {module} import {name}\n{name}({argument!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("to the end\n"), done.stdout
    return done.stderr


class TestQueue:
    @needs_queue_process
    @pytest.mark.parametrize("scenario", ["synchronize", "call", "backward", "exit"])
    def test_phase2(self, scenario: str) -> None:
        """The next call tells, once, whether synchronize() has raised before or not; no crash."""
        run_alone("tests.npu.test_faults.fail_in_queue", scenario)

    @needs_queue
    @pytest.mark.parametrize("op", SUITES)
    def test_phase1_is_immediate(self, op: str, standin: bootstrap.Standin, tmp_path: Path) -> None:
        case = prepared(op)[0]
        api = case.steps(standin, tmp_path / "trace", both=False)[0]
        before = live(standin)
        for code in CODES:
            standin.fail(f"phase1:{api}", 1, code)
            with pytest.raises(RuntimeError, match=error_text("phase1", api, code)):
                case.sample.call(case.function)
            torch.npu.synchronize()
            assert live(standin) == before
        case.check(both=True)
