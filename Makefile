# Everything a developer types. Each target sets up what it needs: a virtual environment in .venv, the pinned requirements, the built
# extension. PYTHON chooses the interpreter that makes the environment; VENV uses another place for it. The tests of the NPU kernels
# have an environment of their own, VENV_NPU, with torch_npu; so have the full benchmarks, VENV_BENCH, with the packages that they
# measure against.
PYTHON     ?= python3.11
VENV       ?= .venv
VENV_NPU   ?= .venv-npu
VENV_BENCH ?= .venv-bench
BIN        := $(VENV)/bin
# Two compile jobs by default: torch's headers take about 1 GB each.
export MAX_JOBS ?= 2
# torch_npu installed without CANN must not break `import torch`.
export TORCH_DEVICE_BACKEND_AUTOLOAD ?= 0

SOURCES := $(shell find csrc src -name '*.cpp' -o -name '*.h' -o -name '*.py' | grep -v _build_info) setup.py pyproject.toml
CXX_SOURCES := $(shell find csrc tests benchmarks -name '*.cpp' -o -name '*.h')

.DEFAULT_GOAL := help
.PHONY: help build train test test-cpu test-npu test-npu-full lint format bench bench-full sanitize clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

REQUIREMENTS := requirements/dev.txt
$(VENV_NPU)/.requirements: REQUIREMENTS := requirements/npu.txt
$(VENV_BENCH)/.requirements: PEERS := requirements/bench.txt

%/.requirements: requirements/build.txt requirements/dev.txt requirements/npu.txt requirements/bench.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; install Python 3.11 or set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { echo "make: no C++ compiler found; install g++ 11 or newer (Debian: apt-get install g++) or set CXX" >&2; exit 1; }
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install --quiet --disable-pip-version-check -r $(REQUIREMENTS)
	$(if $(PEERS),$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(PEERS))
	touch $@

%/.build: %/.requirements $(SOURCES)
	PATH="$(abspath $*)/bin:$$PATH" $*/bin/python -m pip install --quiet --disable-pip-version-check \
	    --no-build-isolation --no-deps --force-reinstall .
	touch $@

.PRECIOUS: %/.requirements %/.build

build: $(VENV)/.build ## Build and install the package into .venv

train: $(VENV)/.build ## Train a small mixture-of-experts language model on the CPU (2-4 minutes)
	$(BIN)/python examples/train_moe_lm.py $(ARGS)

test: test-cpu test-npu ## Run all tests

test-cpu: $(VENV)/.build ## Those that need no NPU (ARGS='-k name' narrows)
	$(BIN)/python -m pytest -n 2 --dist loadgroup --ignore=tests/npu $(ARGS)

test-npu: $(VENV_NPU)/.build ## Those of the NPU kernels, with torch_npu on a stand-in for CANN (ARGS as above)
	$(VENV_NPU)/bin/python tests/npu/run.py $(ARGS)

test-npu-full: $(VENV_NPU)/.build ## The same in every setting: product, CANN release, queue mode, streams (about 40 minutes)
	$(VENV_NPU)/bin/python tests/npu/run.py --full $(ARGS)

lint: $(VENV)/.requirements ## Check format, style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)
	$(BIN)/mypy

format: $(VENV)/.requirements ## Rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

bench: $(VENV)/.build ## Measure every operator against the naive form, short version (4 minutes)
	$(BIN)/python benchmarks/suite.py --quick $(ARGS)

bench-full: $(VENV_BENCH)/.build ## The same on all shapes, in all settings, and against other packages (75 minutes)
	$(VENV_BENCH)/bin/python benchmarks/suite.py $(ARGS)

sanitize: $(VENV)/.requirements ## Run the operator tests under AddressSanitizer and UBSan
	tools/sanitize.sh $(VENV) $(ARGS)

clean: ## Remove everything that was built
	rm -rf $(VENV) $(VENV_NPU) $(VENV_BENCH) build dist src/*.egg-info src/torch_moe_ops/_build_info.py src/torch_moe_ops/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
