# Every target makes what it needs: a virtual environment in .venv, filled once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 2
export OMP_WAIT_POLICY ?= passive
export TOKENIZERS_PARALLELISM ?= false
export WANDB_MODE ?= offline

.PHONY: quickstart test check bench gpu-check clean

$(VENV)/.installed-base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

quickstart: $(VENV)/.installed-base  ## Improve the embedded model with GRPO, and draw what happened.
	$(BIN)/python scripts/quickstart.py

test: $(VENV)/.installed-dev  ## Run every test.
	$(BIN)/python -m pytest

check: $(VENV)/.installed-dev  ## Format, style, types and layers.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed-dev  ## Sampling against generate of transformers, side by side.
	$(BIN)/python scripts/bench/sampling.py

gpu-check: $(VENV)/.installed-dev  ## Checks, speed, memory and a learning run on a GPU; without a network: python scripts/gpu_check.py
	$(BIN)/python scripts/gpu_check.py

clean:
	rm -rf $(VENV) runs build dist
