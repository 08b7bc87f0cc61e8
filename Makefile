# Everything a developer types. Each target sets up what it needs: a virtual environment in .venv, the pinned requirements, the built
# extension. PYTHON chooses the interpreter that makes the environment; VENV uses another place for it.
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
# Two compile jobs by default: torch's headers take about 1 GB each.
export MAX_JOBS ?= 2
# torch_npu installed without CANN must not break `import torch`.
export TORCH_DEVICE_BACKEND_AUTOLOAD ?= 0

SOURCES := $(shell find csrc src -name '*.cpp' -o -name '*.h' -o -name '*.py' | grep -v _build_info) setup.py pyproject.toml
CXX_SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h')

.DEFAULT_GOAL := help
.PHONY: help build train test lint format bench bench-full sanitize clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/.requirements: requirements/build.txt requirements/dev.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; install Python 3.11 or set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { echo "make: no C++ compiler found; install g++ 11 or newer (Debian: apt-get install g++) or set CXX" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	touch $@

$(VENV)/.build: $(VENV)/.requirements $(SOURCES)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --no-build-isolation --no-deps --force-reinstall .
	touch $@

build: $(VENV)/.build ## Build and install the package into .venv

train: $(VENV)/.build ## Train a small mixture-of-experts language model on the CPU (2-4 minutes)
	$(BIN)/python examples/train_moe_lm.py $(ARGS)

test: $(VENV)/.build ## Run all tests (ARGS='-k name' narrows)
	$(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(VENV)/.requirements ## Check format, style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)
	$(BIN)/mypy

format: $(VENV)/.requirements ## Rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

bench: $(VENV)/.build ## Measure every operator against the naive form, short version (3 minutes)
	$(BIN)/python benchmarks/run.py --quick $(ARGS)

bench-full: $(VENV)/.build ## The same on all shapes
	$(BIN)/python benchmarks/run.py $(ARGS)

sanitize: $(VENV)/.requirements ## Run the operator tests under AddressSanitizer and UBSan
	tools/sanitize.sh $(VENV) $(ARGS)

clean: ## Remove everything that was built
	rm -rf $(VENV) build dist src/*.egg-info src/torch_moe_ops/_build_info.py src/torch_moe_ops/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
