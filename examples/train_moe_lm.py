"""Trains a small mixture-of-experts language model on real English text, on the CPU.

A decoder-only transformer over bytes, with torch_moe_ops.nn.MoE in every block. The text is the one
behind Python's help(), which is on every machine, or a file of yours. At the end: bits per byte on
text that was held back, next to those of a unigram and a bigram model; a picture; a sample.

    python examples/train_moe_lm.py                      # the default, a few minutes on two cores
    python examples/train_moe_lm.py --text book.txt --experts 16 --top-k 4 --steps 2000
    python examples/train_moe_lm.py --resume runs/moe_lm/checkpoint.pt
    torchrun --nproc-per-node 2 examples/train_moe_lm.py     # experts and batch over two ranks

Ctrl-C ends a run after the step it is in and keeps a checkpoint. A run that is resumed on the CPU
with as many threads and ranks ends with the same bits as one that was never stopped; with another
number of ranks it goes on as well, with other roundings.
Exit codes: 0 done, 2 bad input (one line says what), 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from moe_lm import checkpoint, report
from moe_lm.data import bigram_bits_per_byte, load_corpus, unigram_bits_per_byte
from moe_lm.options import Config, RunOptions, UserError, merge, parse_options
from moe_lm.ranks import Ranks, started
from moe_lm.training import Trainer
from torch_moe_ops.nn import MoE

DEFAULT_OUT = Path("runs/moe_lm")


class StopRequest:
    """Turns the first Ctrl-C into a wish that the loop grants at the end of a step.

    A KeyboardInterrupt in the middle of a step would leave some weights updated and others not.
    The second Ctrl-C interrupts at once, for those who do not want to wait.
    """

    def __init__(self) -> None:
        self.wanted = False

    def __enter__(self) -> StopRequest:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main(argv: list[str]) -> int:
    """Runs the program; see the top of the file for the exit codes."""
    try:
        given, run = parse_options(argv, __doc__)
        with started(run.device) as ranks:
            return train(given, run, ranks)
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":  # All ranks have met it.
            print(f"train_moe_lm.py: error: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and (
            "allocate memory" not in str(error)  # What torch says on the CPU.
        ):
            raise
        print(
            "train_moe_lm.py: error: the run does not fit into memory; "
            "try smaller sizes or a smaller --batch",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("train_moe_lm.py: interrupted", file=sys.stderr)
        return 130


def train(given: dict[str, Any], run: RunOptions, ranks: Ranks) -> int:
    """One run from the options to the report."""
    out, origin, trainer = prepare(given, run, ranks)
    config = trainer.config
    if ranks.is_first:
        print(overview(trainer, origin["threads"], out), flush=True)

    checkpoint_path = out / "checkpoint.pt"

    def save() -> None:
        state = origin | trainer.state()
        ranks.together(lambda: checkpoint.save(checkpoint_path, state), first_only=True)

    started = time.perf_counter()
    with StopRequest() as request:
        trainer.run(stop=lambda: request.wanted, save=save, save_every=run.save_every)
    if trainer.step < config.steps:
        if ranks.is_first:
            print(
                f"\nStopped after step {trainer.step} of {config.steps}. To go on:\n"
                f"  {resume_command(checkpoint_path, ranks)}"
            )
        return 130
    if ranks.is_first:
        print(f"Trained for {time.perf_counter() - started:.0f} s.\n")
    finish(trainer, run, out)
    return 0


def prepare(
    given: dict[str, Any], run: RunOptions, ranks: Ranks
) -> tuple[Path, dict[str, Any], Trainer]:
    """The output folder, what a checkpoint tells of the run's origin, and the trainer.

    Raises:
        UserError: on all ranks, if a rank finds something that the user can put right.
    """
    made: list[tuple[Path, dict[str, Any], Trainer]] = []
    ranks.together(lambda: made.append(prepare_here(given, run, ranks)))
    return made[0]


def prepare_here(
    given: dict[str, Any], run: RunOptions, ranks: Ranks
) -> tuple[Path, dict[str, Any], Trainer]:
    """The same for this rank alone: in here no rank waits for another."""
    saved = checkpoint.load(run.resume) if run.resume else None
    config = merge(saved["config"], given) if saved else Config(**given)
    config.check()
    ranks.check(config)
    if saved and config.steps < saved["step"]:
        raise UserError(
            f"--steps must be at least {saved['step']} as in the checkpoint, got {config.steps}"
        )
    if not run.prompt:
        raise UserError("--prompt must not be empty")
    text_path = run.text or (Path(saved["text"]) if saved and saved["text"] else None)
    corpus = load_corpus(text_path, config.context)
    if saved and saved["digest"] != corpus.digest:
        raise UserError(f"--resume must get the text of its checkpoint, got another: {corpus.name}")
    threads = run.threads or (saved["threads"] if saved else torch.get_num_threads())
    torch.set_num_threads(threads)
    device = usable_device(run.device)
    out = run.out or (run.resume.parent if run.resume else DEFAULT_OUT)
    if ranks.is_first:
        checkpoint.prepare_folder(out)

    trainer = Trainer(config, corpus, device, ranks)
    if saved:
        try:
            trainer.restore(saved)
        except (KeyError, RuntimeError, TypeError, ValueError):
            raise UserError(f"--resume must name a whole checkpoint, got {run.resume}") from None
    origin = {
        "config": dataclasses.asdict(config),
        "text": str(text_path.resolve()) if text_path else None,
        "digest": corpus.digest,
        "threads": threads,
    }
    return out, origin, trainer


def resume_command(path: Path, ranks: Ranks) -> str:
    """What to type to go on, on as many ranks."""
    program = [sys.executable, sys.argv[0]]
    if ranks.size > 1:
        program = ["torchrun", "--nproc-per-node", str(ranks.size), sys.argv[0]]
    return shlex.join([*program, "--resume", str(path)])


def usable_device(name: str) -> torch.device:
    """A device that the layer runs on, tried out with one token."""
    try:
        device = torch.device(name)
        layer = MoE(4, 4, 1, 1).to(device)
        layer(torch.ones(1, 4, device=device)).output.sum().item()
    except Exception as error:  # Each backend has its own way of saying that it is not there.
        reason = str(error).strip().splitlines()
        raise UserError(
            f"--device {name} cannot be used: {reason[0] if reason else type(error).__name__}"
        ) from None
    return device


def overview(trainer: Trainer, threads: int, out: Path) -> str:
    """What will be trained, in a few lines."""
    config, corpus, ranks = trainer.config, trainer.corpus, trainer.ranks
    total, active = trainer.model.parameter_counts()
    return "\n".join(
        [
            f"text   {corpus.name}: {corpus.train.numel():,} bytes to train on, "
            f"{corpus.validation.numel():,} to validate on",
            f"model  {config.layers} blocks, width {config.hidden}, {config.experts} experts, "
            f"{config.top_k} per byte: {total / 1e6:.2f} M parameters, "
            f"{active / 1e6:.2f} M at work on a byte",
            f"run    steps {trainer.step} to {config.steps}, "
            f"each {config.batch} x {config.context} bytes, "
            f"{config.dtype}, {trainer.device}, threads: {threads}, "
            + (f"ranks: {ranks.size}, " if ranks.size > 1 else "")
            + f"output in {out}/",
            "bar    loss and val in bits per byte; load max/mean is 1 if all experts get the same",
        ]
    )


def finish(trainer: Trainer, run: RunOptions, out: Path) -> None:
    """Prints the comparison and a sample; writes summary.json, sample.txt and training.png."""
    trainer.model.eval()
    with trainer.autocast():  # On all ranks: each has experts that the others need.
        sample = trainer.model.generate(
            run.prompt.encode(errors="surrogateescape"),
            run.sample_bytes,
            torch.Generator().manual_seed(trainer.config.seed),
        )
    trainer.ranks.together(lambda: write_report(trainer, sample, out), first_only=True)


def write_report(trainer: Trainer, sample: bytes, out: Path) -> None:
    """All of `finish` that one process does."""
    config, corpus = trainer.config, trainer.corpus
    references = {
        "unigram model": unigram_bits_per_byte(corpus.train, corpus.validation),
        "bigram model": bigram_bits_per_byte(corpus.train, corpus.validation),
    }
    bits = {**references, report.MODEL: trainer.history.validation[-1][1]}
    print(report.comparison(bits, corpus.validation.numel() - 1))
    if config.capacity_factor is not None:
        dropped = trainer.history.drop_rate.mean().item()
        print(f"Choices of an expert that had no room left: {dropped:.1%} over all steps.")

    picture = out / "training.png"
    title = (
        f"{config.layers} blocks, width {config.hidden}, {config.experts} experts, "
        f"top-{config.top_k}, {config.dtype}: {corpus.name}"
    )
    report.draw(picture, trainer.history, trainer.step, references, title)

    # Arbitrary bytes may hold control sequences, which a terminal would obey.
    text = "".join(
        c if c.isprintable() or c in "\n\t" else "\ufffd" for c in sample.decode(errors="replace")
    )
    try:
        (out / "sample.txt").write_text(text + "\n", encoding="utf-8")
        (out / "summary.json").write_text(
            json.dumps({"bits_per_byte": bits, "config": dataclasses.asdict(config)}, indent=2)
            + "\n"
        )
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}") from None
    print(f"\nA sample of {len(sample)} bytes:\n\n{text}\n")
    print(f"Picture: {picture}")


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # The sample may not fit a terminal's encoding.
    sys.exit(main(sys.argv[1:]))
