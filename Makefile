# make demo and make test need Python 3.11 or newer and pip; they make .venv and install into it themselves.

SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	>/dev/null 2>&1 && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help demo test test-all lint types bench bench-quick gpu-check accuracy gallery docs system-packages clean

help:
	@echo "make demo       two ranks that read the same data, then the fixed job: both verdicts side by side"
	@echo "make test       what CI runs besides lint and types (at most 30 minutes on 2 cores)"
	@echo "make test-all   every test, the slow ones too"
	@echo "make lint       ruff"
	@echo "make types      mypy --strict on ddp_audit"
	@echo "make bench      what the probe costs per step, in microseconds and bytes (about half an hour)"
	@echo "make gpu-check  what can only be seen on a GPU (under 5 minutes)"

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found: install one, or run make PYTHON=/path/to/python" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# the tool alone, as a user installs it
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing ddp-audit and torch into $(VENV): some minutes the first time"
	$(PIP_INSTALL) -e .
	@touch $@

# the tool, the frameworks it is tested with, and the test tools
$(VENV)/.installed-all: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing ddp-audit, torch, frameworks and test tools into $(VENV): some minutes the first time"
	$(PIP_INSTALL) -e '.[test,frameworks,dev]'
	@touch $@ $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/ddp-audit demo

# Chromium opens reports, iproute2 makes the two nodes of a test. Without them those tests skip and name the line to run.
system-packages:
	@missing=""; command -v chromium >/dev/null || missing="$$missing chromium"; \
	command -v ip >/dev/null || missing="$$missing iproute2"; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if ! command -v apt-get >/dev/null; then echo "not here, the tests that need them skip:$$missing"; exit 0; fi; \
	if [ "$$(id -u)" = 0 ]; then sudo=""; \
	elif sudo -n true 2>/dev/null; then sudo="sudo -n"; \
	else echo "not here, the tests that need them skip. To install: apt-get install$$missing"; exit 0; fi; \
	echo "installing system packages:$$missing"; \
	$$sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$sudo apt-get install -y -qq --no-install-recommends $$missing \
		>/dev/null || echo "could not be installed:$$missing"

test: $(VENV)/.installed-all system-packages
	$(PYTEST) -m "not slow"

test-all: $(VENV)/.installed-all system-packages
	$(PYTEST) --compare-repeats

lint: $(VENV)/.installed-all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-all
	$(BIN)/mypy

bench: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/probe_cost.py

bench-quick: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/probe_cost.py --quick

gpu-check: $(VENV)/.installed
	$(BIN)/python benchmarks/gpu_check.py

accuracy:
	@echo "make accuracy: comes with the breadth of fault kinds; until then see tests/probes"; exit 2

gallery:
	@echo "make gallery: comes with the finished report; until then run make demo"; exit 2

docs: $(VENV)/.installed
	@echo "make docs: reference pages made from checks and --help come with the finished report; see docs/ and ddp-audit explain"; exit 2

clean:
	rm -rf $(VENV) build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
