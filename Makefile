# Environments are made here, from the pinned set in constraints/; nothing but Python and its venv module is needed.
PYTHON ?= python3
TRL := 1.16.0
BIN := .venv/bin
INSTALLED := .venv/installed-trl-$(TRL)
CONSTRAINTS := constraints/trl-$(TRL).txt

.PHONY: demo test test-vllm matrix parity lint format clean

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) torch
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable ".[dev]"
	touch $@

demo: $(INSTALLED)  ## Train a small model with FusedGRPOTrainer and show its reward rise
	$(BIN)/python examples/train_arithmetic.py

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
