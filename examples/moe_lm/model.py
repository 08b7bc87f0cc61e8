"""A decoder-only transformer over bytes whose feed-forward layers are mixtures of experts."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torch_moe_ops.nn import MoE

from .data import VOCABULARY
from .options import Config

ROTARY_BASE = 10000.0
"""Longest wavelength of the rotary positions, in bytes over 2 pi; the RoFormer paper's value."""

EMBEDDING_STD = 0.02
"""Spread of the first embeddings; small, so that the first predictions are close to uniform."""


class LMOutput(NamedTuple):
    """What the model returns; L layers, E experts, V = 256 bytes."""

    logits: Tensor
    """(B, S, V), the prediction of the next byte at each position."""
    aux_loss: Tensor
    """Scalar: router losses of all layers, already weighted, to be added to the loss."""
    tokens_per_expert: Tensor
    """(L, E), int64: choices before any drop."""
    drop_rate: Tensor
    """Scalar: share of the choices that found their expert full, mean over the layers."""


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)
        half = config.hidden // config.heads // 2
        frequencies = ROTARY_BASE ** -(torch.arange(half) / half)
        angles = torch.outer(torch.arange(config.context), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        batch, length, hidden = x.shape
        # (B, S, 3H) -> three times (B, heads, S, H / heads)
        shape = (batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = self.qkv(x).view(shape).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, hidden))

    def _rotate(self, x: Tensor) -> Tensor:
        """Turns each pair (x1[i], x2[i]) by its position times frequency i."""
        length = x.shape[-2]
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], dim=-1)


class Block(nn.Module):
    """x + attention(norm(x)), then x + moe(norm(x))."""

    def __init__(self, config: Config, ep_group: ProcessGroup | None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.hidden)
        self.moe = MoE(
            config.hidden,
            config.intermediate,
            config.experts,
            config.top_k,
            capacity_factor=config.capacity_factor,
            aux_loss_coef=config.aux_loss,
            z_loss_coef=config.z_loss,
            ep_group=ep_group,
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(B, S, H) -> (B, S, H), then what the MoE layer reports."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        y, aux_loss, tokens_per_expert, drop_rate = self.moe(self.moe_norm(x))
        return x + self.dropout(y), aux_loss, tokens_per_expert, drop_rate


class MoELanguageModel(nn.Module):
    """Predicts the next byte from up to `config.context` bytes.

    With `ep_group` the experts are spread over its ranks, and each rank passes its own sequences.
    """

    def __init__(self, config: Config, ep_group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.context = config.context
        self.embedding = nn.Embedding(VOCABULARY, config.hidden)
        self.blocks = nn.ModuleList(Block(config, ep_group) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)

    def parameter_counts(self) -> tuple[int, int]:
        """All parameters, and those at work on one byte: K of E experts, and all the rest."""
        total = active = sum(p.numel() for p in self.parameters())
        for layer in self.modules():
            if isinstance(layer, MoE):
                local = sum(p.numel() for p in layer.experts.parameters())
                in_experts = local * layer.experts.ep_size
                total += in_experts - local
                active += in_experts // layer.num_experts * layer.top_k - local
        return total, active

    def forward(self, tokens: Tensor) -> LMOutput:
        """Predicts every next byte.

        Args:
            tokens: (B, S), int64, S <= context.
        """
        x = self.embedding(tokens)
        losses, loads, drops = [], [], []
        for block in self.blocks:
            x, aux_loss, tokens_per_expert, drop_rate = block(x)
            losses.append(aux_loss)
            loads.append(tokens_per_expert)
            drops.append(drop_rate)
        return LMOutput(
            self.head(self.norm(x)),
            torch.stack(losses).sum(),
            torch.stack(loads),
            torch.stack(drops).mean(),
        )

    @torch.no_grad()
    def generate(
        self, prompt: bytes, length: int, generator: torch.Generator, temperature: float = 0.8
    ) -> bytes:
        """Continues a prompt, drawing one byte at a time.

        Args:
            prompt: at least one byte; only the last `context` bytes are looked at.
            length: bytes to add.
            generator: CPU generator that the bytes are drawn with.
            temperature: below 1, likely bytes are drawn more often than the model says.

        Returns:
            The prompt and the added bytes.
        """
        device = self.embedding.weight.device
        tokens = list(prompt)
        for _ in range(length):
            window = torch.tensor([tokens[-self.context :]], device=device)
            logits = self(window).logits[0, -1].float().cpu()
            probabilities = (logits / temperature).softmax(dim=-1)
            tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        return bytes(tokens)
