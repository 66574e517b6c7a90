# One command each: `make serve`, `make test`. Everything is installed into a virtual environment
# of its own (VENV); nothing else on the machine changes.

PYTHON ?= python3
VENV   ?= .venv
# Installed first, so that it decides which build of torch is used: any pip requirement or wheel.
TORCH  ?= torch==2.13.0
PORT   ?= 8000
# Further flags of `lightserve serve`, for instance ARGS="--model path --tp 2".
ARGS   ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TORCH_KEY := $(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)
HAS_VENV  := $(VENV)/.has-venv
HAS_TORCH := $(VENV)/.has-torch-$(TORCH_KEY)
HAS_SERVE := $(VENV)/.has-serve
HAS_TEST  := $(VENV)/.has-test
SOURCES := lightserve tests bench

.PHONY: serve test check fmt bench clean

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
