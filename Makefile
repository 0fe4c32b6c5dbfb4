# Two commands do all on a machine with Python 3.11, pip and make: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: lock demo test test-integrations test-slow check bench results results-continue examples docs docs-version wheel clean

# Everything by hash from requirements.lock; then torch, whose build differs by machine; then this project itself.
$(STAMP): pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --require-hashes --no-deps -r requirements.lock
	$(PIP) install -c constraints.txt torch
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $(STAMP)

LOCKED := --python-version 3.11 --generate-hashes --no-emit-package torch --no-emit-find-links --no-header --no-annotate --quiet

lock:                     ## make both lock files anew, where torch is a CPU build (needs uv)
	uv pip compile pyproject.toml --extra lab --extra dev --extra opponents --extra sklearn --constraints constraints.txt $(LOCKED) -o requirements.lock
	grep -o '^[^ ]*==[^ ]*' requirements.lock > .pinned.txt
	uv pip compile pyproject.toml --extra integrations --constraints constraints.txt --constraints .pinned.txt $(LOCKED) -o requirements-integrations.lock
	rm .pinned.txt

demo: $(STAMP)            ## learn a map, SHF against tuned Adam and Schedule-Free, and write a report
	$(BIN)/shf demo

test: $(STAMP)            ## the test suite, in two processes
	$(BIN)/python -m pytest -n 2 --dist loadgroup

# The frameworks, by hash, in the same environment; torch stays as it is, and nothing of CUDA comes with them.
$(VENV)/.integrations: $(STAMP) requirements-integrations.lock
	$(PIP) install --require-hashes --no-deps -r requirements-integrations.lock
	touch $@

test-integrations: $(VENV)/.integrations ## the adapters, against the real packages
	$(BIN)/python tools/supply.py locked requirements-integrations.lock
	SHF_INTEGRATIONS=1 $(BIN)/python -m pytest tests/integrations

test-slow: $(STAMP)       ## the tests that take minutes
	$(BIN)/python -m pytest -m slow --timeout 3600

check: $(STAMP)           ## lint, types, docs, dependencies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python tools/supply.py locked
	$(BIN)/python tools/supply.py audit
	$(BIN)/pip-licenses --from=mixed --order=license --partial-match --fail-on='GNU General Public;GPL-;GPLv' --ignore-packages deepxde # LGPL; only the tests of its adapter have it

bench: $(STAMP)           ## the speed benchmarks: JSON, table, plot
	$(BIN)/shf bench

results: $(STAMP)         ## docs/results.md and its figures from the records
	$(BIN)/python -m shf.lab.rerun draw

results-continue: $(STAMP) ## the paper's experiments: takes the queue up where it was
	$(BIN)/python -m shf.lab.rerun continue

examples: $(STAMP)        ## the full runs of the examples: hours; those that are recorded are not made again
	$(BIN)/python examples/longterm.py --T 50 --seconds 600 --tune 60 --points 120 --only shf adam --seed 0 1 2 --out results/examples
	$(BIN)/python examples/longterm.py --T 100 200 --seconds 600 --tune 30 --points 120 --only shf adam --out results/examples
	$(BIN)/python examples/longterm.py --T 50 --seconds 100 --points 20 --only shf-without --seed 0 1 2 --out results/examples
	$(BIN)/python examples/longterm.py --T 50 --seconds 100 --points 20 --only shf-own-batch --tasks order --seed 0 1 2 --out results/examples
	$(BIN)/python examples/cnn.py --seconds 120 --tune 10 --points 12 --seed 0 1 2 --out results/examples
	$(BIN)/python examples/characters.py --seconds 120 --tune 15 --points 12 --seed 0 1 2 --out results/examples
	$(BIN)/python examples/expressions.py --seconds 60 --seed 0 1 2 --out results/examples
	$(BIN)/python examples/finetune.py --seconds 20 --tune 5 --points 10 --seed 0 1 2 --out results/examples
	$(BIN)/python examples/report.py

docs: $(STAMP)            ## serve the documentation locally
	$(BIN)/mkdocs serve

docs-version: $(STAMP)    ## this version's pages on the branch gh-pages, beside those of other versions: make docs-version VERSION=v0.2.0
	$(PIP) install 'mike>=2.1,<3'
	$(BIN)/mike deploy --update-aliases $(VERSION) $(if $(filter v%,$(VERSION)),latest,)

wheel: $(STAMP)           ## sdist and wheel, tried in an empty environment
	$(BIN)/python tools/wheel.py --tests

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache
