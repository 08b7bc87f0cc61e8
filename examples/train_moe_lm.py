"""Trains a small mixture-of-experts language model on real English text, on the CPU.

A decoder-only transformer over bytes, with torch_moe_ops.nn.MoE in every block. The text is the one
behind Python's help(), which is on every machine, or a file of yours. At the end: bits per byte on
text that was held back, next to those of a unigram and a bigram model; a picture; a sample.

    python examples/train_moe_lm.py                      # the default, a few minutes on two cores
    python examples/train_moe_lm.py --text book.txt --experts 16 --top-k 4 --steps 2000
    python examples/train_moe_lm.py --resume runs/moe_lm/checkpoint.pt

Ctrl-C ends a run after the step it is in and keeps a checkpoint. A run that is resumed on the CPU
with as many threads ends with the same bits as one that was never stopped.
Exit codes: 0 done, 2 bad input (one line says what), 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import io
import json
import shlex
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from moe_lm import checkpoint, report
from moe_lm.data import Corpus, bigram_bits_per_byte, load_corpus, unigram_bits_per_byte
from moe_lm.options import Config, RunOptions, UserError, merge, parse_options
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
        return train(given, run)
    except UserError as error:
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


def train(given: dict[str, Any], run: RunOptions) -> int:
    """One run from the options to the report."""
    saved = checkpoint.load(run.resume) if run.resume else None
    config = merge(saved["config"], given) if saved else Config(**given)
    config.check()
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
    checkpoint.prepare_folder(out)

    trainer = Trainer(config, corpus, device)
    if saved:
        try:
            trainer.restore(saved)
        except (KeyError, RuntimeError, TypeError, ValueError):
            raise UserError(f"--resume must name a whole checkpoint, got {run.resume}") from None
    print(overview(trainer, corpus, threads, out), flush=True)

    checkpoint_path = out / "checkpoint.pt"
    origin = {
        "config": dataclasses.asdict(config),
        "text": str(text_path.resolve()) if text_path else None,
        "digest": corpus.digest,
        "threads": threads,
    }
    started = time.perf_counter()
    with StopRequest() as request:
        trainer.run(
            stop=lambda: request.wanted,
            save=lambda: checkpoint.save(checkpoint_path, origin | trainer.state()),
            save_every=run.save_every,
        )
    if trainer.step < config.steps:
        command = shlex.join([sys.executable, sys.argv[0], "--resume", str(checkpoint_path)])
        print(f"\nStopped after step {trainer.step} of {config.steps}. To go on:\n  {command}")
        return 130
    print(f"Trained for {time.perf_counter() - started:.0f} s.\n")
    finish(trainer, run, out)
    return 0


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


def overview(trainer: Trainer, corpus: Corpus, threads: int, out: Path) -> str:
    """What will be trained, in a few lines."""
    config = trainer.config
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
            f"{config.dtype}, {trainer.device}, threads: {threads}, output in {out}/",
            "bar    loss and val in bits per byte; load max/mean is 1 if all experts get the same",
        ]
    )


def finish(trainer: Trainer, run: RunOptions, out: Path) -> None:
    """Prints the comparison and a sample; writes summary.json, sample.txt and training.png."""
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

    trainer.model.eval()
    with trainer.autocast():
        sample = trainer.model.generate(
            run.prompt.encode(errors="surrogateescape"),
            run.sample_bytes,
            torch.Generator().manual_seed(config.seed),
        )
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
