"""What outlives what: tensors, workspaces, streams, threads, devices. Nothing stays for good."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torch_moe_ops
from tests.cann import bootstrap
from tests.npu import plugin
from tests.npu.plugin import live
from tests.npu.settings import BLOCKING, CACHING, FULL_COUNTS, QUEUE, STREAMS
from tests.npu.test_faults import (
    Prepared,
    _settle,
    needs_no_queue,
    needs_queue_process,
    prepared,
    run_alone,
)
from tests.npu.test_ops import SUITES, cpu
from tests.ops.accuracy import backward
from tests.ops.data import Sample, Values, assert_same_bits, same_bits

ROUNDS = 25 if FULL_COUNTS or STREAMS != "delay" else 10
WORKSPACE = 256  # floats: the 1024 bytes that the stand-in's phase 1 asks for by default
# What torch_npu's IsOomError() takes for that, and the runtime's own code.
OUT_OF_MEMORY = (545002, 207001)


def first_sample(op: str) -> Sample:
    return SUITES[op].samples(torch.float32)[0]


def poisoned(tensors: list[Tensor]) -> list[Tensor]:
    """Fresh tensors of the same sizes with wrong values, filled in the order of the stream."""
    return [torch.empty_like(tensor).copy_(tensor) for tensor in tensors]


def poison_of(tensor: Tensor) -> Tensor:
    wrong = float("nan") if tensor.is_floating_point() else -77_777_777
    return torch.full(tensor.shape, wrong, dtype=tensor.dtype).to("npu")


class TestFreedTensors:
    """torch may give the memory of a dead tensor to work that is queued later, not earlier."""

    @pytest.mark.parametrize("op", SUITES)
    def test_inputs(self, op: str) -> None:
        for case in prepared(op):
            poison = [poison_of(tensor) for tensor in case.sample.tensors() + case.upstream]
            kept = []
            for _ in range(ROUNDS):
                leaves = case.sample.map(torch.clone).leaves()
                upstream = [gradient.clone() for gradient in case.upstream]
                outputs = leaves.call(case.function)
                results = [output.detach() for output in outputs]
                results += backward(leaves, outputs, upstream)
                del leaves, outputs, upstream
                poisoned(poison)
                kept.append(results)
            for results in kept:
                assert_same_bits(cpu(results), case.expected[True])

    @pytest.mark.parametrize("op", SUITES)
    def test_workspace(self, op: str) -> None:
        """The kernel spoils its workspace, so what gets its memory next has to come later."""
        ours = torch.arange(float(WORKSPACE)).to("npu")
        for case in prepared(op):
            kept = []
            for _ in range(ROUNDS):
                outputs = case.sample.call(case.function)
                kept.append((outputs, poisoned([ours] * 4)))
            for outputs, others in kept:
                assert_same_bits(cpu(outputs), case.expected[False])
                assert all(torch.equal(other.cpu(), ours.cpu()) for other in others)


class TestThreads:
    def test_each_on_its_stream(self, standin: bootstrap.Standin) -> None:
        """Four threads, different operators, forward and backward."""
        calls = 300 if FULL_COUNTS or STREAMS != "delay" else 60
        ops = list(SUITES)
        cases = {op: prepared(op)[0] for op in ops}
        for case in cases.values():
            case.check(both=True)
        torch.npu.synchronize()
        before = live(standin)
        failures: list[str] = []
        done = [0] * 4

        def work(number: int) -> None:
            try:
                with torch.npu.stream(torch.npu.Stream()):
                    for call in range(calls):
                        case = cases[ops[(call + 3 * number) % len(ops)]]
                        case.check(both=call % 2 == 0)
                        done[number] += 1
            except BaseException as error:
                failures.append(f"thread {number}: {error!r}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.npu.synchronize()
        assert failures == []
        assert done == [calls] * 4
        assert live(standin) == before


class TestStreams:
    """An operator on a side stream reads what the main stream writes."""

    def wrong_results(self, order: Callable[[torch.npu.Stream, torch.npu.Stream], None]) -> int:
        """How many of the calls, with that done before each and after it, went wrong."""
        case = prepared("token_permute")[0]
        rows, indices = case.sample.args[:2]
        main, side = torch.npu.current_stream(), torch.npu.Stream()
        with torch.npu.stream(side):  # the first operator on a stream waits for the device
            case.sample.call(case.function)
        zeros = poison_of(rows)
        torch.npu.synchronize()
        wrong = 0
        for _ in range(ROUNDS):
            values = zeros.clone()
            torch.npu.synchronize()
            for _ in range(3):
                values.copy_(zeros)
            values.copy_(rows)
            order(side, main)
            with torch.npu.stream(side):
                permuted, _ = case.function(values, indices, *case.sample.args[2:])
            order(main, side)
            copy = permuted.clone()
            torch.npu.synchronize()
            wrong += not same_bits(copy.cpu(), case.expected[False][0])
        return wrong

    def test_wait_stream(self) -> None:
        assert self.wrong_results(lambda later, earlier: later.wait_stream(earlier)) == 0

    def test_events(self) -> None:
        def order(later: torch.npu.Stream, earlier: torch.npu.Stream) -> None:
            event = torch.npu.Event()
            event.record(earlier)
            later.wait_event(event)

        assert self.wrong_results(order) == 0

    @pytest.mark.skipif(STREAMS != "delay", reason="only late kernels show a missing wait for sure")
    @pytest.mark.skipif(not CACHING, reason="without a cache every free waits for the device")
    @pytest.mark.skipif(BLOCKING, reason="every launch waits for the device in this setting")
    def test_missing_wait_shows(self) -> None:
        """Without any order there are wrong results: the tests above can fail.

        About half of the calls go wrong, so that not one in 20 times ROUNDS is out of the question.
        """
        assert any(self.wrong_results(lambda later, earlier: None) for _ in range(20))

    @pytest.mark.parametrize("op", SUITES)
    def test_among_torch_operators(self, op: str) -> None:
        """Before it the inputs are made right, after it they are cleared, on one stream."""
        case = prepared(op)[0]
        floating = [tensor.is_floating_point() for tensor in case.sample.tensors()]
        halves = case.sample.map_floating(lambda tensor: tensor / 2)
        poison = [poison_of(tensor) for tensor in case.sample.tensors()]
        inputs = case.sample.map(torch.empty_like)
        kept = []
        for number in range(ROUNDS):
            for mine, right, half, real in zip(
                inputs.tensors(), case.sample.tensors(), halves.tensors(), floating, strict=True
            ):
                # torch_npu's copies are queued; the arithmetic goes through the CPU here.
                if number % 2 == 0 and real:
                    mine.copy_(half).mul_(2)
                else:
                    mine.copy_(right)
            kept.append(inputs.call(case.function))
            for mine, wrong in zip(inputs.tensors(), poison, strict=True):
                mine.zero_() if number % 2 == 0 else mine.copy_(wrong)
        for outputs in kept:
            assert_same_bits(cpu(outputs), case.expected[False])


@pytest.mark.skipif(torch.npu.device_count() < 2, reason="there is one device")
class TestSecondDevice:
    @pytest.mark.parametrize("op", SUITES)
    def test_while_another_is_current(self, op: str) -> None:
        assert torch.npu.current_device() == 0
        here = prepared(op)[0]
        there = Prepared(op, first_sample(op), "npu:1")
        leaves = there.sample.leaves()
        outputs = leaves.call(there.function)
        gradients = backward(leaves, outputs, there.upstream)
        results = [output.detach() for output in outputs] + gradients
        assert {tensor.device for tensor in results} == {torch.device("npu:1")}
        assert torch.npu.current_device() == 0
        assert_same_bits(cpu(results), here.expected[True])
        torch.npu.synchronize(1)

    @pytest.mark.parametrize("op", SUITES)
    def test_mixed_devices_are_refused(self, op: str, standin: bootstrap.Standin) -> None:
        sample = first_sample(op)
        launches = standin.launches()
        for place in range(1, len(sample.tensors())):
            devices = iter(["npu:1" if n == place else "npu:0" for n in range(place + 9)])
            mixed = sample.map(lambda tensor, devices=devices: tensor.to(next(devices)))
            with pytest.raises(RuntimeError, match="must be on the device of ") as caught:
                mixed.call(getattr(torch.ops.moe, op))
            assert {"npu:0", "npu:1"} <= set(re.findall(r"npu:\d", str(caught.value)))
        torch.npu.synchronize(0)
        torch.npu.synchronize(1)
        assert standin.launches() == launches


def run_out_of_memory(argument: str) -> None:
    """What a process of its own does: phase 2 fails with that code, in the queue."""
    code, trace = argument.split(",")
    standin = plugin.standin
    assert standin is not None
    api = "aclnnMoeTokenPermute"
    case = Prepared("token_permute", first_sample("token_permute"))
    torch.npu.synchronize()
    before = live(standin)
    standin.trace(trace)
    standin.fail(f"phase2:{api}", 1, int(code))
    case.sample.call(case.function)
    _settle(standin, before)
    standin.trace(None)
    texts = []
    for action in (lambda: case.sample.call(case.function), torch.npu.synchronize):
        try:
            action()
        except RuntimeError as error:
            texts.append(str(error))
    # Run again, the executor would be refused with another code.
    assert f"{api} failed in phase 2: {code}" in texts[0], texts
    phases = Path(trace).read_text().count('"phase": 2')
    assert phases == 1, Path(trace).read_text()
    assert live(standin) == before
    print("to the end")


class TestOutOfMemoryInPhase2:
    """An executor can be used once, whatever torch_npu does to find memory."""

    @needs_queue_process
    @pytest.mark.parametrize("code", OUT_OF_MEMORY)
    def test_with_a_queue(self, code: int, tmp_path: Path) -> None:
        run_alone("tests.npu.test_lifetimes.run_out_of_memory", f"{code},{tmp_path / 'trace'}")

    @needs_no_queue
    @pytest.mark.parametrize("code", OUT_OF_MEMORY)
    def test_without(self, code: int, standin: bootstrap.Standin, tmp_path: Path) -> None:
        case = prepared("token_permute")[0]
        before = live(standin)
        standin.trace(tmp_path / "trace")
        standin.fail("phase2:aclnnMoeTokenPermute", 1, code)
        with pytest.raises(RuntimeError, match=f"aclnnMoeTokenPermute failed in phase 2: {code}"):
            case.sample.call(case.function)
        standin.trace(None)
        assert (tmp_path / "trace").read_text().count('"phase": 2') == 1
        assert live(standin) == before
        case.check(both=True)


class TestRefusals:
    @pytest.mark.parametrize("op", SUITES)
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.complex64, torch.int16])
    def test_dtype_that_no_kernel_takes(
        self, op: str, dtype: torch.dtype, standin: bootstrap.Standin
    ) -> None:
        """In every place, after arguments that are fine: nothing is made and nothing launched."""
        sample = first_sample(op)
        before = live(standin)
        launches = standin.launches()
        for place in range(len(sample.tensors())):
            wrong = iter([n == place for n in range(99)])
            changed = sample.map(lambda t, wrong=wrong: (t.to(dtype) if next(wrong) else t).npu())
            with pytest.raises((TypeError, NotImplementedError)):
                changed.call(getattr(torch.ops.moe, op))
        torch.npu.synchronize()
        assert live(standin) == before
        assert standin.launches() == launches

    def test_storage_without_memory(self, standin: bootstrap.Standin) -> None:
        """The descriptors exist already when phase 1 finds it."""
        case = prepared("token_permute")[0]
        before = live(standin)
        gone = case.sample.map(torch.clone)
        gone.tensors()[0].untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="aclnnMoeTokenPermute failed in phase 1"):
            gone.call(case.function)
        torch.npu.synchronize()
        assert live(standin) == before
        case.check(both=True)


def test_steady_state(standin: bootstrap.Standin) -> None:
    """Many runs of a small MoE block leave memory and handles as they were."""
    runs = 2_000 if FULL_COUNTS else 300
    values = Values(torch.float32)
    tokens = values(6, 4).to("npu").requires_grad_()
    weight = values(3, 4, 4).to("npu").requires_grad_()
    probs = values(6, 2).abs().to("npu").requires_grad_()
    ids = values.ids(6, 2, experts=3).to("npu")
    counts = torch.bincount(ids.cpu().flatten(), minlength=3).to("npu")

    def run() -> list[Tensor]:
        rows, order = torch_moe_ops.token_permute(tokens, ids)
        hidden = torch_moe_ops.grouped_matmul(rows, weight, counts)
        output = torch_moe_ops.token_unpermute(hidden, order, probs)
        gradients = torch.autograd.grad(output, [tokens, weight, probs], output.detach())
        return [output.detach(), *gradients]

    def state() -> dict[str, int]:
        gc.collect()
        torch.npu.synchronize()
        return {**live(standin), "device_bytes": standin.live("device_bytes")}

    for _ in range(20):
        expected = cpu(run())
    before = state()
    allocated = torch.npu.memory_allocated()
    for _ in range(runs):
        run()
    assert_same_bits(cpu(run()), expected)
    assert state() == before
    assert torch.npu.memory_allocated() == allocated
    print(f"{runs} forward and backward runs, queue {QUEUE}, streams {STREAMS}")
