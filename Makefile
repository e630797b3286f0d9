# On a fresh machine: `make demo`, `make test` and `make test-all`. Each sets up what it needs and may be run again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := runs/demo

# Every test that starts a command would compile the package anew where Python may not keep what it compiled.
export PYTHONDONTWRITEBYTECODE :=

# Shapes and types of every call are checked where the formulas are tested; elsewhere that would double the time.
TYPED := theodolite.theory,theodolite.accumulate,theodolite.measure
CHECKED := tests/theory tests/accumulate tests/measure
# Each process takes its half in order; one that is done takes from the other's end.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# What is used is compiled as it is first imported; all of it would take longer than the rest.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

.PHONY: demo test test-all test-browser test-gpu test-real chaos real-models real lint types docs families bench bench-gpu clean
.DEFAULT_GOAL := demo

# Two stamps: the package, which is all that the demo needs, and what its developers use. Each is made again when the
# project's own requirements change.
$(VENV)/package: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch --editable .
	touch $@

$(VENV)/developers: $(VENV)/package
	$(PIP) --editable '.[dev]'
	touch $@

demo: $(VENV)/package
	$(BIN)/theodolite survey --out $(RUN)

# Something of each feature, without the tests marked slow and without checked shapes: four minutes on two idle cores.
test: $(VENV)/developers
	$(PYTEST) -m 'not slow and not browser and not chaos and not real'

# Everything, but for what needs a GPU: eight minutes on two idle cores.
test-all: $(VENV)/developers
	$(PYTEST) -m 'not browser and not chaos and not real' $(addprefix --ignore=,$(CHECKED))
	$(PYTEST) -m 'not browser and not chaos and not real' --jaxtyping-packages=$(TYPED),beartype.beartype $(CHECKED)

# Kills and damaged files, all of them; a share is among the tests. Its counts go to docs/results/chaos.json.
chaos: $(VENV)/developers
	$(PYTEST) -m chaos
	$(BIN)/python -m tests.chaos

# Every walk through a page in Chromium; the first of each page is among the tests.
test-browser: $(VENV)/developers
	$(PYTEST) -m browser

# Skipped without a CUDA device; THEODOLITE_GPU_TESTS_ON=cpu shows there that the tests themselves work.
test-gpu: export THEODOLITE_GPU_TESTS_ON ?= cuda
test-gpu: $(VENV)/developers
	$(BIN)/python -m pytest -m gpu tests/gpu

# SmolLM2, Gemma 3 270M and MiniLM, 420 MB, into ~/.cache/theodolite/real-models or $$THEODOLITE_REAL_MODELS.
real-models:
	$(PYTHON) -m tools.real_models

# The three papers judged on them, an hour and a half on two idle cores: docs/results/real and the gallery. A stopped run
# goes on; beside the models, real-results has its folders.
real: $(VENV)/developers
	$(BIN)/python -m tools.real_results

# What is tested on real models.
test-real: $(VENV)/developers real-models
	$(PYTEST) -m real

lint: $(VENV)/developers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/developers
	$(BIN)/mypy

# Never with --quiet: it takes the warnings away that --strict counts.
docs: $(VENV)/developers
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict

# Every text family of transformers, small: writes docs/results/families.json, and goes through the tests of families with
# all of them, which the full run does with twenty.
families: $(VENV)/developers
	$(BIN)/python -m tools.measured_families
	$(PYTEST) --all-families tests

bench: $(VENV)/developers
	$(BIN)/python -m benchmarks

# Writes benchmarks/results/<device>.json, which the site's page on large models shows.
bench-gpu: $(VENV)/developers
	$(BIN)/python -m benchmarks --device cuda --out benchmarks/results

# Not runs/: results are their owner's.
clean:
	rm -rf $(VENV) build dist site theodolite.egg-info
