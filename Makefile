# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := $(VENV)/.installed-demo
WORKERS ?= 2
COVERED := src/fedecho/core/*,src/fedecho/storage/*,src/fedecho/algorithms/*,src/fedecho/distill/*,src/fedecho/simulation/*,src/fedecho/executors/*,src/fedecho/flower/*

.PHONY: demo test test-all network lint install format docs bench peers durability audit lock clean

demo: $(DEMO)  ## FedAvg, FedBuff, FedEcho and FedEcho+ where only stragglers hold two of the ten digits: a table and a page
	$(BIN)/fedecho compare stragglers --algorithms fedavg,fedbuff,fedecho,fedecho+ --seeds 0 --jobs 2 --out runs/demo
	$(BIN)/fedecho report runs/demo

# One thread for each worker: torch takes all cores by default, which is slower and rounds otherwise.
TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

test: lint  ## what must hold at every change
	rm -f .coverage .coverage.*
	$(TESTS) --dist worksteal --cov --cov-report=
	$(BIN)/coverage report --skip-covered --include='$(COVERED)' --fail-under=95

test-all: lint  ## everything but `make network`: Ray, kernels compiled and interpreted, the peers' race, benchmarks, long repetitions
	$(TESTS) --dist loadfile -m 'not network' --hypothesis-profile long

network: $(STAMP)  ## real Flower processes on this machine: six nodes, TLS and keys, chaos, Flower's quickstart app and simulation engine, a Ray cluster; minutes each
	$(BIN)/python -m pytest -m network -s

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(STAMP)  ## the site, into site/; every warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP)  ## the simulator beside a bare training loop, a job by executor, logging, a report's time, the persistent worker
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.ray_jobs --jobs 60
	$(BIN)/python -m benchmarks.logging_cost
	$(BIN)/python -m benchmarks.report_time
	$(BIN)/python -m benchmarks.flower_roundtrip

peers: $(STAMP)  ## the same job on five other simulators, each in an environment of its own: an hour, and a network to install them
	$(BIN)/python -m benchmarks.peers.install
	$(BIN)/python -m benchmarks.peers.race
	$(BIN)/python -m benchmarks.peers.table

durability: $(STAMP)  ## 200 runs killed, 50 full disks, 100,000 mutated updates, an hour of traffic: some ten minutes
	$(BIN)/python -m benchmarks.crash --num 200 --disk-full 50
	$(BIN)/python -m benchmarks.fuzz --num 100000
	$(BIN)/python -m benchmarks.soak --out runs/soak

audit: $(STAMP)  ## known vulnerabilities of the pinned versions, where somebody can be asked
	.ci/audit $(BIN)/python

lock: $(STAMP)  ## constraints-hashes.txt from constraints.txt
	$(BIN)/python .ci/lock.py

install: $(STAMP)

$(DEMO): EXTRA := report
$(STAMP): EXTRA := dev
$(DEMO) $(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fedecho needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "this Python has no venv: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRA)]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*
