# make serve     a server for a small DeepSeek-V4 on this machine's CPU          make test    the test suite, but for what is slow
# make serve-pd  the same by two servers, for prompts and for decoding, and a router
#
# Variables: PYTHON=python3.11 (or 3.12, 3.13)  PORT=30000  MODEL=<checkpoint folder>  SERVE_ARGS="--tp 2 …"  TEST_ARGS="tests/kernels -k …"  WORKERS=3
#            SHARD=2/8  MINUTES=20 (of test-slow: an eighth of the slow tests, none of which begins after 20 minutes)
#            SGLANG=<version> (of compat: what it moved, renamed or changed of what this package uses)  COMPAT_ARGS=--differences
#            PRESET=<layout of `make checkpoint`: tiny, nvfp4, flash-april, flash-0731, pro-0813, flash, pro>
#            TORCH_INDEX=<index with CPU builds of torch; empty: only pip's configured ones>
#            TORCH=<version of torch in a second environment, .venv-torch-<version>, for example 2.14.1, which SGLang pins>

PYTHON      ?= python3.11
PORT        ?= 30000
MODEL       ?= trained
PRESET      ?= tiny
SERVE_ARGS  ?=
TEST_ARGS   ?=
SHARD       ?=
MINUTES     ?=
SGLANG      ?=
COMPAT_ARGS ?=
WORKERS     ?= 3
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH       ?=
PYTHONS     ?=

VENV  := .venv$(if $(TORCH),-torch-$(TORCH))
BIN   := $(VENV)/bin
# Set-up runs again when one of these files changes, and only then.
SETUP_INPUTS := requirements-cpu.txt requirements-test.txt pyproject.toml setup_venv.sh
STAMP := $(VENV)/.ready-$(shell cat $(SETUP_INPUTS) | cksum | cut -d' ' -f1)
# `make test` runs WORKERS processes side by side (tests/conftest.py says which tests stay together), so each computes
# with one thread. One more than two cores: the process whose tests ask servers mostly waits. TEST_ARGS="-n0 …" runs them
# in one process, which a debugger needs.
TEST_ENV := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=$${OMP_WAIT_POLICY:-passive}
# A part of the slow tests: shard 2/8, or HASH/8 for the one that a commit's hash chooses; no test begins after MINUTES.
PART := $(if $(SHARD),--shard $(SHARD)) $(if $(MINUTES),--minutes $(MINUTES))
# Tests that skip without one of these modules must not do so here: tests/conftest.py refuses to begin.
TEST_NEEDS := DSV4_TESTS_NEED="cuda.bindings cutlass torch"

.PHONY: help setup checkpoint serve serve-pd test test-slow compat dist lint format clean
.DEFAULT_GOAL := help

help:
	@sed -n '1,9s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))
	@echo "also: make setup | checkpoint | test-slow | compat | dist | lint | format | clean"

setup: $(STAMP)

$(STAMP):
	@PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" sh setup_venv.sh
	@rm -f $(VENV)/.ready-* && touch $@

# Random weights; the trained ones are part of the repository and are not to be replaced.
checkpoint: $(STAMP)
	@$(BIN)/python -m sglang_dsv4.cpu.random_checkpoint "$(MODEL:trained=checkpoints/tiny)" --preset $(PRESET)

# exec: no shell stands between make and the server, so that SIGTERM to make ends it. The quick start sets OpenMP's threads.
serve: $(STAMP)
	@exec $(BIN)/python -m sglang_dsv4.cpu.quickstart --model-path "$(MODEL)" --port $(PORT) $(SERVE_ARGS)

# The router is 30 MB and needs nothing that SGLang does not bring.
serve-pd: $(STAMP)
	@$(BIN)/python -c "import sglang_router" 2>/dev/null || \
		$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps sglang-router==0.3.2
	@exec $(BIN)/python -m sglang_dsv4.cpu.quickstart_pd --model-path "$(MODEL)" --port $(PORT) $(SERVE_ARGS)

test: $(STAMP)
	$(TEST_ENV) $(TEST_NEEDS) $(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not gpu" $(TEST_ARGS)

test-slow: $(STAMP)
	$(TEST_ENV) $(TEST_NEEDS) $(BIN)/python -m pytest -n $(WORKERS) -m "slow and not gpu" $(PART) $(TEST_ARGS)

# Compared as source text, so the other version's dependencies are not needed.
compat: $(STAMP)
	@test -n "$(SGLANG)" || { echo "make compat: give a version, for example make compat SGLANG=0.5.22"; exit 2; }
	@$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --dest build/compat/wheels sglang==$(SGLANG)
	@$(BIN)/python -m zipfile -e build/compat/wheels/sglang-$(SGLANG)-*.whl build/compat/$(SGLANG)
	@PYTHONPATH=tests/lib $(BIN)/python -m upstream.report build/compat/$(SGLANG) $(COMPAT_ARGS)

# The files of a release, from the committed tree, checked and installed into empty environments.
dist: $(STAMP)
	@PYTHONPATH=tests/lib $(BIN)/python -m release.dist $(PYTHONS)

lint: $(STAMP)
	$(BIN)/ruff check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-torch-* checkpoints/tiny build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
