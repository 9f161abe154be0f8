# Every target sets up all that it needs, in .venv, and repeats nothing that is already done.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
NATIVE := $(wildcard native/*)
RANKS ?= 2

.PHONY: demo test lint types unit crash sanitize bench setup clean

demo: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node=$(RANKS) \
		docs/examples/train_text.py

test: lint types unit

lint: setup
	@echo "== ruff"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo "== import contracts"
	PYTHONPATH=. $(BIN)/lint-imports
	@echo "== size limits and reserved names"
	$(BIN)/python test/lint/rules.py

types: setup
	@echo "== mypy"
	$(BIN)/mypy --strict zero_opt

unit: setup
	@echo "== pytest"
	$(BIN)/python -m pytest test

# What the tests show of crashes, in full: about ten minutes.
crash: setup
	ZERO_OPT_CRASH=long $(BIN)/python -m pytest -s test/crash

# The native code under ThreadSanitizer, AddressSanitizer and UBSan.
sanitize: setup
	$(BIN)/python -m pytest -s test/sanitize/checks.py

bench: setup
	@for script in docs/benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

setup: $(VENV)/.built

$(VENV)/.tools: constraints.txt setup.cfg
	@echo "== install torch and the tools into $(VENV)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch setuptools wheel pybind11
	touch $@

$(VENV)/.built: $(VENV)/.tools $(NATIVE) setup.py setup.cfg pyproject.toml
	@echo "== build the extension and install zero_opt, editable"
	ZERO_OPT_NATIVE=require $(PIP) --no-build-isolation --editable ".[dev,demo]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info zero_opt/_native*.so
