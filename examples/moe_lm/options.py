"""The settings of a run, each with its meaning, its default and its allowed values."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn


class UserError(Exception):
    """Something the user can put right: reported as one line, exit code 2."""


def _integer(low: int, high: float = math.inf) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            bound = f">= {low}" if high == math.inf else f"in [{low}, {high}]"
            raise argparse.ArgumentTypeError(f"must be an integer {bound}, got {text!r}")
        return value

    return parse


def _number(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """A finite number in [low, high]; without `low` itself if `above`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and low <= value <= high) or (above and value == low):
            bound = f"in [{low:g}, {high:g}]"
            if high == math.inf:
                bound = f"> {low:g}" if above else f">= {low:g}"
            raise argparse.ArgumentTypeError(f"must be a number {bound}, got {text!r}")
        return value

    return parse


def _choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(names)}, got {text!r}")
        return text

    return parse


def _option(default: Any, parse: Callable[[str], Any], meaning: str) -> Any:
    return field(default=default, metadata={"parse": parse, "meaning": meaning})


@dataclass(frozen=True)
class Config:
    """All that the numbers of a run depend on, besides the text; stored in every checkpoint.

    The defaults are what `make train` runs: a few minutes on two CPU cores.
    """

    hidden: int = _option(128, _integer(1), "width of the model")
    layers: int = _option(4, _integer(1), "number of transformer blocks")
    heads: int = _option(4, _integer(1), "attention heads per block; must divide --hidden")
    context: int = _option(128, _integer(2), "bytes that the model sees at once")
    experts: int = _option(8, _integer(1), "experts per block")
    top_k: int = _option(2, _integer(1), "experts that each byte is sent to")
    intermediate: int = _option(128, _integer(1), "inner width of an expert")
    capacity_factor: float | None = _option(
        None,
        _number(0, above=True),
        "room per expert as a multiple of an even share; bytes over it skip the expert "
        "(default: no limit, nothing is dropped)",
    )
    dropout: float = _option(0.0, _number(0, 0.99), "dropout on the output of each sublayer")
    aux_loss: float = _option(0.01, _number(0), "weight of the load-balancing loss")
    z_loss: float = _option(0.001, _number(0), "weight of the router z-loss")
    dtype: str = _option("fp32", _choice("fp32", "bf16"), "fp32, or bf16 for autocast to bfloat16")
    steps: int = _option(500, _integer(1), "optimizer steps")
    batch: int = _option(32, _integer(1), "sequences per step")
    lr: float = _option(3e-3, _number(0, above=True), "peak learning rate")
    warmup: int = _option(40, _integer(0), "steps over which the learning rate rises to --lr")
    weight_decay: float = _option(0.1, _number(0), "AdamW weight decay of the matrices")
    clip: float = _option(1.0, _number(0, above=True), "largest norm of the gradient")
    seed: int = _option(0, _integer(0, 2**63 - 1), "seed of weights, batches and sample")
    eval_every: int = _option(50, _integer(1), "steps between two validations")

    def check(self) -> None:
        """Raises UserError if two options do not go together."""
        if self.top_k > self.experts:
            raise UserError(f"--top-k must be at most --experts ({self.experts}), got {self.top_k}")
        if self.hidden % self.heads:
            raise UserError(
                f"--hidden must be a multiple of --heads ({self.heads}), got {self.hidden}"
            )
        if self.hidden // self.heads % 2:
            raise UserError(
                f"--hidden / --heads must be even for rotary positions, "
                f"got {self.hidden} / {self.heads} = {self.hidden // self.heads}"
            )


MAY_CHANGE = {"steps", "eval_every"}
"""Settings that a resumed run may give anew (other steps: another learning rate from there on)."""


@dataclass(frozen=True)
class RunOptions:
    """What may change from one part of a run to the next without changing the numbers."""

    text: Path | None
    out: Path | None
    resume: Path | None
    device: str
    threads: int | None
    save_every: int
    prompt: str
    sample_bytes: int


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def merge(saved: dict[str, Any], given: dict[str, Any]) -> Config:
    """The settings of a checkpoint, with those that were given anew on the command line.

    Raises:
        UserError: a setting was given that does not fit the checkpoint.
    """
    try:
        config = Config(**saved)
    except TypeError:
        raise UserError("--resume must name a checkpoint of this version of the program") from None
    for name, value in given.items():
        if name not in MAY_CHANGE and value != getattr(config, name):
            raise UserError(
                f"{_flag(name)} must be {getattr(config, name)} as in the checkpoint, got {value}"
            )
    return dataclasses.replace(config, **given)


def parse_options(argv: list[str], description: str) -> tuple[dict[str, Any], RunOptions]:
    """Reads the command line.

    Returns:
        The Config settings that were given (only those: a resumed run takes the others from its
        checkpoint), and the run options.
    """
    parser = _Parser(
        prog="train_moe_lm.py",
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--text", type=Path, metavar="FILE", help="text to learn (default: Python's own help pages)"
    )
    run.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="output folder, what an earlier run left there is replaced (default: runs/moe_lm)",
    )
    run.add_argument("--resume", type=Path, metavar="FILE", help="checkpoint to continue from")
    run.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    run.add_argument(
        "--threads",
        type=_integer(1, 1024),
        metavar="N",
        help="CPU threads (default: what torch picks, or what the resumed run used)",
    )
    run.add_argument(
        "--save-every",
        type=_integer(1),
        default=100,
        metavar="N",
        help="steps between two checkpoints (default: 100)",
    )
    run.add_argument(
        "--prompt", default="The ", metavar="TEXT", help="start of the sample (default: 'The ')"
    )
    run.add_argument(
        "--sample-bytes",
        type=_integer(0),
        default=400,
        metavar="N",
        help="length of the sample (default: 400)",
    )

    settings = parser.add_argument_group("model and training")
    for setting in dataclasses.fields(Config):
        parse, meaning = setting.metadata["parse"], setting.metadata["meaning"]
        default = "" if setting.default is None else f" (default: {setting.default})"
        settings.add_argument(
            _flag(setting.name),
            type=parse,
            default=argparse.SUPPRESS,
            metavar="X",
            help=meaning + default,
        )

    values = vars(parser.parse_args(argv))
    run_values = {f.name: values.pop(f.name) for f in dataclasses.fields(RunOptions)}
    return values, RunOptions(**run_values)
