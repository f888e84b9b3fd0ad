# Set-up, run and tests of rlvlm. Every target is safe to rerun.
#   make setup                  what a run needs;  make dev: what tests and LIBERO need too
#   make run [ARGS="--smoke"]   learn to open the drawer
#   make vllm                   build the environment of vLLM
#   make check                  style and types
#   make test                   style, then types and all tests;  make fast: the tests without Ray and long ones
#   make without [GUEST=NAME]   the tests without Ray in a copy that lacks a guest
#   make hooks                  check at every commit, by pre-commit
#   make docs                   the docs as plain files in build/site; a link that leads nowhere fails
# Tried in this order, or the one that is named: make setup PYTHON=python3.12
PYTHON ?= python3 python3.13 python3.12 python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev
# uv installs several times as fast as pip, where it is there.
UV     := $(shell command -v uv)
INSTALL = $(if $(UV),$(UV) pip install --python $(BIN)/python,$(BIN)/python -m pip install --disable-pip-version-check) --constraint constraints.txt --editable

.PHONY: setup dev run test tests fast without style types check hooks docs clean
setup: $(STAMP) rendering

dev: $(DEV) rendering

# Another Python fails after half a minute of downloads and leaves a .venv that every later set-up would use.
define CHECK_PYTHON
import re, sys
allowed = re.search(r'requires-python = "([^"]+)"', open("pyproject.toml").read())[1]
bounds = [(sign, tuple(map(int, bound.split(".")))) for sign, bound in re.findall(r"(>=|<)([0-9.]+)", allowed)]
if not all((sys.version_info[:len(bound)] >= bound) == (sign == ">=") for sign, bound in bounds):
    sys.exit("rlvlm needs Python " + allowed + ", and " + sys.executable + " is " + sys.version.split()[0] + ". " + sys.argv[1])
endef
export CHECK_PYTHON

$(BIN)/python:
	@for python in $(PYTHON); do \
	  if $$python -c "$$CHECK_PYTHON" >/dev/null 2>&1; then exec $$python -m venv $(VENV); fi; \
	done; \
	$(firstword $(PYTHON)) -c "$$CHECK_PYTHON" "Name another one: make setup PYTHON=python3.12"

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@$(BIN)/python -c "$$CHECK_PYTHON" "Remove it: rm -r $(VENV), then make setup PYTHON=python3.12"
	@# a set-up that was interrupted may have left a Python without pip
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	@echo "Installing what a run needs into $(VENV): some 1 GB to download, 2.5 GB on disk; each package is named below."
	$(INSTALL) ".[train]"
	touch $@

$(DEV): $(STAMP)
	@echo "Installing what tests and LIBERO need besides: some 2 GB on disk."
	$(INSTALL) ".[dev]"
	touch $@

# The renderer is tried, not assumed. As root the packages are installed; others get the one line to run.
.PHONY: rendering
# robosuite, and so LIBERO, imports OpenCV, which needs libraries of the system that slim machines lack.
OPENCV := import importlib.util; importlib.util.find_spec('cv2') and __import__('cv2')
rendering: $(STAMP)
	@{ $(BIN)/python -m rlvlm.envs.rendering && $(BIN)/python -c "$(OPENCV)"; } >/dev/null 2>&1 || { \
	  fix=$$($(BIN)/python -c "from rlvlm.envs.rendering import FIX; print(FIX)"); \
	  case "$$(id -u) $$fix" in \
	    "0 apt-get "*) apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$fix -qq >/dev/null;; \
	    "0 dnf "*) $$fix >/dev/null;; \
	    *) echo "Headless rendering, as root: $$fix" >&2; exit 3;; \
	  esac; \
	  $(BIN)/python -m rlvlm.envs.rendering && $(BIN)/python -c "$(OPENCV)"; }

# vLLM pins its own torch, so it gets an environment of its own: some 4 GB under .envs.
.PHONY: vllm
vllm: setup
	PYTHON=$(BIN)/python environments/vllm.sh .envs/vllm

run: setup
	$(BIN)/python -m rlvlm.run drawer_open $(ARGS)

# Each test process is one xdist worker with a Ray of its own; a file's tests stay together, as they share fixtures.
# Tests with Ray wait for a third of their time, so one worker more than there are cores keeps these busy.
CORES    := $(shell nproc)
PARALLEL  = --dist loadfile --no-loadscope-reorder

# Types take one core for minutes: the tests begin beside them.
test: style
	@$(MAKE) --no-print-directory --jobs 2 types tests

tests: dev
	$(BIN)/python -m pytest -n $$(( $(CORES) + 1 )) $(PARALLEL) $(ARGS)

fast: dev
	$(BIN)/python -m pytest -n $(CORES) $(PARALLEL) -m "not ray and not slow and not gpu and not full and not vllm" $(ARGS)

# The core does without any guest: one is deleted with its tests in a copy, by name or drawn.
without: dev
	$(BIN)/python -m tests.without_guest $(GUEST) $(ARGS)

check: style types

style: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: dev
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

hooks: dev
	$(BIN)/pre-commit install

DOCS := $(VENV)/.installed-docs

$(DOCS): $(STAMP)
	$(INSTALL) ".[docs]"
	touch $@

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
