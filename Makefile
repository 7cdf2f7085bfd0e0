# `make demo` and `make test` set up everything on a fresh machine; see the README.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-fast test-slow check format bench mpi clean

demo: $(STAMP)
	$(BIN)/ringspan simulate

# Tests that start processes of their own share one worker, so that no more than that many run at once.
PYTEST := $(BIN)/pytest -n 2 --dist loadgroup

# The edit loop: everything without torch, and the smallest cut of the numerics.
FAST := tests/unit tests/architecture/test_imports.py \
	$(addprefix tests/numerics/test_, attention.py contract.py softmax.py wire.py)

test-fast: $(STAMP)
	$(PYTEST) -m 'not slow and not wide' $(FAST)

test: $(STAMP)
	$(PYTEST) -m 'not slow'

test-slow: $(STAMP)
	$(PYTEST) -m slow

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python benchmarks/simulate_speed.py

# For the tests of the MPI transport; needs an MPI library, such as Debian's openmpi-bin.
mpi: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints/cpu.txt -e '.[mpi]'

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# The stamp is written last, so an interrupted installation is done again.
$(STAMP): pyproject.toml constraints/cpu.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ringspan needs Python 3.11 or newer; set PYTHON=…")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints/cpu.txt -e '.[torch,transformers,serve,test,check]'
	touch $@
