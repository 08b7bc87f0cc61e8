"""One operator, one stem, all pieces; files stay short enough to read in one sitting."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STEMS = sorted(path.stem for path in (ROOT / "csrc" / "ops").glob("*.cpp"))
PIECES = [
    "csrc/ops/{}.h",
    "csrc/ops/{}.cpp",
    "csrc/ops/cpu/{}.cpp",
    "csrc/ops/npu/{}.cpp",
    "src/torch_moe_ops/ops/{}.py",
    "src/torch_moe_ops/reference/{}.py",
    "tests/ops/test_{}.py",
    "benchmarks/bench_{}.py",
]
MAX_LINES = 500


def test_stems_were_found() -> None:
    assert "token_permute" in STEMS


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("stem", STEMS)
def test_operator_has_all_pieces(stem: str, piece: str) -> None:
    assert (ROOT / piece.format(stem)).is_file()


def test_no_file_is_too_long() -> None:
    folders = ["csrc", "src", "tests", "benchmarks", "examples", "tools"]
    files = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".cpp", ".h", ".sh"}
    ]
    assert files
    too_long = {
        str(path.relative_to(ROOT)): lines
        for path in files
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not too_long
