# Every target sets up all that it needs, in .venv, and repeats nothing that is already done.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
CLIENTS := .venv-clients
NATIVE := $(wildcard native/*/*)
RANKS ?= 2
# The torch that development uses, and the oldest that is supported: wheels are tried with both.
TORCH ?= 2.13.0 2.11.0
# Tests at once: most of them wait for processes of their own most of the time.
JOBS ?= 4
# Tests start many interpreters: none compiles again what another has.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-accelerator test-clients test-gpu test-hosts test-long test-ranks lint types unit crash soak sanitize bench wheels \
	test-wheels release site setup clean

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
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations=10 test

# Every case of the tests of which "make test" runs a sample.
test-long: setup
	ZERO_OPT_TESTS=long $(BIN)/python -m pytest -n $(JOBS) --dist worksteal test

# Training programs of others, which need packages that nothing else does: in an environment of their own.
test-clients: $(CLIENTS)/.installed setup
	@echo "== pytest test/clients"
	$(CLIENTS)/bin/python -m pytest test/clients

# On a machine with a CUDA GPU; NCCL between ranks needs two. SANITIZE=1: under torch's sanitizer of streams, which raises
# an error where one stream reads what another still writes. GPU_ARGS: more for pytest, as GPU_ARGS="-k graphs".
test-gpu: setup
	@echo "== pytest test/gpu"
	$(if $(SANITIZE),TORCH_CUDA_SANITIZER=1) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -rfE test/gpu $(GPU_ARGS)

# What the tests show of crashes, in full: about ten minutes.
crash: setup
	ZERO_OPT_CRASH=long $(BIN)/python -m pytest -s test/crash

# Every case on the simulated accelerator with 20 seeds of delays, at one place after the other.
test-accelerator: setup
	ZERO_OPT_ACCELERATOR=long $(BIN)/python -m pytest -n $(JOBS) --dist worksteal test/accelerator

# Ranks on hosts that are namespaces, in all layouts, over networks with all faults, and with connections' default
# timeouts: takes a quarter of an hour. Needs root.
test-hosts: setup
	ZERO_OPT_HOSTS=long $(BIN)/python -m pytest test/hosts

# 256 ranks of one host, each with 1,024 descriptors at the most: takes minutes, and 7 GB of memory.
test-ranks: setup
	ZERO_OPT_RANKS=256 $(BIN)/python -m pytest -s test/whole/test_many_ranks_of_one_host.py

# An hour of training with a worker killed every 10 s, 2,000 exits of finished ranks on busy cores, and 50,000 random
# training scripts on threaded ranks.
soak: setup
	ZERO_OPT_SOAK_S=3600 ZERO_OPT_SOAK_KILL_S=10 $(BIN)/python -m pytest -s test/soak/test_soak.py
	ZERO_OPT_SOAK_EXITS=2000 ZERO_OPT_SOAK_PROGRAMS=4 $(BIN)/python -m pytest -s test/soak/test_exits.py
	ZERO_OPT_SOAK=50000 $(BIN)/python -m pytest -s test/whole/test_stateful.py

# The native code under ThreadSanitizer, AddressSanitizer and UBSan, and built by another compiler.
sanitize: setup
	$(BIN)/python -m pytest -s test/sanitize/checks.py
	ZERO_OPT_ZIG=long $(BIN)/python -m pytest -s test/native/test_dispatch.py

bench: setup
	@for script in docs/benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

# The sdist, and wheels for every CPython of this machine, x86-64 and aarch64, in dist/: takes minutes.
wheels: setup
	$(BIN)/python -m release.build dist
	$(BIN)/python -m release.audit dist

# Each of these wheels in environments that have nothing else but torch, whose builds may have several GB.
test-wheels: setup
	$(BIN)/python -m release.clean_install dist $(TORCH)

# The site, from docs/ and the docstrings, in build/site. A warning is an error.
site: setup $(VENV)/.docs
	$(BIN)/python -m sphinx -q -W --keep-going -c docs/site . build/site
	@echo "== build/site/index.html"

# All steps of a release but its upload: make release VERSION=0.1.0
release: setup
	$(PIP) twine
	$(BIN)/python -m release $(VERSION) $(TORCH)

# The extension is compiled while torch is fetched.
setup: $(VENV)/.builders
	@$(MAKE) --no-print-directory --jobs 2 $(VENV)/.tools $(VENV)/.native

$(VENV)/.builders: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel pybind11
	touch $@

$(VENV)/.native: $(VENV)/.builders $(NATIVE) zero_opt/_native.pyi setup.py setup.cfg pyproject.toml
	@echo "== build the extension"
	ZERO_OPT_NATIVE=require $(BIN)/python setup.py -q build_ext --inplace --parallel 2
	touch $@

$(VENV)/.tools: $(VENV)/.builders setup.cfg
	@echo "== install torch and the tools into $(VENV)"
	$(PIP) torch
	ZERO_OPT_NATIVE=skip $(PIP) --no-build-isolation --editable ".[dev,demo]"
	touch $@

$(VENV)/.docs: constraints.txt setup.cfg | setup
	@echo "== install the site's tools into $(VENV)"
	ZERO_OPT_NATIVE=skip $(PIP) --no-build-isolation --editable ".[docs]"
	touch $@

# The extension in the working tree is that of .native.
$(CLIENTS)/.installed: constraints.txt setup.cfg
	@echo "== install torch and the clients into $(CLIENTS)"
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --constraint constraints.txt torch setuptools wheel pybind11
	ZERO_OPT_NATIVE=skip $(CLIENTS)/bin/python -m pip install --quiet --constraint constraints.txt \
		--no-build-isolation --editable ".[clients]"
	touch $@

clean:
	rm -rf $(VENV) $(CLIENTS) build dist *.egg-info zero_opt/_native*.so
