# Two commands do all on a machine with Python 3.11, pip and make: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test test-slow check bench results results-continue docs clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[lab,dev]'
	touch $(STAMP)

demo: $(STAMP)            ## train on generated curves, SHF against tuned Adam and NAG, and write a report
	$(BIN)/shf demo

test: $(STAMP)            ## the test suite
	$(BIN)/python -m pytest

test-slow: $(STAMP)       ## the tests that take minutes
	$(BIN)/python -m pytest -m slow --timeout 3600

check: $(STAMP)           ## lint, types, docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mkdocs build --strict --quiet

bench: $(STAMP)           ## the speed benchmarks: JSON, table, plot
	$(BIN)/shf bench

results: $(STAMP)         ## docs/results.md and its figures from the records
	$(BIN)/python -m shf.lab.rerun draw

results-continue: $(STAMP) ## the paper's experiments: takes the queue up where it was
	$(BIN)/python -m shf.lab.rerun continue

docs: $(STAMP)            ## serve the documentation locally
	$(BIN)/mkdocs serve

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache
