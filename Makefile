# make demo    a trained drafter proposes blocks for a trained target on real text
# make test    every test that needs no GPU
# Each makes a virtual environment if there is none and installs what it needs.

PYTHON ?= python3
VENV ?= .venv
# Any torch from 2.6 on works. This one is installed where the environment has none.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin

.PHONY: demo test slow lint bench mpi clean

demo: $(VENV)/.demo
	$(BIN)/trtllm-dspark generate --compare

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

slow: $(VENV)/.test
	$(BIN)/python -m pytest --slow $(ARGS)

bench: $(VENV)/.test
	$(BIN)/python -m cute_kernels.bench $(ARGS)

# For the one test that launches processes with mpiexec. Where a part cannot be had, that test is skipped and says so.
mpi: $(VENV)/.test
	-command -v mpiexec >/dev/null || { export DEBIAN_FRONTEND=noninteractive; \
		timeout 120 apt-get -qq update && timeout 240 apt-get -qq install --no-install-recommends --yes openmpi-bin; }
	-timeout 120 $(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 1 mpi4py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.torch:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[hf]"
	touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[hf,test,cute]"
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[hf,test,cute,dev]"
	touch $@
