# One command each: `make serve`, `make test`, `make chat`. Everything is installed into virtual
# environments in this directory (VENV, CLIENTS). Outside it only caches change: pip's, the step
# times and kernel choices in lightserve/ under XDG_CACHE_HOME or ~/.cache (`make clean-cache`
# removes these), and Hugging Face's where a --model is downloaded; and a server keeps clients' files
# and batches in lightserve/ under XDG_STATE_HOME or ~/.local/state (--batch-store none: it does not).

PYTHON ?= python3
VENV   ?= .venv
# What only talks to servers, here or elsewhere: small, without torch.
CLIENTS ?= .venv-clients
# Which build of torch is used: any pip requirement, URL (with #sha256=... it is checked) or wheel.
# Everything else comes as requirements/*.txt say, by version and hash.
TORCH  ?= torch==2.13.0
PORT   ?= 8000
# Of `make test-long`; 0: no soak.
SOAK_MINUTES ?= 120
# How many processes run the tests; each computes with one thread. One more than there are cores, as
# tests of servers wait.
TEST_JOBS ?= 3
# Further flags of `lightserve serve`, for instance ARGS="--model path --tp 2"; of `lightserve chat`
# for `make chat`, of `lightserve bench` for `make bench-client`.
ARGS   ?=
# For a GPU machine without internet: a directory of wheels, the Python they are for, and where
# gpu-check leaves its report.
WHEELS     ?=
WHEELS_FOR ?= 3.12
GPU_OUT    ?= build/gpu-check

