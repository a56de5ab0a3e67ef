# make demo    trains a tiny model by reinforcement learning on this machine's CPU and shows the result
# make test    lints, checks types and runs the tests
# Both make .venv first, if it is not there or pyproject.toml changed. Needs Python 3.11 or newer, git and make.
SHELL := /bin/bash
LAYOUT ?= tp2
SEED ?= 0
PYTHON ?= $(shell for p in python3.11 python3.12 python3 python3.13; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
READY := .venv/installed

.PHONY: demo test lint setup docs
setup: $(READY)

$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "set-up: no Python 3.11 or newer with its venv module was found (on Debian: apt-get install python3-venv)"; exit 2; }
	@echo "set-up: .venv with $$($(PYTHON) --version), packages of pyproject.toml (a few minutes, about 2 GB)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
	@echo "set-up: done"

demo: $(READY)
	@$(BIN)/megatron-rl demo --layout $(LAYOUT) --seed $(SEED)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

# docs/config.md is made from the texts in megatron_rl/config.py
docs: $(READY)
	$(BIN)/megatron-rl docs > docs/config.md
