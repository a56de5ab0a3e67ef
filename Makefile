# make demo    trains a tiny model by reinforcement learning on this machine's CPU and shows the result
#              LAYOUT=tp2|pp2|cp2|dp2  ENGINE=embedded|sglang  SEED=0  SET="key.sub=value ..."
# make test    lints, checks types and runs the tests
# make test-gpu      runs the tests that need a GPU; elsewhere they are skipped
# make test-sglang   runs the tests against a real SGLang on the CPU, in an environment of its own
# make bench-reshard measures the table of docs/resharding.md (2 minutes)
# make bench-convert DIRECTORY=...  measures the table of docs/checkpoints.md (10 minutes, 46 GB of disk)
# make bench-trainer measures the tables of docs/performance.md (half an hour, 20 GB of memory)
# All make .venv first, if it is not there or pyproject.toml changed. Needs Python 3.11 or newer, git and make.
SHELL := /bin/bash
LAYOUT ?= tp2
ENGINE ?= embedded
SEED ?= 0
PYTHON ?= $(shell for p in python3.11 python3.12 python3 python3.13; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
READY := .venv/installed
SGLANG := .venv-sglang
SGLANG_CPU := tests/engines/sglang_cpu
ENV_sglang := $(SGLANG)/installed
OPTIONS_sglang := rollout.sglang.python=$(SGLANG)/bin/python

.PHONY: demo test test-gpu test-sglang sglang-env bench-convert bench-reshard bench-trainer lint setup docs
setup: $(READY)

$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "set-up: no Python 3.11 or newer with its venv module was found (on Debian: apt-get install python3-venv)"; exit 2; }
	@echo "set-up: .venv with $$($(PYTHON) --version), packages of pyproject.toml (a few minutes, about 2 GB)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
	@echo "set-up: done"

demo: $(READY) $(ENV_$(ENGINE))
	@$(BIN)/megatron-rl demo --layout $(LAYOUT) --engine $(ENGINE) --seed $(SEED) $(OPTIONS_$(ENGINE)) $(SET)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu -rs tests/gpu

test-sglang: $(READY) sglang-env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m sglang -rs tests/engines  # the servers want the other core

sglang-env: $(SGLANG)/installed

# The .pth file puts the stand-ins of $(SGLANG_CPU) before everything that SGLang imports, in each of its processes.
$(SGLANG)/installed: $(SGLANG_CPU)/requirements.txt
	@test -n "$(PYTHON)" || { echo "sglang-env: no Python 3.11 or newer with its venv module was found (on Debian: apt-get install python3-venv)"; exit 2; }
	@echo "sglang-env: $(SGLANG) with $$($(PYTHON) --version) (a few minutes, about 2 GB)"
	@$(PYTHON) -m venv $(SGLANG)
	@$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $< "$$(grep '^torch==' $<)"
	@$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	@printf '%s\nimport sglang_cpu; sglang_cpu.install()\n' "$(CURDIR)/$(SGLANG_CPU)" \
		> "$$($(SGLANG)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sglang_cpu.pth"
	@touch $@
	@echo "sglang-env: done"

# verl's balancing is measured beside ours; only its import needs ray and tensordict.
bench-trainer: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check ray tensordict
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps verl==0.9.1
	$(BIN)/python -m tests.benchmarks.bench_logprobs
	$(BIN)/python -m tests.benchmarks.bench_schedule
	$(BIN)/python -m tests.benchmarks.bench_sleep
	$(BIN)/python -m tests.benchmarks.bench_delivery
	$(BIN)/torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.one_layer

bench-reshard: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 4 -m tests.benchmarks.bench_reshard

bench-convert: $(READY)
	$(BIN)/python -m tests.benchmarks.bench_convert $(or $(DIRECTORY),$(error make bench-convert DIRECTORY=... with 46 GB))

# docs/config.md is made from the texts in megatron_rl/config.py
docs: $(READY)
	$(BIN)/megatron-rl docs > docs/config.md
