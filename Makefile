# Two commands do everything: `make train` (the main job) and `make test` (all default tests).
# Every target creates or reuses .venv: `make train` installs what training needs, and the first
# target of a developer adds the rest. Python 3.11 or newer must be installed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Python compiles a file when it is first imported; compiling all of torch takes longer than the rest
# of its installation.
PIP = "$(BIN)/python" -m pip install --quiet --disable-pip-version-check --no-compile
TORCH := torch==2.13.0
# With a driver of Nvidia, pip's own choice: on Linux several gigabytes of CUDA libraries. Else the
# CPU build from PyTorch's own index, where that answers within five seconds (CPU_WHEELS= : never).
GPU := $(shell command -v nvidia-smi || ls -d /proc/driver/nvidia 2>/dev/null)
CPU_WHEELS := $(if $(GPU),,https://download.pytorch.org/whl/cpu)
PROBE = import os, threading, urllib.request; end = threading.Timer(5, os._exit, [1]); \
	end.daemon = True; end.start(); urllib.request.urlopen('$(CPU_WHEELS)/torch/', timeout=5)
VERSION = import sys; sys.exit(None if sys.version_info >= (3, 11) else 'Python 3.11 or newer is \
	needed, and $(PYTHON) is ' + sys.version.split()[0] + ': make PYTHON=python3.12, say')
TESTS = "$(BIN)/python" -m pytest -n auto --maxprocesses 8 --dist worksteal
OUT ?= runs/tiny
# As many ranks as there are cores, up to four.
CORES = $(shell "$(BIN)/python" -c "from moemesh.trace.machine import usable_cores as cores; \
	print(min(cores(), 4))")
PLAN_4 := --set plan.tp=2 --set plan.dp=2 --set plan.ep=4
PLAN_3 := --set plan.dp=2 --set plan.ep=2
PLAN_2 := $(PLAN_3)

.PHONY: train test test-slow check house format bench gpu docs clean

# A build with a local version (2.13.0+cpu) is newer than the same without one, so pip takes it. A
# Python that the pinned version has no wheel for gets the newest that it has.
$(VENV)/ready: pyproject.toml
	@"$(PYTHON)" -c "$(VERSION)"
	"$(BIN)/python" -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv "$(VENV)"
	@if [ -n "$(CPU_WHEELS)" ] && "$(BIN)/python" -c "$(PROBE)" 2>/dev/null; \
	then set -- --extra-index-url "$(CPU_WHEELS)"; else set --; fi; \
	echo "installing $(TORCH) $$*"; \
	$(PIP) "$$@" "$(TORCH)" 2>/dev/null || $(PIP) "$$@" "torch>=2.10"
	@echo "installing moemesh and the other packages that training needs"
	@$(PIP) -e .
	@touch "$@"

$(VENV)/tools: $(VENV)/ready
	@echo "installing the packages of the tests"
	@$(PIP) -e '.[dev]'
	@touch "$@"

train: $(VENV)/ready
	"$(BIN)/moemesh" train $(PLAN_$(CORES)) --set data.global_batch=16 --set train.steps=160 --out "$(OUT)"

test: $(VENV)/tools
	$(TESTS) $(PYTEST_FLAGS)

test-slow: $(VENV)/tools
	"$(BIN)/python" -m pytest -m slow $(PYTEST_FLAGS)

check: $(VENV)/tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright -p .
	$(BIN)/lint-imports
	$(TESTS) -m "documents and not slow"

# Lines, files, functions and names of the package.
house: $(VENV)/tools
	"$(BIN)/python" -m tests.house

format: $(VENV)/tools
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# On a machine that does nothing else: one MoE layer, then whole steps beside transformers.
bench: $(VENV)/tools
	"$(BIN)/python" -m benchmarks.layer
	for plan in "" dp=2 dp=2,ep=2; do "$(BIN)/python" -m benchmarks.step --plan "$$plan"; done
	for work in evaluate generate; do "$(BIN)/python" -m benchmarks.step --work $$work; done

# On a machine with GPUs and a CUDA build of torch in $(GPU_PYTHON): what needs them, in the order of
# its worth, each part with a file of its own in $(GPU_RESULTS) (docs/gpu.md, tests/gpu_session.py).
GPU_PYTHON ?= $(PYTHON)
GPU_RESULTS ?= gpu-results
gpu:
	$(GPU_PYTHON) -m tests.gpu_session $(GPU_RESULTS)

# The documentation as a site, without a network: open site/index.html.
docs: $(VENV)/tools
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build site *.egg-info
