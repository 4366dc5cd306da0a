# Environments are made here, from the pinned set in constraints/; nothing but Python and its venv module is needed.
PYTHON ?= python3
TRL := 1.16.0
BIN := .venv/bin
INSTALLED := .venv/installed-trl-$(TRL)
CONSTRAINTS := constraints/trl-$(TRL).txt
# torch by itself and first, so that nothing else decides its version; bytecode is compiled at the first import instead
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint $(CONSTRAINTS)

.PHONY: demo test test-vllm matrix parity lint format clean

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("The pinned set needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) torch
	DS_BUILD_OPS=0 $(PIP_INSTALL) --editable ".[dev]"
	touch $@

demo: $(INSTALLED)  ## Train a small model with FusedGRPOTrainer and show its reward rise
	$(BIN)/python examples/train_arithmetic.py $(ARGS)

test: $(INSTALLED)  ## Every test that runs on this machine with the newest TRL
	$(BIN)/python -m pytest

parity: $(INSTALLED)  ## Compare with stock TRL, case by case
	$(BIN)/trl-fused-grpo parity

matrix: $(INSTALLED)  ## Parity and tests on every supported TRL, and real vLLM
	$(BIN)/nox

test-vllm: $(INSTALLED)  ## Real vLLM on the CPU, in an environment of its own
	$(BIN)/nox --session vllm

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/ty check

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv .nox
