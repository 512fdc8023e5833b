# Everything a newcomer needs: Python 3.11 or later, pip and make.
#   make demo    set up, then train semantic ids from real embeddings on two workers
#   make test    set up, then run all tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Two test processes: many tests start several workers of their own.
JOBS ?= 2

export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo test test-slow coverage lint format docs bench bench-quick clean

help:
	@sed -n '2,4p' Makefile

setup: $(READY)

# torch first, pinned, so that no other package pulls in another build of it.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: setup
	$(BIN)/samestep train semantic-ids --config examples/semantic_ids.yaml --workers 2

test: setup
	$(BIN)/python -m pytest -q -n $(JOBS) -m 'not slow'

test-slow: setup
	$(BIN)/python -m pytest -q -n $(JOBS)

# Lines that the tests reach, those in workers and commands included (coverage slows the suite about twofold).
coverage: setup
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q -n $(JOBS) -m 'not slow' -p no:cacheprovider
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup
	$(BIN)/python scripts/make_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Peers of the comparisons; torch stays as it is.
$(VENV)/.bench: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/run.py

bench-quick: $(VENV)/.bench
	$(BIN)/python benchmarks/run.py --quick

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
