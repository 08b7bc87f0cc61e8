"""What is documented is there, and the examples run."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import torch_moe_ops

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(torch_moe_ops.__path__, "torch_moe_ops.")
    if info.name.split(".")[1] in {"ops", "nn", "reference"}
)
SECTIONS = ["Args:", "Returns:", "Raises:", "Gradients:", "Note:", "Example:"]


@pytest.mark.parametrize("name", torch_moe_ops.ops.__all__)
def test_operator_docstring_is_complete(name: str) -> None:
    text = getattr(torch_moe_ops, name).__doc__
    assert [section for section in SECTIONS if section not in text] == []
    assert "aclnn" in text
    assert re.search(r"[Dd]eterministic", text)


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.failed == 0


def test_operator_examples_were_found() -> None:
    finder = doctest.DocTestFinder()
    for name in torch_moe_ops.ops.__all__:
        function = getattr(torch_moe_ops, name)
        examples = [example for test in finder.find(function) for example in test.examples]
        assert examples, name


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_python_blocks_of_the_page_run(page: str) -> None:
    text = (ROOT / page).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks or page != "README.md"
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)


def test_relative_links_of_the_pages_exist() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
