"""Checkpoints on disk: written whole or not at all, read with a clear word on what does not fit."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

from .options import UserError

FORMAT = "torch_moe_ops/moe_lm/1"
"""Stands in every checkpoint; to be counted up when its layout changes."""


KEYS = {
    "config", "text", "digest", "threads",
    "step", "model", "optimizer", "random", "data_order", "history",
}  # fmt: skip


def prepare_folder(folder: Path) -> None:
    """Makes the output folder, and finds out now, not minutes later, whether it takes files."""
    probe = folder / f".write-test-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--out cannot write to {folder}: {error.strerror}") from None


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes a checkpoint beside the old one and then puts it in its place in one step.

    A crash or a full disk at any moment leaves the old checkpoint as it was.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: the archive writer met a full disk.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or "no room or no access"
        raise UserError(f"cannot write the checkpoint {path}: {reason}") from None


def load(path: Path) -> dict[str, Any]:
    """Reads a checkpoint onto the CPU.

    Raises:
        UserError: there is no such file, or `save` of this version did not write it.
    """
    try:
        # weights_only: a checkpoint from somebody else must not be able to run code.
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"--resume cannot read {path}: {error.strerror}") from None
    except Exception:  # Damaged files raise anything from EOFError to UnpicklingError.
        raise UserError(f"--resume must name a whole checkpoint file, got {path}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT or not state.keys() >= KEYS:
        raise UserError(f"--resume must name a checkpoint of this program, got {path}")
    return state
