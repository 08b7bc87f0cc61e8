"""benchmarks/: every row runs, wrong results are not timed, what is printed comes from files."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_moe_ops

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import allocator  # noqa: E402
import compare  # noqa: E402
import environment  # noqa: E402
import harness  # noqa: E402
import limits  # noqa: E402
import peak_memory  # noqa: E402
import plot  # noqa: E402
import results  # noqa: E402
import run  # noqa: E402
import suite  # noqa: E402
import table  # noqa: E402
import targets  # noqa: E402

TINY = ["--tiny", "--plain-allocator"]
KEPT = "MALLOC_MMAP_MAX_=0"


def measure(contenders: dict[str, harness.Call], **more: Any) -> harness.Record:
    limits = {"copy_": lambda: None}
    problem = harness.Problem(contenders, limits, work=4_000_000, unit="GB/s", **more)
    case = harness.Case("an_op", {"T": 2, "H": 3}, torch.float32, lambda: problem)
    return harness.measure(case, run.BUDGETS["tiny"])


def stored(*rows: results.Row, threads: int = 2, allocator: str = KEPT) -> results.Results:
    facts = {**environment.describe(), "threads": threads, "allocator": allocator}
    return {**results.empty("full"), "runs": [{"environment": facts, "rows": list(rows)}]}


def row(op: str = "token_permute", limit: float = 0.5, **times: float) -> harness.Record:
    def summary(median: float) -> harness.Record:
        return {"median": median, "lower_quartile": 1.0, "upper_quartile": 1.5}

    return {
        "bench": "routing",
        "op": op,
        "shape": {"T": 2, "H": 3},
        "dtype": "float32",
        "work": 4_000_000,
        "unit": "GB/s",
        "skipped": {},
        "times": {name: summary(median) for name, median in times.items()},
        "limits": {"copy_": summary(limit), "memmove": summary(9.0)},
    }


def test_all_rows_run_and_their_table_is_made_from_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    output = tmp_path / "new" / "results.json"
    assert run.main([*TINY, "--output", str(output)]) == 0
    written = results.load(output)
    printed = capsys.readouterr()
    assert printed.out == table.markdown(written) + "\n"

    (only_run,) = written["runs"]
    expected = [case for bench in run.BENCHES.values() for case in bench.cases("tiny")]
    assert [row["op"] for row in only_run["rows"]] == [case.op for case in expected]
    assert {row["op"] for row in only_run["rows"]} >= set(torch_moe_ops.ops.__all__)
    for measured in only_run["rows"]:
        assert measured["times"]["ours"]["samples"] >= harness.MIN_SAMPLES
        assert measured["times"]["naive"]["median"] > 0
        assert measured["limits"]
        if "Megatron" in measured["skipped"]:
            assert printed.err.count("left out: Megatron: ModuleNotFoundError") == 1
    assert only_run["environment"]["threads"] == torch.get_num_threads()
    assert str(BENCHMARKS.parent) not in output.read_text()


@pytest.mark.parametrize(
    ("naive", "message"),
    [
        (lambda: torch.tensor([1.0, 2.1]), "naive: output 0 differs from ours by 0.0476"),
        (lambda: torch.tensor([1.0, float("nan")]), "differs from ours by nan"),
        (lambda: torch.tensor([1, 2]), "differs from ours by inf"),
        (lambda: torch.tensor([[1.0, 2.0]]), "differs from ours by inf"),
        (lambda: (torch.tensor([1.0, 2.0]),) * 2, "naive has 2 outputs, ours has 1"),
    ],
)
def test_a_wrong_result_is_not_timed(naive: harness.Call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure({"ours": lambda: torch.tensor([1.0, 2.0]), "naive": naive})


def test_peers_are_timed_or_left_out_with_a_reason() -> None:
    def missing() -> harness.Call:
        raise ModuleNotFoundError("No module named 'a_peer'\nand more")

    def failing() -> None:
        raise RuntimeError("refuses")

    peers: dict[str, Callable[[], harness.Call]] = {
        "first output": lambda: lambda: (torch.ones(2),),
        "wrong": lambda: lambda: torch.tensor([1.0, 1.5]),
        "nothing": lambda: lambda: (),
        "missing": missing,
        "failing": lambda: failing,
    }
    both = dict.fromkeys(("ours", "naive"), lambda: (torch.ones(2), torch.ones(3)))
    measured = measure(both, peers=peers)
    assert measured["times"].keys() == {"ours", "naive", "first output"}
    assert measured["skipped"] == {
        "wrong": "output 0 differs from ours by 0.333 of the largest value, accepted is 0.0001",
        "nothing": "it has no outputs",
        "missing": "ModuleNotFoundError: No module named 'a_peer'",
        "failing": "RuntimeError: refuses",
    }


def test_the_naive_form_is_compiled_where_the_budget_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.torch, "compile", lambda call, dynamic: call)
    problem = harness.Problem(
        dict.fromkeys(("ours", "naive"), lambda: torch.ones(1)), {}, compilable=True
    )
    budget = harness.Budget(1, 0.01, 0.01, compiled=(torch.bfloat16,))
    for dtype, compiled in ((torch.bfloat16, True), (torch.float32, False)):
        case = harness.Case("an_op", {}, dtype, lambda: problem)
        assert ("compile" in harness.measure(case, budget)["times"]) == compiled


def test_the_limits_copy_everything() -> None:
    library = limits._compiled_copies()
    if library is None:
        pytest.skip("no compiler")
    for copy in (library.stream_copy, library.memmove_copy):
        for size in (0, 1, 63, 64, 1000, 4096):
            source = torch.arange(size, dtype=torch.int32).to(torch.uint8)
            target = torch.zeros(size + 1, dtype=torch.uint8)
            copy(target.data_ptr(), source.data_ptr(), size, 3)
            assert torch.equal(target[:size], source)
            assert target[size] == 0


def test_the_numbers_of_a_row() -> None:
    with_peer = row(ours=2.0, naive=5.0, peer=1.9)
    without = {**row(ours=2.0, naive=1234.5678), "unit": None, "work": None}
    text = table.markdown(stored(with_peer, without, allocator="system default"))
    assert text.splitlines()[-4:] == [
        "| op | shape | dtype | ours ms | naive ms | peer ms | over naive | over best | rate "
        "| limits ms | share of limit |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| token_permute | T2 H3 | float32 | 2.00 ± 0.2 | 5.00 ± 0.2 | 1.90 ± 0.2 | 2.50 "
        "| **0.95 (peer)** | 2.00 GB/s | copy_ 0.500, memmove 9.00 | 25% of copy_ |",
        "| token_permute | T2 H3 | float32 | 2.00 ± 0.2 | 1235 ± 0.2 | - | 617.28 "
        "| 617.28 (naive) | - | copy_ 0.500, memmove 9.00 | 25% of copy_ |",
    ]


def test_targets_met_and_missed() -> None:
    rows = [
        row("token_permute_grad, a variant", limit=1.7, ours=2.0, naive=5.0, peer=2.0),
        row("token_permute_grad", limit=1.6, ours=2.0, naive=4.0, peer=1.0),
        row("scaling: token_permute_grad", ours=2.0, naive=1.0),
    ]
    assert targets.summary(stored(*rows)).splitlines() == [
        "Targets, 2 threads, memory kept: 3 of 6 met.",
        "* missed: token_permute_grad T2 H3 float32: share of limit 0.80 of 0.85",
        "* missed: token_permute_grad T2 H3 float32: over naive 2.00 of 2.50",
        "* missed: token_permute_grad T2 H3 float32: over best 0.50 of 1.00",
    ]
    # A copy between buffers that are there is no limit for one whose output is new memory.
    assert "2 of 4 met" in targets.summary(stored(*rows, allocator="system default"))
    assert {op for op in targets.TARGETS if ":" in op or "," in op} == set()


def test_comparing_two_files(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def write(name: str, content: results.Results) -> str:
        results.store(content, tmp_path / name)
        return str(tmp_path / name)

    ops = ("same", "slower", "faster")
    before = stored(*(row(op, limit=1.0, ours=2.0, naive=3.0) for op in ops))
    # The machine is twice as slow now: 4 ms are no change.
    now = {"same": 4.2, "slower": 5.0, "faster": 3.0}
    after = stored(*(row(op, limit=2.0, ours=now[op], naive=3.0) for op in ops))
    after["runs"] += stored(row(ours=1.0, naive=1.0), threads=1)["runs"]
    after["runs"][0]["environment"]["cpu"] = "another"
    old, new = write("old.json", before), write("new.json", after)

    assert compare.main([old, new]) == 1
    cpu = before["runs"][0]["environment"]["cpu"]
    assert capsys.readouterr().out.splitlines() == [
        "careful: measured in one file only: 1 thread, memory kept",
        f"careful: cpu differs (2 threads, memory kept): {cpu}, then another",
        "careful: 1 rows are in one file only",
        "slower: 1.25x, slower T2 H3 float32 (2 threads, memory kept)",
        "faster: 1.33x, faster T2 H3 float32 (2 threads, memory kept)",
        "3 rows compared, 1 slower, 1 faster",
    ]
    assert compare.main([old, new, "--threshold", "0.5"]) == 0
    assert compare.main([old, old]) == 0
    assert "careful" not in capsys.readouterr().out.splitlines()[-1]
    with pytest.raises(SystemExit):
        compare.main([old, write("no.json", {"rows": []})])


def test_summary_has_the_range_of_each_operator() -> None:
    fast, slow = row(ours=2.0, naive=5.0, peer=3.0), row(ours=2.0, naive=1.0)
    assert table.summary(stored(fast, slow)).splitlines()[-3:] == [
        "| operator | rows | over naive | over best | share of limit |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| token_permute | 2 | 0.50 - 2.50 | 0.50 - 1.50 | 0.25 |",
    ]


def test_pictures_are_drawn_from_the_file_alone(tmp_path: Path) -> None:
    scaling = row("scaling: token_permute", ours=2.0, naive=5.0)
    scaling |= {"bench": "scaling", "shape": {"T": 512, "H": 2048, "K": 4, "E": 64}}
    results.store(stored(row(ours=2.0, naive=1.0), scaling), tmp_path / "results.json")
    for folder in ("a", "b"):
        plot.main([str(tmp_path / "results.json"), "--folder", str(tmp_path / folder)])
    for name in ("speed.svg", "scaling.svg"):
        picture = (tmp_path / "a" / name).read_bytes()
        assert picture.startswith(b"<?xml")
        assert picture == (tmp_path / "b" / name).read_bytes()


def test_peak_memory_is_what_a_call_needs_beyond_its_outputs() -> None:
    def call() -> torch.Tensor:
        # Both larger than what an allocator may have kept.
        return torch.ones(24 << 20).add_(1)[: 12 << 20].clone()

    assert peak_memory._extra_peak(call) == pytest.approx(96 << 20, abs=2 << 20)
    assert peak_memory._extra_peak(lambda: torch.ones(24 << 20)) < 2 << 20

    memory = {"op": "an_op", "shape": {"T": 2}, "dtype": "float32", "outputs": 3 << 20}
    memory |= {"extra": {"ours": 2 << 20, "naive": 9 << 20}, "promised": 1 << 20}
    both = {**stored(), "memory": {"rows": [memory, {**memory, "promised": 2 << 20}]}}
    assert table.markdown(both).splitlines()[-2:] == [
        "| an_op | T2 | float32 | 3.0 | **2.0** | 9.0 | 1.0 |",
        "| an_op | T2 | float32 | 3.0 | 2.0 | 9.0 | 2.0 |",
    ]
    assert targets.summary(both).splitlines()[-2:] == [
        "Temporaries as promised: 1 of 2 met.",
        "* missed: an_op T2 float32",
    ]


@pytest.mark.parametrize("size", ["full", "quick", "tiny"])
def test_the_suite_runs_each_setting_and_reports_what_failed(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    commands: list[list[str]] = []

    def failing(command: list[str], check: bool) -> subprocess.CompletedProcess:
        commands.append(command)
        return subprocess.CompletedProcess(command, returncode="--plain-allocator" in command)

    monkeypatch.setattr(suite.subprocess, "run", failing)
    options = [] if size == "full" else [f"--{size}"]
    assert suite.main([*options, "--output", str(tmp_path / "results.json")]) == 1
    assert "not complete: run.py --append --plain-allocator" in capsys.readouterr().err
    assert len({tuple(command) for command in commands}) == len(commands) >= 3
    for _, program, *arguments in commands:
        assert Path(program).parent == BENCHMARKS
        if Path(program).name == "run.py":
            parsed = run._parser().parse_args(arguments)
            assert (parsed.size, parsed.append) == (size, True)


def test_the_allocator_is_set_by_one_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    restarts = []
    monkeypatch.setattr(allocator.os, "execve", lambda *call: restarts.append(call))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    for name in allocator.KEEP_MEMORY:
        monkeypatch.delenv(name, raising=False)
    assert allocator.describe() == "system default"

    allocator.restart_with(allocator.KEEP_MEMORY)
    ((program, arguments, variables),) = restarts
    assert (program, arguments[1:]) == (sys.executable, sys.orig_argv[1:])

    for name in allocator.KEEP_MEMORY:
        monkeypatch.setenv(name, variables[name])
    allocator.restart_with(allocator.KEEP_MEMORY)
    assert len(restarts) == 1
    allocator.restart_with(allocator.RETURN_MEMORY)
    *_, variables = restarts[1]
    assert {name for name in variables if "MALLOC" in name} == allocator.RETURN_MEMORY.keys()
    assert allocator.describe().startswith("MALLOC_MMAP_MAX_=0 ")
    assert results.keeps_memory({"environment": environment.describe()})


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


def test_a_run_is_added_to_a_file_of_this_format_only(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    output = tmp_path / "results.json"
    adding = [*TINY, "--append", "--only", "overhead", "--output", str(output)]
    assert [run.main(adding), run.main(adding)] == [0, 0]
    assert len(results.load(output)["runs"]) == 2
    output.write_text(json.dumps({"rows": []}))
    with pytest.raises(SystemExit):
        run.main(adding)
    assert "must be a file of format 2" in capsys.readouterr().err
