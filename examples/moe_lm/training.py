"""The training loop, and all of its state in a form that can be saved and put back to the bit.

With several ranks the steps are those of one process up to the rounding of sums: losses and
gradients are means over the ranks, each of which works on its part of every batch.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from torch_moe_ops.nn import (
    average_expert_gradients,
    clip_grad_norm_,
    gather_expert_state,
    slice_expert_state,
)

from .data import Corpus, ordered_batches, random_batch
from .model import LMOutput, MoELanguageModel
from .options import Config, UserError
from .ranks import Ranks

ADAM_BETAS = (0.9, 0.98)
"""A shorter memory of squared gradients than the usual 0.999: runs here have hundreds of steps."""

FINAL_LR_SHARE = 0.05
"""The cosine ends at this share of the peak learning rate."""

LOAD_BINS = 120
"""Columns of the heat maps of expert load; each covers an equal share of the steps."""

SPEED_MEMORY = 0.9
"""Weight of the past in the running mean of the step time that the progress bar shows."""


def learning_rate(step: int, config: Config) -> float:
    """Rises in a line over the warm-up steps, then falls along half a cosine to the last step."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * (
        FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))
    )


class History:
    """What was measured so far; S steps, L layers, E experts.

    Expert load is added up over bins of steps, so that it stays small in a long run.
    """

    def __init__(self, config: Config) -> None:
        self.steps_per_bin = math.ceil(config.steps / LOAD_BINS)
        self.train_bits = torch.zeros(config.steps, dtype=torch.float64)
        """(S,): bits per byte on the batch of the step."""
        self.drop_rate = torch.zeros(config.steps, dtype=torch.float64)
        """(S,): share of choices that found their expert full."""
        self.expert_load = self._empty_load(config)
        """(bins, L, E), int64: bytes that chose the expert."""
        self.validation: list[tuple[int, float]] = []
        """Pairs (steps done, bits per byte on the whole validation text)."""

    def _empty_load(self, config: Config) -> Tensor:
        bins = math.ceil(config.steps / self.steps_per_bin)
        return torch.zeros(bins, config.layers, config.experts, dtype=torch.int64)

    def add(self, step: int, bits: float, drop_rate: float, load: Tensor) -> None:
        """Notes what a training step measured."""
        self.train_bits[step] = bits
        self.drop_rate[step] = drop_rate
        self.expert_load[step // self.steps_per_bin] += load

    def state(self, step: int) -> dict[str, Any]:
        """The measurements of the steps before `step`, for a checkpoint."""
        return {
            "steps_per_bin": self.steps_per_bin,
            "train_bits": self.train_bits[:step].clone(),
            "drop_rate": self.drop_rate[:step].clone(),
            "expert_load": self.load_until(step).clone(),
            "validation": list(self.validation),
        }

    def restore(self, state: dict[str, Any], config: Config) -> None:
        """Puts back what `state` returned; `config.steps` may have changed since."""
        self.steps_per_bin = state["steps_per_bin"]
        self.expert_load = self._empty_load(config)
        for name in ("train_bits", "drop_rate", "expert_load"):
            getattr(self, name)[: len(state[name])] = state[name]
        self.validation = [(int(step), float(bits)) for step, bits in state["validation"]]

    def load_until(self, step: int) -> Tensor:
        """The bins of `expert_load` that the steps before `step` fall into."""
        return self.expert_load[: math.ceil(step / self.steps_per_bin)]


class Trainer:
    """A model in training.

    The random numbers come from two places, both part of `state()`: torch's global CPU generator
    (first weights, dropout) and a generator of its own for the order of the data. All ranks draw
    the same, except for dropout: masks differ from rank to rank, and so from those of one process.
    """

    def __init__(
        self, config: Config, corpus: Corpus, device: torch.device, ranks: Ranks | None = None
    ) -> None:
        self.config = config
        self.corpus = corpus
        self.device = device
        self.ranks = ranks or Ranks()
        torch.manual_seed(config.seed)
        self.data_order = torch.Generator().manual_seed(config.seed)
        self.model = MoELanguageModel(config, self.ranks.group).to(device)
        average_expert_gradients(self.model)
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=ADAM_BETAS,
            # One kernel for all parameters; the default is a slow Python loop on the CPU.
            fused=device.type == "cpu",
        )
        self.step = 0
        """Steps done."""
        self.history = History(config)
        self.imbalance = math.nan
        """Expert load of the last step, max / mean."""

    def run(self, stop: Callable[[], bool], save: Callable[[], None], save_every: int) -> None:
        """Trains up to `config.steps`.

        Args:
            stop: asked after each step; True, on any rank, ends the run early on all.
            save: called every `save_every` steps, before an early end, and at the end.
            save_every: see `save`.
        """
        bar = tqdm(
            total=self.config.steps,
            initial=self.step,
            bar_format="{percentage:3.0f}%|{bar}| {n}/{total} [{elapsed}<{remaining}{postfix}]",
            dynamic_ncols=True,
            # A log file gets a line now and then, a terminal a bar that moves.
            mininterval=0.2 if sys.stderr.isatty() else 10.0,
            disable=not self.ranks.is_first,
        )
        step_time = 0.0
        with bar:
            while self.step < self.config.steps:
                started = time.perf_counter()
                self.train_step()
                elapsed = time.perf_counter() - started
                memory = SPEED_MEMORY if step_time else 0.0
                step_time = memory * step_time + (1 - memory) * elapsed
                if self.step % self.config.eval_every == 0:
                    self._add_validation()
                stopping = self.ranks.any(stop())
                if stopping or self.step % save_every == 0:
                    save()
                bar.set_postfix_str(self._progress(step_time), refresh=False)
                bar.update()
                if stopping:
                    break
        if self.step == self.config.steps:
            self._add_validation()
            save()

    def _add_validation(self) -> None:
        """Validates, unless the history ends with this very step (a finished run was resumed)."""
        if not self.history.validation or self.history.validation[-1][0] != self.step:
            self.history.validation.append((self.step, self.validate()))

    def train_step(self) -> None:
        """One optimizer step.

        Raises:
            UserError: the loss is no longer a number; the weights are still those before the step.
        """
        config = self.config
        inputs, targets = random_batch(
            self.corpus.train, config.batch, config.context, self.data_order
        )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, config)
        self.model.train()
        with self.ranks.own_random_numbers():
            loss, output = self._loss(self.ranks.part(inputs), self.ranks.part(targets))
        bits = self._mean(loss) / math.log(2)
        if not math.isfinite(bits):
            raise UserError(f"the loss is {bits} at step {self.step}; try a lower --lr")
        (loss + output.aux_loss).backward()
        self.ranks.average_gradients(self.model)
        clip_grad_norm_(self.model, config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

        expert_load = self.ranks.total(output.tokens_per_expert)
        self.history.add(self.step, bits, self._mean(output.drop_rate), expert_load)
        # Largest load over the even share, mean over the layers: 1 is perfect balance.
        load = expert_load.double()
        self.imbalance = (load.amax(dim=1) / load.mean(dim=1)).mean().item()
        self.step += 1

    @torch.no_grad()
    def validate(self) -> float:
        """Bits per byte on the whole validation text.

        The text is cut into sequences of `context` bytes, so a byte is predicted from half a
        context on average: a little harsher than the model deserves.
        """
        self.model.eval()
        text = self.corpus.validation
        total = 0.0
        for inputs, targets in ordered_batches(text, self.config.batch, self.config.context):
            mine = self.ranks.part(targets)
            loss, _ = self._loss(self.ranks.part(inputs), mine)
            total += loss.item() * mine.numel() if mine.numel() else 0.0
        total = self.ranks.total(torch.tensor(total, dtype=torch.float64)).item()
        return total / (text.numel() - 1) / math.log(2)

    def autocast(self) -> torch.autocast:
        """The precision that the model runs in."""
        return torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=self.config.dtype == "bf16"
        )

    def _loss(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, LMOutput]:
        with self.autocast():
            output = self.model(inputs.to(self.device))
        loss = F.cross_entropy(
            output.logits.flatten(0, 1).float(), targets.to(self.device).flatten()
        )
        return loss, output

    def _mean(self, number: Tensor) -> float:
        """Over the ranks, which have equally many sequences of a training batch."""
        return self.ranks.total(number).item() / self.ranks.size

    def _progress(self, step_time: float) -> str:
        last = self.step - 1
        parts = [f"loss {self.history.train_bits[last]:.2f}"]
        if self.history.validation:
            parts.append(f"val {self.history.validation[-1][1]:.2f}")
        tokens_per_second = self.config.batch * self.config.context / step_time
        parts.append(f"{tokens_per_second / 1000:.1f}k tokens/s")
        parts.append(f"load max/mean {self.imbalance:.2f}")
        if self.config.capacity_factor is not None:
            parts.append(f"dropped {self.history.drop_rate[last]:.1%}")
        return ", ".join(parts)

    def state(self) -> dict[str, Any]:
        """All that a later process needs to go on as if there had been no break.

        The same for any number of ranks, each of which calls it.
        """
        optimizer = self.optimizer
        return {
            "step": self.step,
            "model": gather_expert_state(self.model, self.model.state_dict()),
            "optimizer": gather_expert_state(self.model, optimizer.state_dict(), optimizer),
            "random": torch.get_rng_state(),
            "data_order": self.data_order.get_state(),
            "history": self.history.state(self.step),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Puts back what `state` returned."""
        optimizer = self.optimizer
        self.step = state["step"]
        self.model.load_state_dict(slice_expert_state(self.model, state["model"]))
        optimizer.load_state_dict(slice_expert_state(self.model, state["optimizer"], optimizer))
        self.history.restore(state["history"], self.config)
        self.data_order.set_state(state["data_order"])
        torch.set_rng_state(state["random"])
