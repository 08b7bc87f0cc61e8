"""The layer and the example train on an NPU as they do on the CPU."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.npu.settings import STREAMS
from torch_moe_ops.nn import MoE

ROOT = Path(__file__).parents[2]
TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 23, 12, 20, 5, 2

LAYERS: dict[str, dict[str, Any]] = {
    "dropless": {},
    "capacity": {"capacity_factor": 0.8},
    "shared expert": {"shared_intermediate_size": 9},
    "sigmoid router, losses": {
        "score_function": "sigmoid",
        "aux_loss_coef": 0.01,
        "z_loss_coef": 0.01,
    },
}


def make_layer(options: dict[str, Any]) -> MoE:
    torch.manual_seed(3)
    return MoE(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, **options)


def train(layer: MoE, x: Tensor, target: Tensor) -> tuple[list[float], list[Tensor]]:
    """Losses of 20 steps on one batch, and the parameters after them."""
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        out = layer(x)
        loss = (out.output - target).square().mean() + out.aux_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach().cpu() for parameter in layer.parameters()]


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_same_losses_as_on_the_cpu(options: dict[str, Any]) -> None:
    x, target = torch.randn(2, TOKENS, HIDDEN).unbind(0)
    losses, parameters = train(make_layer(options), x, target)
    layer = make_layer(options).to("npu")
    npu_losses, npu_parameters = train(layer, x.npu(), target.npu())
    assert losses[-1] < losses[0]
    torch.testing.assert_close(npu_losses, losses, rtol=2e-5, atol=1e-6)
    for ours, theirs in zip(npu_parameters, parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-5)


def test_autocast() -> None:
    """bfloat16 products inside a region, as on the CPU; parameters and gradients in float32."""
    results = []
    for device in ("cpu", "npu"):
        layer = make_layer({}).to(device)
        x = torch.linspace(-1, 1, TOKENS * HIDDEN, device=device).view(TOKENS, HIDDEN)
        with torch.autocast(device, torch.bfloat16):
            out = layer(x)
        out.output.float().square().sum().backward()
        gradients = [parameter.grad for parameter in layer.parameters()]
        assert {gradient.dtype for gradient in gradients} == {torch.float32}
        results.append([out.output.float().cpu(), *[gradient.cpu() for gradient in gradients]])
    for ours, theirs in zip(*results, strict=True):
        scale = theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02 * scale)


def test_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """examples/train_moe_lm.py --device npu."""
    if STREAMS == "delay":
        pytest.skip("runs in the settings without delays, to save time")
    text = tmp_path / "text.txt"
    text.write_text("One token, two experts; two tokens, one expert. " * 60)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    arguments = (
        f"--device npu --text {text} --sample-bytes 4 --steps 3 --layers 1 --hidden 16 --heads 2 "
        "--context 16 --batch 2"
    )
    script = str(ROOT / "examples" / "train_moe_lm.py")
    monkeypatch.setattr(sys, "argv", [script, *arguments.split(), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as exit_status:
        runpy.run_path(script, run_name="__main__")
    assert exit_status.value.code == 0, capfd.readouterr().err
    assert "npu" in capfd.readouterr().out
    assert (tmp_path / "out" / "checkpoint.pt").exists()
