# Environments are made here, from the pinned set in constraints/; nothing but Python and its venv module is needed.
PYTHON ?= python3
# Processes that share the tests
JOBS ?= 2
BIN := .venv/bin
CONSTRAINTS := $(shell ls constraints/trl-[0-9]*.txt | sort -V | tail -n 1)
INSTALLED := .venv/installed-$(basename $(notdir $(CONSTRAINTS)))
# torch by itself and first, so that nothing else decides its version; bytecode is compiled at the first import instead
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint $(CONSTRAINTS)
# Tests on tensors and modules. In one process: a second one spends more on its imports than it saves
QUICK_TESTS := tests/ops tests/loss tests/test_architecture.py tests/test_versions.py

# The share of mutants below which `make mutants` fails (docs/reliability.md)
LEAST_NOTICED ?= 0.9

# Tests start hundreds of processes: without bytecode each of them compiles torch and transformers anew
unexport PYTHONDONTWRITEBYTECODE

# Tests of several processes start them once for a file, and so stay together (loadfile).
# A process for each core: more threads would wait for one another, and spin meanwhile
test nightly: export OMP_NUM_THREADS ?= 1

.PHONY: demo quick test nightly test-vllm matrix mutants oldest newest parity lint format clean

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("The pinned set needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) torch
	DS_BUILD_OPS=0 $(PIP_INSTALL) --editable ".[dev]"
	touch $@

demo: $(INSTALLED)  ## Train a small model with FusedGRPOTrainer and show its reward rise
	$(BIN)/python examples/train_arithmetic.py $(ARGS)

quick: $(INSTALLED)  ## Tests that need no trainer, in under 40 seconds
	$(BIN)/python -m pytest -m "not slow" $(QUICK_TESTS)

test: $(INSTALLED)  ## Every behaviour on this machine with the newest TRL, in six minutes: of grids of cases a sample
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not distributed and not example and not nightly"
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "(distributed or example) and not nightly"

nightly: $(INSTALLED)  ## What `make test` leaves out: whole grids, every engine with every feature, kills
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --timeout 1800 -m "nightly and not distributed and not example"
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --timeout 1800 -m "nightly and (distributed or example)"

parity: $(INSTALLED)  ## Compare with stock TRL, case by case
	$(BIN)/trl-fused-grpo parity

matrix: $(INSTALLED)  ## Parity and tests on every supported TRL, and real vLLM; SHORT=1 after `make test`: half an hour
	$(BIN)/nox $(if $(SHORT),-- short)

oldest: $(INSTALLED)  ## Parity and tests with Python 3.10 and the oldest libraries that pyproject.toml declares
	$(BIN)/nox --session oldest

newest: $(INSTALLED)  ## Parity and tests with the newest torch, transformers, TRL and vLLM that pip finds
	$(BIN)/nox --session newest newest_vllm

test-vllm: $(INSTALLED)  ## Real vLLM on the CPU, in an environment of its own
	$(BIN)/nox --session vllm

mutants: $(INSTALLED)  ## Faults in the tensor-only folders, one after the other: how many do tests notice? Hours
	$(PIP_INSTALL) --editable ".[mutants]"
	OMP_NUM_THREADS=1 $(BIN)/mutmut run --max-children $(JOBS)
	$(BIN)/mutmut export-cicd-stats
	$(BIN)/python -c 'import json; s = json.load(open("mutants/mutmut-cicd-stats.json")); n = s["killed"] + s["timeout"]; \
		share = n / (n + s["survived"]); print(f"{share:.1%} noticed"); raise SystemExit(share < $(LEAST_NOTICED))'

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/ty check

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv .nox
