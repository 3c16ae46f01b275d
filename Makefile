# Two commands do everything: `make train` (the main job) and `make test` (all default tests).
# Every target makes and reuses .venv; nothing but Python 3.11 or newer is assumed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU build for development: the unpinned package would bring gigabytes of CUDA libraries.
TORCH := torch==2.13.0
OUT ?= runs/tiny

.PHONY: train test test-slow check format bench gpu docs clean

$(VENV)/ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

train: $(VENV)/ready
	$(BIN)/moemesh train --set plan.tp=2 --set plan.dp=2 --set plan.ep=4 --out $(OUT)

test: $(VENV)/ready
	$(BIN)/python -m pytest

test-slow: $(VENV)/ready
	$(BIN)/python -m pytest -m slow

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright -p .
	$(BIN)/lint-imports

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/ready
	$(BIN)/moemesh bench layer

# On a machine with GPUs and a CUDA build of torch in $(GPU_PYTHON): all that was never run on one,
# into one file to send back (docs/gpu.md, tests/gpu_session.py). Goes on behind a failure.
GPU_PYTHON ?= $(PYTHON)
GPU_REPORT ?= gpu-report.txt
gpu:
	$(GPU_PYTHON) -m tests.gpu_session $(GPU_REPORT)

# The documentation as a site, without a network: open site/index.html.
docs: $(VENV)/ready
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build site *.egg-info
