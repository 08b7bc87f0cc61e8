"""The text, its batches, and the two byte statistics that the model has to beat."""

from __future__ import annotations

import hashlib
import importlib
import math
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .options import UserError

VOCABULARY = 256
"""The tokens are bytes."""

VALIDATION_SHARE = 0.1
"""The last tenth of the text is never trained on."""

SMOOTHING = 0.1
"""Count added to every byte (pair) that the statistics know. Adding one is the textbook value; 0.1
makes the bigram better on every text tried here, and so the comparison harder for the model."""


@dataclass(frozen=True)
class Corpus:
    """A text cut in two. `train` and `validation` are 1-D uint8 tensors."""

    name: str
    train: Tensor
    validation: Tensor
    digest: str
    """SHA-256 of the whole text: a resumed run must see the same one."""


def load_corpus(path: Path | None, context: int) -> Corpus:
    """Reads the text of the user, or Python's help pages if there is none.

    Args:
        path: file to read as bytes, or None.
        context: bytes per sequence; both parts must hold at least one sequence and its next byte.

    Raises:
        UserError: the text cannot be read or is too short.
    """
    if path is None:
        name, text = f"help pages of Python {platform.python_version()}", python_help_pages()
    else:
        name = path.name
        try:
            text = path.read_bytes()
        except OSError as error:
            raise UserError(f"--text cannot read {path}: {error.strerror}") from None
        if not text:
            raise UserError(f"--text must not be empty, got {path}")
    cut = len(text) - int(len(text) * VALIDATION_SHARE)
    if min(cut, len(text) - cut) < context + 1:
        needed = math.ceil((context + 1) / VALIDATION_SHARE)
        raise UserError(
            f"the text must have at least {needed} bytes for --context {context}, "
            f"got {len(text)} in {name}"
        )
    # bytearray, because torch warns about memory that it must not write to.
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Corpus(name, data[:cut], data[cut:], hashlib.sha256(text).hexdigest())


def python_help_pages() -> bytes:
    """The text behind `help()` of the running Python: language reference, about 0.4 MB.

    Pages quote each other (`compound` holds all of `while`, `with`, ...). A paragraph is kept only
    where it is met first, or a good part of the validation text could be learned by heart.
    """
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        raise UserError("this Python has no pydoc_data.topics; name a text with --text") from None
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    first_met: dict[str, str] = {}
    for paragraph in paragraphs:
        first_met.setdefault(paragraph.strip(), paragraph)
    return "\n\n".join(first_met.values()).encode()


def random_batch(
    text: Tensor, batch: int, context: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draws sequences from the text.

    Args:
        text: (N,), uint8, N > context.
        batch: number of sequences.
        context: bytes per sequence.
        generator: its state is the data order: equal states give equal batches from here on.

    Returns:
        inputs and targets, (batch, context), int64; targets[:, i] is the byte after inputs[:, i].
    """
    starts = torch.randint(text.numel() - context, (batch, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def ordered_batches(text: Tensor, batch: int, context: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Goes through the text once, so that each byte but the first is a target exactly once.

    Yields:
        inputs and targets as in `random_batch`; the last two may be smaller.
    """
    inputs, targets = text[:-1].long(), text[1:].long()
    whole = inputs.numel() // context * context
    yield from zip(
        inputs[:whole].view(-1, context).split(batch),
        targets[:whole].view(-1, context).split(batch),
        strict=True,
    )
    if whole < inputs.numel():
        yield inputs[whole:].unsqueeze(0), targets[whole:].unsqueeze(0)


def unigram_bits_per_byte(train: Tensor, text: Tensor, smoothing: float = SMOOTHING) -> float:
    """Cross-entropy on `text` of byte frequencies counted in `train`.

    Like the model and the bigram, it is scored on every byte of `text` but the first.
    """
    counts = torch.bincount(train.long(), minlength=VOCABULARY).double() + smoothing
    bits = -(counts / counts.sum()).log2()
    return bits[text[1:].long()].mean().item()


def bigram_bits_per_byte(train: Tensor, text: Tensor, smoothing: float = SMOOTHING) -> float:
    """Cross-entropy on `text` of P(byte | byte before), counted in `train`."""
    pairs = train[:-1].long() * VOCABULARY + train[1:].long()
    counts = torch.bincount(pairs, minlength=VOCABULARY**2).double().view(VOCABULARY, VOCABULARY)
    counts += smoothing
    bits = -(counts / counts.sum(dim=1, keepdim=True)).log2()
    return bits[text[:-1].long(), text[1:].long()].mean().item()
