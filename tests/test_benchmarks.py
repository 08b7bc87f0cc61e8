"""benchmarks/: every row runs, wrong results are not timed, tables come from stored files."""

import json
import sys
from pathlib import Path

import pytest
import torch

import torch_moe_ops

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import allocator  # noqa: E402
import environment  # noqa: E402
import harness  # noqa: E402
import run  # noqa: E402
import table  # noqa: E402

TINY = ["--tiny", "--plain-allocator"]


def tiny_case(contenders: dict[str, harness.Call]) -> harness.Case:
    problem = harness.Problem(contenders, {"copy_": lambda: None}, work=4_000_000, unit="GB/s")
    return harness.Case("an_op", {"T": 2, "H": 3}, torch.float32, lambda: problem)


def measure(contenders: dict[str, harness.Call]) -> harness.Record:
    return harness.measure(tiny_case(contenders), run.BUDGETS["tiny"])


def test_all_rows_run_and_their_table_is_made_from_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    output = tmp_path / "new" / "results.json"
    assert run.main([*TINY, "--output", str(output)]) == 0
    text = output.read_text()
    results = json.loads(text)
    assert capsys.readouterr().out == table.markdown(results) + "\n"

    expected = [case for bench in run.BENCHES.values() for case in bench.cases("tiny")]
    assert [row["op"] for row in results["rows"]] == [case.op for case in expected]
    measured = {row["op"] for row in results["rows"]}
    assert measured >= set(torch_moe_ops.ops.__all__)
    for row in results["rows"]:
        assert row["times"]["ours"]["samples"] >= harness.MIN_SAMPLES
        assert row["times"]["naive"]["median"] > 0
        assert row["limits"]
    assert results["environment"]["threads"] == torch.get_num_threads()
    assert str(BENCHMARKS.parent) not in text


@pytest.mark.parametrize(
    ("naive", "message"),
    [
        (lambda: torch.tensor([1.0, 2.1]), "output 0 of ours differs from naive by 0.0476"),
        (lambda: torch.tensor([1.0, float("nan")]), "differs from naive by nan"),
        (lambda: torch.tensor([1, 2]), "differs from naive by inf"),
        (lambda: torch.tensor([[1.0, 2.0]]), "differs from naive by inf"),
        (lambda: (torch.tensor([1.0, 2.0]),) * 2, "naive has 2 outputs, ours has 1"),
    ],
)
def test_a_wrong_result_is_not_timed(naive: harness.Call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure({"ours": lambda: torch.tensor([1.0, 2.0]), "naive": naive})


def test_the_numbers_of_a_row() -> None:
    row = measure(dict.fromkeys(("ours", "naive", "peer"), lambda: torch.ones(1)))
    for name, median in {"ours": 2.0, "naive": 5.0, "peer": 1234.5678}.items():
        row["times"][name] |= {"median": median, "lower_quartile": 1.0, "upper_quartile": 1.5}
    row["limits"]["copy_"]["median"] = 0.5
    other = {**row, "times": {name: row["times"][name] for name in ("ours", "naive")}}
    other |= {"unit": None, "work": None}

    text = table.markdown({"environment": environment.describe(), "rows": [row, other]})
    assert text.splitlines()[-4:] == [
        "| op | shape | dtype | ours ms | naive ms | peer ms | times faster than naive | rate "
        "| share of limit |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| an_op | T2 H3 | float32 | 2.00 ± 0.2 | 5.00 ± 0.2 | 1235 ± 0.2 | 2.50 | 2.00 GB/s "
        "| 25% of copy_ |",
        "| an_op | T2 H3 | float32 | 2.00 ± 0.2 | 5.00 ± 0.2 | - | 2.50 | - | 25% of copy_ |",
    ]


def test_rows_slower_than_naive_are_named() -> None:
    row = measure(dict.fromkeys(("ours", "naive"), lambda: torch.ones(1)))
    row["times"]["ours"]["median"], row["times"]["naive"]["median"] = 4.0, 3.0
    assert table.slower_than_naive([row]) == ["an_op T2 H3 float32: 0.75x"]
    row["times"]["naive"]["median"] = 5.0
    assert table.slower_than_naive([row]) == []


def test_the_allocator_is_set_by_one_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    restarts = []
    monkeypatch.setattr(allocator.os, "execve", lambda *call: restarts.append(call))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    for name in allocator.KEEP_MEMORY:
        monkeypatch.delenv(name, raising=False)
    assert allocator.describe() == "system default"

    allocator.restart_keeping_memory()
    ((program, arguments, variables),) = restarts
    assert (program, arguments[1:]) == (sys.executable, sys.orig_argv[1:])

    for name in allocator.KEEP_MEMORY:
        monkeypatch.setenv(name, variables[name])
    allocator.restart_keeping_memory()
    assert len(restarts) == 1
    assert allocator.describe().startswith("MALLOC_MMAP_MAX_=0 ")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--output", "/proc/no/results.json"], "cannot write /proc/no/results.json"),
        (["--threads", "0"], "must be at least 1, got 0"),
        (["--only", "no_such_op"], "invalid choice: 'no_such_op'"),
    ],
)
def test_bad_options(option: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        run.main([*TINY, *option])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
