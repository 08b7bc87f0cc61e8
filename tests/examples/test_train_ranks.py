"""examples/train_moe_lm.py on several ranks: the run of one process, stopped, and resumed."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Ranks as Pool

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_moe_lm  # noqa: E402
from moe_lm import checkpoint, data  # noqa: E402
from moe_lm.options import Config, UserError  # noqa: E402
from moe_lm.ranks import Ranks  # noqa: E402
from moe_lm.training import Trainer  # noqa: E402

TINY = {"hidden": 16, "layers": 2, "heads": 2, "context": 16, "experts": 4, "intermediate": 16}
TINY |= {"batch": 8, "warmup": 2, "steps": 10, "eval_every": 5, "lr": 0.02}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    # The last two validation batches are 2 sequences and 5 bytes: fewer than ranks.
    path.write_text(("the quick brown fox jumps over the lazy dog. " * 100)[:3420])
    return str(path)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    pool = Pool(request.param)
    yield pool
    pool.close()


def trainer_of(text, **setting):
    group = dist.group.WORLD if dist.is_initialized() else None
    corpus = data.load_corpus(Path(text), TINY["context"])
    return Trainer(Config(**TINY | setting), corpus, torch.device("cpu"), Ranks(group))


def train(rank, text, setting, resume=None, stop_after=None, stop_on=0):
    """The state at the end of a run, or of its part."""
    trainer = trainer_of(text, **setting)
    if resume is not None:
        trainer.restore(resume)
    trainer.run(
        stop=lambda: trainer.step == stop_after and rank == stop_on,
        save=lambda: None,
        save_every=1000,
    )
    return trainer.state()


def assert_alike(state, expected, rtol):
    """As the states of two runs that differ in roundings only."""
    for name in ("train_bits", "drop_rate"):
        torch.testing.assert_close(
            state["history"][name], expected["history"][name], rtol=rtol, atol=1e-9
        )
    for (step, bits), (other_step, other_bits) in zip(
        state["history"]["validation"], expected["history"]["validation"], strict=True
    ):
        assert (step, bits) == (other_step, pytest.approx(other_bits, rel=rtol))
    load, other_load = (s["history"]["expert_load"] for s in (state, expected))
    assert torch.equal(load.sum(dim=-1), other_load.sum(dim=-1))
    assert torch.equal(state["data_order"], expected["data_order"])


def shapes(state):
    if isinstance(state, dict):
        return {key: shapes(value) for key, value in state.items()}
    if isinstance(state, torch.Tensor):
        return (state.dtype, state.shape)
    return [shapes(item) for item in state] if isinstance(state, list | tuple) else type(state)


@pytest.mark.parametrize("setting", [{}, {"dtype": "bf16", "layers": 1}], ids=str)
def test_losses_are_those_of_one_process(ranks, text, setting):
    expected = train(0, text, setting)
    states = ranks.run(train, text, setting)
    # Sums in bfloat16 round in another order; float32 differs in its last bits.
    rtol = 1e-4 if not setting else 2e-2
    for state in states:
        assert_alike(state, expected, rtol)
        assert shapes(state) == shapes(expected)
    if not setting:
        for name, weight in expected["model"].items():
            torch.testing.assert_close(states[0]["model"][name], weight, rtol=1e-2, atol=1e-3)


def test_resume_on_another_number_of_ranks(ranks, text):
    expected = train(0, text, {})
    one = train(0, text, {}, stop_after=4)
    many = ranks.run(train, text, {}, None, 4)[0]
    assert one["step"] == many["step"] == 4
    assert_alike(train(0, text, {}, resume=many), expected, 1e-4)
    assert_alike(ranks.run(train, text, {}, one)[0], expected, 1e-4)


def test_a_stop_on_one_rank_stops_all_after_the_same_step(ranks, text):
    last = ranks.world_size - 1
    states = ranks.run(train, text, {}, None, 3, last)
    assert [state["step"] for state in states] == [3] * ranks.world_size


def test_capacity_is_of_each_rank(ranks, text):
    setting = {"capacity_factor": 1.0, "steps": 2}
    state = ranks.run(train, text, setting)[0]
    assert 0 < state["history"]["drop_rate"].min() < 1
    assert (state["history"]["expert_load"].sum(dim=-1) == 8 * 16 * 2).all()


def dropout_draws(rank, text):
    trainer = trainer_of(text, dropout=0.5)
    with trainer.ranks.own_random_numbers():
        own = torch.rand(4)
    return own, torch.get_rng_state()


def test_dropout_differs_by_rank_and_is_repeatable(ranks, text):
    draws = ranks.run(dropout_draws, text)
    assert len({tuple(own.tolist()) for own, _ in draws}) == ranks.world_size
    assert all(torch.equal(state, draws[0][1]) for _, state in draws)
    runs = [ranks.run(train, text, {"dropout": 0.2})[0] for _ in range(2)]
    part = ranks.run(train, text, {"dropout": 0.2}, None, 4)[0]
    runs.append(ranks.run(train, text, {"dropout": 0.2}, part)[0])
    for run in runs[1:]:
        assert torch.equal(run["history"]["train_bits"], runs[0]["history"]["train_bits"])
        for name, weight in runs[0]["model"].items():
            assert torch.equal(run["model"][name], weight)


def refusals(rank, folder):
    together = Ranks(dist.group.WORLD)
    size = together.size

    def fail_on_last():
        if rank == size - 1:
            raise UserError("no disk")

    with pytest.raises(UserError, match=r"^no disk$"):
        together.together(fail_on_last)
    done = []
    together.together(lambda: done.append(rank), first_only=True)
    assert done == ([0] if rank == 0 else [])
    for option in ("batch", "experts"):
        with pytest.raises(UserError) as caught:
            together.check(Config(**TINY | {option: 4 * size + 1}))
        assert str(caught.value) == (
            f"--{option} must be a multiple of the number of ranks ({size}), got {4 * size + 1}"
        )


def test_refusals_are_met_by_all(ranks, tmp_path):
    ranks.run(refusals, str(tmp_path))


def start(*argv):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*command, str(EXAMPLES / "train_moe_lm.py"), "--sample-bytes", "9", *map(str, argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_torchrun_ctrl_c_and_resume(text, tmp_path):
    folder = tmp_path / "out"
    path = folder / "checkpoint.pt"
    setting = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    with start(
        "--out", folder, "--text", text, *setting, "--steps=1000000", "--save-every=1"
    ) as run:
        while not path.exists() and run.poll() is None:
            time.sleep(0.02)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
    step = checkpoint.load(path)["step"]
    assert out.count(f"Stopped after step {step} of 1000000") == 1, err
    assert out.count("text   text.txt") == 1
    assert f"torchrun --nproc-per-node 2 {EXAMPLES}/train_moe_lm.py --resume {path}" in out

    with start("--resume", path, "--steps", step + 2) as run:
        out, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
    assert checkpoint.load(path)["step"] == step + 2
    assert out.count("Validation bits per byte") == out.count("A sample of 13 bytes") == 1
    assert sorted(file.name for file in folder.iterdir()) == [
        "checkpoint.pt", "sample.txt", "summary.json", "training.png",
    ]  # fmt: skip


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_only_the_first_rank_tells_an_error(rank, lines, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    assert train_moe_lm.main(["--steps", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == lines
