# Every target makes its environment first; a second call finds it made.
#
#   make train                       a DLRM that touches ten times as many rows as its cache holds
#   make test                        lint, types, tests
#   make docs                        the documentation, into site/
#   make campaign SEED=7             everything, slow tests too, with many more random cases
#   make chaos RUNS=60               kills, stops and cuts off trainers, launchers and nodes: no bit may change
#   make test-gpu PY=python3         the tests that need a GPU, here with an interpreter that has torch for CUDA

SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: train test tests campaign chaos test-gpu lint style types format docs golden clean

# Without compiled sources each process would compile them again, and pytest its rewritten asserts: 10 s of CPU a process.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
PY := $(VENV)/bin/python
DEV := $(VENV)/.dev
OTHERS := $(VENV)/.others
# One test process more than cores, for the waits of others, eight at most; `make test JOBS=0` runs in one process, to debug.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 7 ? n + 1 : 8)))
SEED ?= $(shell date +%s)
RUNS ?= 22
# Under a minute, also where cores are busy: a second thread would wait for the first more than it helps so small a model.
# A share of the touched rows: in that time the run touches 3% of its 33.8 million.
TRAIN ?= synthetic:criteo-kaggle --model dlrm-tiny --dim 16 --batch 1024 --steps 400 --threads 1 --cache touched:10%

# torch is asked for by its version: of a bare name pip may take a build with gigabytes of CUDA libraries.
$(DEV): pyproject.toml constraints/dev.txt
	python3 -m venv $(VENV)
	$(PY) -m pip install --quiet -c constraints/dev.txt "$$(grep ^torch== constraints/dev.txt)" -e '.[dev]'
	touch $@

$(OTHERS): $(DEV) constraints/others.txt
	$(PY) -m pip install --quiet --no-deps -r constraints/others.txt
	touch $@

train: $(DEV)
	$(VENV)/bin/skirl train $(TRAIN)

# Tests write thousands of small files, which a file system in memory takes in a seventh of the time; a campaign writes to disk.
IN_MEMORY = $(shell [ -w /dev/shm ] && [ $$(df --output=avail /dev/shm | tail -1) -gt 8000000 ] && echo /dev/shm)

# Types take one core for a minute, in which the other one collects tests and compiles kernels.
test: $(OTHERS)
	$(MAKE) style
	$(MAKE) --jobs=2 types tests

tests: $(OTHERS)
	TMPDIR=$${TMPDIR:-$(or $(IN_MEMORY),/tmp)} $(PY) -m pytest -n $(JOBS) --dist worksteal --durations 20

campaign: $(OTHERS)
	$(PY) -m pytest -n $(JOBS) --dist worksteal -m "not gpu" --timeout 0 --hypothesis-profile campaign --hypothesis-seed $(SEED)

chaos: $(DEV)
	SKIRL_CHAOS=$(RUNS) $(PY) -m pytest -m slow -n $(JOBS) --timeout 0 --hypothesis-seed $(SEED) tests/chaos

test-gpu: $(if $(filter $(VENV)/%,$(PY)),$(DEV))
	TRITON_INTERPRET=0 PYTHONPATH=src $(PY) -m pytest tests -m gpu --timeout 1800

lint: style types

style: $(DEV)
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(VENV)/bin/lint-imports --no-cache

# Room for what is young spares node's garbage collector a tenth of its work.
types: $(DEV)
	NODE_OPTIONS=--max-semi-space-size=128 $(PY) -m pyright

format: $(DEV)
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# Only after a change that is numeric on purpose: CONTRIBUTING.md.
golden: $(DEV)
	$(PY) -m pytest -k golden --record-golden

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
