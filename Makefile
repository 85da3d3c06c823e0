# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COVERED := src/fedecho/core/*,src/fedecho/algorithms/*,src/fedecho/distill/*,src/fedecho/simulation/*

.PHONY: demo test lint install format docs bench clean

demo: $(STAMP)  ## FedBuff, FADAS and FedEcho on the embedded digits, three seeds, then a table
	$(BIN)/fedecho compare digits --algorithms fedbuff,fadas,fedecho --seeds 0,1,2 --out runs/demo

test: lint  ## everything that must hold
	rm -f .coverage .coverage.*
	$(BIN)/python -m pytest --cov --cov-report=
	$(BIN)/coverage report --skip-covered --include='$(COVERED)' --fail-under=95

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(STAMP)  ## the site, into site/; every warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

bench: $(STAMP)  ## what the simulator costs beside a bare training loop, what logging costs, how long a report takes
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.logging_cost
	$(BIN)/python -m benchmarks.report_time

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fedecho needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "this Python has no venv: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*
