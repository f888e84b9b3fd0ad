# Set-up, run and tests of rlvlm. Every target can be repeated; what is done is skipped.
#   make run [ARGS="--smoke"]   learn to open the drawer
#   make vllm                   build the environment of vLLM judges
#   make test                   all tests;  make fast: those without Ray and long runs
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup run test fast check clean
setup: $(STAMP) rendering

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

# The renderer is tried, not assumed. As root the Debian packages are installed; others get the one line to run.
.PHONY: rendering
RENDER_PACKAGES := libegl1 libegl-mesa0 libgl1-mesa-dri libosmesa6 libgles2 libopengl0
rendering: $(STAMP)
	@$(BIN)/python -m rlvlm.envs.rendering >/dev/null 2>&1 || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $(RENDER_PACKAGES) >/dev/null; \
	  else \
	    echo "Headless rendering needs: sudo apt-get install -y $(RENDER_PACKAGES)" >&2; exit 3; \
	  fi; \
	  $(BIN)/python -m rlvlm.envs.rendering; }

# vLLM pins its own torch, so it gets an environment of its own: some 4 GB under .envs.
.PHONY: vllm
vllm: setup
	PYTHON=$(BIN)/python environments/vllm.sh .envs/vllm

run: setup
	$(BIN)/python -m rlvlm.run drawer_open $(ARGS)

test: setup
	$(BIN)/ruff check .
	$(BIN)/python -m pytest $(ARGS)

fast: setup
	$(BIN)/python -m pytest -m "not ray and not slow and not gpu and not full and not vllm" $(ARGS)

# Style and types; pyright fetches its own runtime the first time.
check: setup
	$(BIN)/ruff check .
	$(BIN)/pyright

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
