"""examples/train_moe_lm.py: its numbers, its files, resuming to the bit, and what it refuses."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_moe_lm  # noqa: E402
from moe_lm import checkpoint, data, report  # noqa: E402
from moe_lm.model import MoELanguageModel  # noqa: E402
from moe_lm.options import Config, UserError  # noqa: E402
from moe_lm.training import History, Trainer, learning_rate  # noqa: E402

TINY = {"hidden": 16, "layers": 2, "heads": 2, "context": 16, "experts": 4, "intermediate": 16}
TINY |= {"batch": 8, "warmup": 2}

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text with something to learn in it: the letters come in a fixed order."""
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return path


def bytes_tensor(text: bytes) -> torch.Tensor:
    return torch.tensor(list(text), dtype=torch.uint8)


def options(**settings: object) -> list[str]:
    """Command-line options for a tiny model, with `settings` on top."""
    merged = {**TINY, "steps": 12, "eval_every": 5, "sample_bytes": 20, **settings}
    return [part for k, v in merged.items() for part in (f"--{k.replace('_', '-')}", str(v))]


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """Runs the program, checks that it ends with code 2 and one line, and returns that line."""
    assert train_moe_lm.main([str(a) for a in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("train_moe_lm.py: error: ")
    return err.removeprefix("train_moe_lm.py: error: ").rstrip("\n")


class TestData:
    def test_unigram_by_hand(self) -> None:
        # Train: a 3 times, b once. Adding 1 to each of 256 counts gives P(a) = 4/260, P(b) = 2/260,
        # P(c) = 1/260. The first byte of the text is not scored.
        train, text = bytes_tensor(b"aaab"), bytes_tensor(b"xabc")
        expected = -(math.log2(4 / 260) + math.log2(2 / 260) + math.log2(1 / 260)) / 3
        assert data.unigram_bits_per_byte(train, text, smoothing=1) == pytest.approx(expected)

    def test_bigram_by_hand(self) -> None:
        # Train pairs: ab twice, ba once. P(b|a) = 3/258, P(a|b) = 2/257, P(c|a) = 1/258.
        train, text = bytes_tensor(b"abab"), bytes_tensor(b"abac")
        expected = -(math.log2(3 / 258) + math.log2(2 / 257) + math.log2(1 / 258)) / 3
        assert data.bigram_bits_per_byte(train, text, smoothing=1) == pytest.approx(expected)

    def test_statistics_of_bytes_never_seen_are_finite(self) -> None:
        train, text = bytes_tensor(b"aaaa"), bytes_tensor(b"zzzz")
        assert math.isfinite(data.unigram_bits_per_byte(train, text))
        assert data.bigram_bits_per_byte(train, text) == pytest.approx(8)  # "z": uniform

    def test_batches(self) -> None:
        text = torch.arange(50, dtype=torch.uint8)
        inputs, targets = data.random_batch(text, 40, 7, torch.Generator().manual_seed(0))
        assert inputs.shape == targets.shape == (40, 7)
        assert torch.equal(targets, inputs + 1)
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(7))
        # The last byte of the text is in reach as a target, and nothing behind it.
        draws = torch.Generator().manual_seed(0)
        assert data.random_batch(text[:9], 99, 7, draws)[1].max() == 8

    @pytest.mark.parametrize("length", [2, 8, 9, 10, 64, 65, 66])
    def test_validation_scores_each_byte_once(self, length: int) -> None:
        text = torch.arange(length, dtype=torch.uint8)
        batches = list(data.ordered_batches(text, batch=3, context=8))
        assert torch.equal(torch.cat([x.flatten() for x, _ in batches]), text[:-1].long())
        assert torch.equal(torch.cat([y.flatten() for _, y in batches]), text[1:].long())

    def test_help_pages(self) -> None:
        corpus = data.load_corpus(None, context=128)
        assert corpus.train.numel() + corpus.validation.numel() > 200_000
        assert corpus.validation.numel() == pytest.approx(corpus.train.numel() / 9, abs=10)
        train, validation = (bytes(part.tolist()) for part in (corpus.train, corpus.validation))
        assert b"expression" in train
        paragraphs = [p for p in validation.split(b"\n\n")[1:] if p.strip()]
        assert not any(b"\n\n" + p + b"\n\n" in train for p in paragraphs)
        assert data.unigram_bits_per_byte(corpus.train, corpus.validation) > (
            data.bigram_bits_per_byte(corpus.train, corpus.validation)
        )


class TestModel:
    def test_no_position_sees_what_follows(self) -> None:
        model = MoELanguageModel(Config(**TINY)).eval()
        tokens = torch.randint(256, (1, 16))
        changed = tokens.clone()
        changed[0, 9:] = (changed[0, 9:] + 1) % 256
        before, after = model(tokens).logits, model(changed).logits
        torch.testing.assert_close(after[:, :9], before[:, :9])
        assert not torch.allclose(after[:, 9:], before[:, 9:])

    def test_positions_matter(self) -> None:
        model = MoELanguageModel(Config(**TINY)).eval()
        last = [model(torch.tensor([list(t)])).logits[0, -1] for t in (b"abc", b"bac")]
        assert not torch.allclose(*last, atol=1e-5)

    def test_first_prediction_is_close_to_uniform(self) -> None:
        model = MoELanguageModel(Config())
        logits = model(torch.randint(256, (4, 32))).logits
        assert logits.log_softmax(-1).mean().item() == pytest.approx(-math.log(256), rel=0.1)

    def test_parameter_counts(self) -> None:
        one_expert = 3 * 16 * 16
        total, active = MoELanguageModel(Config(**TINY)).parameter_counts()
        assert total - active == 2 * (4 - 2) * one_expert
        assert MoELanguageModel(Config(**TINY, top_k=4)).parameter_counts() == (total, total)

    def test_reports_of_the_layers(self) -> None:
        output = MoELanguageModel(Config(**TINY, top_k=3))(torch.randint(256, (2, 5)))
        assert output.tokens_per_expert.sum(dim=1).tolist() == [2 * 5 * 3] * 2
        assert output.drop_rate == 0
        assert output.aux_loss.requires_grad
        crowded = MoELanguageModel(Config(**TINY, capacity_factor=0.5))
        assert crowded(torch.randint(256, (2, 16))).drop_rate >= 0.5

    def test_generate(self) -> None:
        model = MoELanguageModel(Config(**TINY)).eval()
        samples = [
            model.generate(b"x" * 30, 9, torch.Generator().manual_seed(s)) for s in (1, 1, 2)
        ]
        assert samples[0] == samples[1] != samples[2]
        assert [len(sample) for sample in samples] == [39] * 3
        assert samples[0].startswith(b"x" * 30)


class TestTraining:
    def test_learning_rate(self) -> None:
        config = Config(lr=1.0, warmup=4, steps=104)
        rates = [learning_rate(step, config) for step in range(104)]
        assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
        assert rates[4:] == sorted(rates[4:], reverse=True)
        assert rates[54] == pytest.approx(0.525)
        assert rates[-1] == pytest.approx(0.05, abs=1e-3)
        assert learning_rate(0, Config(lr=1.0, warmup=0, steps=1)) == 1.0

    @pytest.mark.parametrize(
        "setting", [{}, {"dtype": "bf16"}, {"capacity_factor": 1.0}, {"dropout": 0.1}], ids=str
    )
    def test_loss_falls(self, text: Path, setting: dict) -> None:
        config = Config(**TINY, steps=60, lr=0.02, **setting)
        trainer = Trainer(config, data.load_corpus(text, 16), torch.device("cpu"))
        before = trainer.validate()
        trainer.run(stop=lambda: False, save=lambda: None, save_every=1000)
        history = trainer.history
        assert trainer.step == 60
        assert [step for step, _ in history.validation] == [50, 60]
        assert history.validation[-1][1] == trainer.validate() < 3.5 < 7 < before
        assert history.train_bits[-5:].mean() < 3.5
        assert history.expert_load.sum() == 60 * 8 * 16 * 2 * 2
        assert (history.drop_rate.max() > 0) == ("capacity_factor" in setting)

    def test_loss_that_is_no_number(self, text: Path) -> None:
        trainer = Trainer(Config(**TINY), data.load_corpus(text, 16), torch.device("cpu"))
        trainer.train_step()
        torch.nn.init.constant_(trainer.model.norm.weight, math.nan)
        with pytest.raises(UserError, match="the loss is nan at step 1; try a lower --lr"):
            trainer.train_step()

    def test_long_histories_stay_small(self) -> None:
        steps = 10**6 + 1
        history = History(Config(**TINY, steps=steps))
        assert history.expert_load.shape == history.load_until(steps).shape == (120, 2, 4)
        assert history.load_until(1).shape[0] == 1
        assert History(Config(**TINY, steps=7)).expert_load.shape == (7, 2, 4)


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Sends the process a Ctrl-C in the middle of the step that is not yet done."""
    train_step = Trainer.train_step

    def interrupted(trainer: Trainer) -> None:
        if trainer.step == step - 1:
            signal.raise_signal(signal.SIGINT)
        train_step(trainer)

    monkeypatch.setattr(Trainer, "train_step", interrupted)


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes much longer than these tiny runs."""
    monkeypatch.setattr(report, "draw", lambda *arguments: None)


@pytest.mark.usefixtures("no_picture")
class TestResume:
    @pytest.mark.parametrize(
        ("step", "setting"),
        [(1, {}), (7, {}), (12, {}), (7, {"dropout": 0.2}), (7, {"dtype": "bf16"})],
        ids=str,
    )
    def test_to_the_bit(
        self,
        text: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        setting: dict,
        step: int,
    ) -> None:
        whole, parts = tmp_path / "whole", tmp_path / "par ts"
        argv = options(text=text, **setting)
        assert train_moe_lm.main([*argv, "--out", str(whole)]) == 0
        with monkeypatch.context() as patch:
            stop_after(patch, step)
            assert train_moe_lm.main([*argv, "--out", str(parts)]) == (130 if step < 12 else 0)
        told = capsys.readouterr().out
        assert (f"--resume '{parts}/checkpoint.pt'" in told) == (step < 12)
        torch.manual_seed(99)  # Whatever the process did in between.
        resumed = ["--resume", str(parts / "checkpoint.pt"), "--sample-bytes", "20"]
        assert train_moe_lm.main(resumed) == 0

        first, second = (checkpoint.load(path / "checkpoint.pt") for path in (whole, parts))
        assert_same(first, second)
        assert (whole / "sample.txt").read_bytes() == (parts / "sample.txt").read_bytes()
        assert (whole / "summary.json").read_bytes() == (parts / "summary.json").read_bytes()

    def test_more_steps(self, text: Path, tmp_path: Path) -> None:
        argv = ["--out", str(tmp_path), "--text", str(text)]
        assert train_moe_lm.main([*options(steps=4), *argv]) == 0
        resume = ["--resume", str(tmp_path / "checkpoint.pt"), "--sample-bytes", "0"]
        assert train_moe_lm.main([*resume, "--steps", "130", "--eval-every", "100"]) == 0
        state = checkpoint.load(tmp_path / "checkpoint.pt")
        assert state["step"] == 130
        assert [step for step, _ in state["history"]["validation"]] == [4, 100, 130]
        assert state["history"]["expert_load"].shape[0] == 130
        assert (state["history"]["expert_load"].sum(dim=(1, 2)) == 8 * 16 * 2 * 2).all()

    def test_refusals(self, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert (
            train_moe_lm.main([*options(steps=4), "--out", str(tmp_path), "--text", str(text)]) == 0
        )
        capsys.readouterr()
        path = tmp_path / "checkpoint.pt"
        resume = ("--resume", path)
        assert refused(capsys, *resume, "--hidden", 32) == (
            "--hidden must be 16 as in the checkpoint, got 32"
        )
        assert refused(capsys, *resume, "--capacity-factor", 2) == (
            "--capacity-factor must be None as in the checkpoint, got 2.0"
        )
        assert refused(capsys, *resume, "--steps", 3) == (
            "--steps must be at least 4 as in the checkpoint, got 3"
        )
        other = tmp_path / "other.txt"
        other.write_bytes(text.read_bytes() + b"!")
        assert refused(capsys, *resume, "--text", other) == (
            "--resume must get the text of its checkpoint, got another: other.txt"
        )

        broken = tmp_path / "broken.pt"
        assert refused(capsys, "--resume", broken) == (
            f"--resume cannot read {broken}: No such file or directory"
        )
        assert refused(capsys, "--resume", tmp_path).startswith("--resume ")
        whole = path.read_bytes()
        for content in (b"", b"no checkpoint", whole[:100], whole[:-100]):
            broken.write_bytes(content)
            assert refused(capsys, "--resume", broken) == (
                f"--resume must name a whole checkpoint file, got {broken}"
            )
        state = checkpoint.load(path)
        for change in ({"format": "another/1"}, {"config": {"width": 3}}, {"model": {}}):
            torch.save({**state, **change}, broken)
            assert refused(capsys, "--resume", broken).startswith("--resume must name a ")
        torch.save([1, 2], broken)
        assert refused(capsys, "--resume", broken).startswith("--resume must name a checkpoint")

    def test_a_failed_save_keeps_the_old_checkpoint(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "checkpoint.pt"
        path.write_bytes(b"the old one")

        def full_disk(state: object, file: object) -> None:
            file.write(b"half of")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(torch, "save", full_disk)
        with pytest.raises(UserError, match=r"cannot write the checkpoint .*: No space left"):
            checkpoint.save(path, {})
        assert path.read_bytes() == b"the old one"
        assert os.listdir(tmp_path) == ["checkpoint.pt"]


def assert_same(first: object, second: object) -> None:
    """Equal to the last bit, through dicts and lists."""
    assert type(first) is type(second)
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_same(first[key], second[key])
    elif isinstance(first, list):
        assert len(first) == len(second)
        for a, b in zip(first, second, strict=True):
            assert_same(a, b)
    elif isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    else:
        assert first == second


class TestReport:
    def test_comparison(self) -> None:
        bits = {"unigram model": 4.5, "bigram model": 3.25, report.MODEL: 2.0}
        assert report.comparison(bits, 1234).splitlines() == [
            "Validation bits per byte (1,234 bytes that no model was fitted to):",
            "  unigram model  4.500",
            "  bigram model   3.250",
            "  MoE model      2.000",
            "Best: MoE model, 1.250 bits per byte below the bigram model.",
        ]
        bits[report.MODEL] = 4.0
        assert report.comparison(bits, 1234).splitlines()[-2:] == [
            "Best: bigram model, 0.750 bits per byte below the MoE model.",
            "The MoE model has not beaten it yet; try more --steps.",
        ]

    @pytest.mark.parametrize(("steps", "layers"), [(1, 1), (3, 5), (500, 2)])
    def test_picture(self, tmp_path: Path, steps: int, layers: int) -> None:
        history = History(Config(steps=steps, layers=layers))
        history.train_bits += np.log(2)
        history.expert_load += torch.randint(1, 9, history.expert_load.shape)
        path = tmp_path / "picture.png"
        report.draw(path, history, steps, {"unigram model": 4.5}, "costs $1_0 or $2^")
        assert path.read_bytes().startswith(PNG_SIGNATURE)
        with pytest.raises(UserError, match="cannot write"):
            report.draw(tmp_path / "no" / "p.png", history, steps, {}, "")

    def test_a_whole_run(
        self, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "deep" / "er"
        argv = options(text=text, out=out, capacity_factor=1, prompt="the quick")
        assert train_moe_lm.main(argv) == 0
        printed = capsys.readouterr().out
        summary = json.loads((out / "summary.json").read_text())
        assert list(summary["bits_per_byte"]) == ["unigram model", "bigram model", "MoE model"]
        for name, bits in summary["bits_per_byte"].items():
            assert f"{name:<14} {bits:.3f}" in printed
        assert "Best: bigram model" in printed  # 12 steps are not enough.
        assert "Choices of an expert that had no room left: " in printed
        sample = (out / "sample.txt").read_text(encoding="utf-8")
        assert sample.startswith("the quick")
        assert sample in printed
        assert (out / "training.png").read_bytes().startswith(PNG_SIGNATURE)
        assert sorted(os.listdir(out)) == [
            "checkpoint.pt", "sample.txt", "summary.json", "training.png",
        ]  # fmt: skip


class TestRefusals:
    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            ("--top-k 9", "--top-k must be at most --experts (8), got 9"),
            ("--hidden 100 --heads 3", "--hidden must be a multiple of --heads (3), got 100"),
            (
                "--hidden 12 --heads 4",
                "--hidden / --heads must be even for rotary positions, got 12 / 4 = 3",
            ),
            ("--steps 0", "argument --steps: must be an integer >= 1, got '0'"),
            ("--steps many", "argument --steps: must be an integer >= 1, got 'many'"),
            ("--lr 0", "argument --lr: must be a number > 0, got '0'"),
            ("--lr nan", "argument --lr: must be a number > 0, got 'nan'"),
            ("--dropout 1.5", "argument --dropout: must be a number in [0, 0.99], got '1.5'"),
            ("--dtype fp16", "argument --dtype: must be one of fp32, bf16, got 'fp16'"),
            ("--threads 0", "argument --threads: must be an integer in [1, 1024], got '0'"),
            ("--step 3", "unrecognized arguments: --step 3"),
            ("--device", "argument --device: expected one argument"),
            ("--prompt=", "--prompt must not be empty"),
        ],
    )
    def test_options(self, argv: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert refused(capsys, *argv.split()) == message

    @pytest.mark.parametrize("device", ["meta", "nowhere", "cpu:x"])
    def test_device(self, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        message = refused(capsys, "--device", device, "--out", tmp_path)
        assert message.startswith(f"--device {device} cannot be used: ")

    def test_text(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "text"
        assert refused(capsys, "--text", path) == (
            f"--text cannot read {path}: No such file or directory"
        )
        assert (
            refused(capsys, "--text", tmp_path) == f"--text cannot read {tmp_path}: Is a directory"
        )
        path.touch()
        assert refused(capsys, "--text", path) == f"--text must not be empty, got {path}"
        path.write_bytes(b"a" * 169)
        assert refused(capsys, "--text", path, "--context", 16) == (
            "the text must have at least 170 bytes for --context 16, got 169 in text"
        )
        path.write_bytes(b"a" * 170)
        assert data.load_corpus(path, 16).validation.numel() == 17

    def test_memory(self, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        argv = options(text=text, out=tmp_path / "out", steps=10**14)
        assert refused(capsys, *argv).startswith("the run does not fit into memory; try ")


class TestProcess:
    """The program as a user starts it."""

    def start(self, *argv: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(EXAMPLES / "train_moe_lm.py"), *map(str, argv)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def test_bad_input(self, text: Path) -> None:
        out = text / "out"  # A file stands where the folder should be; that stops root, too.
        with self.start(*options(text=text, out=out)) as process:
            printed, error = process.communicate()
        assert (process.returncode, printed) == (2, "")
        assert error == f"train_moe_lm.py: error: --out cannot write to {out}: Not a directory\n"

    def test_ctrl_c(self, text: Path, tmp_path: Path) -> None:
        path = tmp_path / "out" / "checkpoint.pt"
        with self.start(*options(text=text, out=path.parent, steps=10**6, save_every=1)) as process:
            while not path.exists() and process.poll() is None:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate()
        assert process.returncode == 130, err
        assert "Traceback" not in err
        assert f"--resume {path}" in out
        assert f"Stopped after step {checkpoint.load(path)['step']} of 1000000" in out

    def test_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as exit_:
            train_moe_lm.main(["--help"])
        assert exit_.value.code == 0
        shown = capsys.readouterr().out
        assert "--capacity-factor" in shown
        assert "100 %" not in shown
