# One command each: `make serve`, `make test`. Everything is installed into a virtual environment
# of its own (VENV); nothing else on the machine changes.

PYTHON ?= python3
VENV   ?= .venv
# Installed first, so that it decides which build of torch is used: any pip requirement or wheel.
TORCH  ?= torch==2.13.0
PORT   ?= 8000
# Further flags of `lightserve serve`, for instance ARGS="--model path --tp 2".
ARGS   ?=
# For a GPU machine without internet: a directory of wheels, the Python they are for, and where
# gpu-check leaves its report.
WHEELS     ?=
WHEELS_FOR ?= 3.12
GPU_OUT    ?= build/gpu-check

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TORCH_KEY := $(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)
HAS_VENV  := $(VENV)/.has-venv
HAS_TORCH := $(VENV)/.has-torch-$(TORCH_KEY)
HAS_SERVE := $(VENV)/.has-serve
HAS_TEST  := $(VENV)/.has-test
SOURCES := lightserve tests bench

.PHONY: serve test check fmt bench gpu-check gpu-wheels clean

serve: $(HAS_SERVE)
	@exec $(BIN)/lightserve serve --port $(PORT) $(ARGS)

test: $(HAS_TEST)
	$(BIN)/pytest

check: $(HAS_TEST)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/pytest -q tests/unit/test_source_rules.py

fmt: $(HAS_TEST)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: $(HAS_TEST)
	$(BIN)/python bench/engine.py
	$(BIN)/python bench/faults.py
	$(BIN)/python bench/dead_ranks.py

# Everything that only a GPU can show; with WHEELS nothing is fetched, and $(PYTHON) must have
# PyTorch, Triton and transformers. ARGS="--rehearse" tries every part on the CPU.
ifdef WHEELS
GPU_SITE := $(CURDIR)/build/gpu-site
gpu-check:
	@rm -rf $(GPU_SITE)
	@$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
		--target $(GPU_SITE) $(WHEELS)/*.whl
	@PYTHONPATH=$(GPU_SITE):$(CURDIR) $(PYTHON) bench/gpu.py --out $(GPU_OUT) $(ARGS)
else
gpu-check: $(HAS_TEST)
	@$(BIN)/python bench/gpu.py --out $(GPU_OUT) $(ARGS)
endif

gpu-wheels:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --implementation cp \
		--python-version $(WHEELS_FOR) --platform manylinux2014_x86_64 \
		$(foreach n,17 24 26 28 31 34,--platform manylinux_2_$(n)_x86_64) \
		--dest $(or $(WHEELS),.whl) --requirement bench/gpu_wheels.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(HAS_VENV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(HAS_TORCH): $(HAS_VENV)
	$(PIP) '$(TORCH)'
	@rm -f $(VENV)/.has-torch-*
	@touch $@

$(HAS_SERVE): $(HAS_TORCH) pyproject.toml
	$(PIP) -e .
	@touch $@

$(HAS_TEST): $(HAS_TORCH) pyproject.toml
	$(PIP) -e '.[test]'
	@touch $@ $(HAS_SERVE)