BIN := $(VENV)/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
PIP := $(BIN)/python $(PIP_INSTALL)
CLIENTS_PIP := $(CLIENTS)/bin/python $(PIP_INSTALL)
CHECK_PYTHON := $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3" >&2; exit 1; }
LOCKED := --require-hashes --requirement
ALONE := --no-deps --no-build-isolation
SUPPLY := $(VENV)/supply
OLDEST_TRITON := $(VENV)/triton-oldest
TORCH_KEY := $(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)
HAS_VENV  := $(VENV)/.has-venv
HAS_TORCH := $(VENV)/.has-torch-$(TORCH_KEY)
HAS_SERVE := $(VENV)/.has-serve
HAS_TEST  := $(VENV)/.has-test
HAS_CLIENTS := $(CLIENTS)/.has-clients
HAS_SUPPLY := $(SUPPLY)/.has-supply
LIGHTSERVE_CACHE = $${XDG_CACHE_HOME:-$$HOME/.cache}/lightserve
SOURCES := lightserve tests bench tools examples
# Where this is set, each of the hundreds of processes that tests start would compile all sources.
unexport PYTHONDONTWRITEBYTECODE
# What the CPU engine's native core is built from, when the package is installed.
CORE := setup.py $(wildcard lightserve/kernels/cpu/csrc/*)

.PHONY: serve chat bench-client test test-long check fmt bench gpu-check gpu-wheels lock audit sbom release \
	clean clean-cache

serve: $(HAS_SERVE)
	@exec $(BIN)/lightserve serve --port $(PORT) $(ARGS)

chat: $(HAS_CLIENTS)
	@exec $(CLIENTS)/bin/lightserve chat $(ARGS)

bench-client: $(HAS_CLIENTS)
	@exec $(CLIENTS)/bin/lightserve bench $(or $(ARGS),--help)

# Files in order: those that take longest, of servers and kernels, begin first.
PYTEST = $(BIN)/pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder
test: $(HAS_TEST)
	$(PYTEST)

# What `make test` leaves out: the whole of its grids, what takes minutes, and a soak: SOAK_MINUTES
# under mixed load.
test-long: $(HAS_TEST)
	$(PYTEST) -m 'long and not soak'
ifneq ($(SOAK_MINUTES),0)
	SOAK_MINUTES=$(SOAK_MINUTES) $(BIN)/pytest -m soak -s
endif

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
	$(BIN)/python -m bench.engine.throughput
	$(BIN)/python -m bench.faults.recovery
	$(BIN)/python -m bench.faults.recovery ranks

# Everything that only a GPU can show; with WHEELS nothing is fetched, and $(PYTHON) must have
# PyTorch, Triton and transformers. ARGS="--rehearse" tries every part on the CPU.
ifdef WHEELS
GPU_SITE := $(CURDIR)/build/gpu-site
gpu-check:
	@rm -rf $(GPU_SITE)
	@$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
		--target $(GPU_SITE) $(WHEELS)/*.whl
	@PYTHONPATH=$(GPU_SITE):$(CURDIR) $(PYTHON) -m bench.gpu --out $(GPU_OUT) $(ARGS)
else
gpu-check: $(HAS_TEST)
	@$(BIN)/python -m bench.gpu --out $(GPU_OUT) $(ARGS)
endif

gpu-wheels:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --implementation cp \
		--python-version $(WHEELS_FOR) --platform manylinux2014_x86_64 \
		$(foreach n,17 24 26 28 31 34,--platform manylinux_2_$(n)_x86_64) \
		--dest $(or $(WHEELS),.whl) --requirement bench/gpu/wheels.txt

# The versions and hashes of requirements/*.txt anew, from what pyproject.toml asks for. Versions stay
# where they can; ARGS=--upgrade takes the newest, ARGS="--upgrade-package NAME" that of one package.
COMPILE = $(SUPPLY)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-annotate --no-header --no-emit-index-url $(ARGS)
OF_SERVER := --excludes requirements/not_locked.in pyproject.toml requirements/build.in \
	requirements/beside_torch.in
lock: $(HAS_SUPPLY)
	$(COMPILE) $(OF_SERVER) --extra postgres --extra objects --output-file requirements/serve.txt
	$(COMPILE) $(OF_SERVER) --extra test --constraint requirements/serve.txt \
		--output-file requirements/test.txt
	$(PYTHON) requirements/clients.py pyproject.toml bench chat plots > $(SUPPLY)/clients.in
	$(COMPILE) $(SUPPLY)/clients.in requirements/build.in --constraint requirements/test.txt \
		--output-file requirements/clients.txt
	$(COMPILE) requirements/triton.in --output-file requirements/triton.txt
	$(COMPILE) requirements/triton_oldest.in --output-file requirements/triton_oldest.txt
	$(COMPILE) requirements/supply.in requirements/build.in --constraint requirements/test.txt \
		--output-file requirements/supply.txt

# Known vulnerabilities of what is installed in VENV: fails if there are some, and if not all of it
# could be looked up.
audit: $(HAS_SERVE) $(HAS_SUPPLY)
	@$(BIN)/python requirements/audit.py $(SUPPLY)/bin/pip-audit $(ARGS)

# What is installed in VENV, as CycloneDX.
sbom: $(HAS_SERVE) $(HAS_SUPPLY)
	@mkdir -p build
	$(SUPPLY)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-file build/sbom.cdx.json $(BIN)/python

# Wheel with the native core, sdist, bill of materials, notes and checksums, in dist/ or in ARGS; and
# images in the storage of docker, podman or buildah: tools/release.py has IMAGES and its other variables.
release: $(HAS_SUPPLY)
	@$(SUPPLY)/bin/python -m tools.release $(ARGS)

clean:
	rm -rf $(VENV) $(CLIENTS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@echo "Measured step times stay in $(LIGHTSERVE_CACHE); make clean-cache removes them."

clean-cache:
	rm -rf "$(LIGHTSERVE_CACHE)"

$(HAS_VENV):
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(HAS_TORCH): $(HAS_VENV) requirements/serve.txt
	@echo "Installing '$(TORCH)' and what lightserve needs into $(VENV), once: on disk about 1 GB"
	@echo "with a build of torch for CPUs, several GB with one for GPUs (docs/install.md says how to choose)."
	$(PIP) $(LOCKED) requirements/serve.txt
	$(PIP) '$(TORCH)'
	@rm -f $(VENV)/.has-torch-*
	@touch $@

$(HAS_SERVE): $(HAS_TORCH) pyproject.toml $(CORE)
	$(PIP) $(ALONE) -e .
	@touch $@

# Builds of torch for a GPU have brought their own triton. The oldest one stands beside the
# environment, not in it: tests compile with it as well.
$(HAS_TEST): $(HAS_TORCH) pyproject.toml $(CORE) requirements/test.txt requirements/triton.txt \
		requirements/triton_oldest.txt
	$(PIP) $(LOCKED) requirements/test.txt
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) $(LOCKED) requirements/triton.txt
	@rm -rf $(OLDEST_TRITON)
	$(PIP) --target $(OLDEST_TRITON) --no-compile $(LOCKED) requirements/triton_oldest.txt
	$(PIP) $(ALONE) -e .
	@touch $@ $(HAS_SERVE)

$(HAS_CLIENTS): pyproject.toml requirements/clients.txt
	@$(CHECK_PYTHON)
	@echo "Installing what chat and the load client need into $(CLIENTS), once: about 0.3 GB."
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS_PIP) $(LOCKED) requirements/clients.txt
	$(CLIENTS_PIP) $(ALONE) -e .
	@touch $@

$(HAS_SUPPLY): $(HAS_VENV) requirements/supply.txt
	$(PYTHON) -m venv $(SUPPLY)
	$(SUPPLY)/bin/python $(PIP_INSTALL) $(LOCKED) requirements/supply.txt
	@touch $@
