# Everything runs in the virtual environment .venv, which is made on first use, but test-clients in one of its
# own, .venv-clients, so that other projects' packages change nothing else. Nothing is installed again until
# pyproject.toml changes.
#   make demo       train a small GPT in high precision and in FP8, and compare them       (runs/demo/)
#   make test       ruff, mypy and the tests that need no GPU
#   make test-kernels  every CUDA source compiled in its variants, without spills
#   make test-clients  other projects' packages (extra clients) on fp8kit_torch and fp8kit_jax
#   make test-combinations  the tests that go through combinations of parameters, where make test runs some
#   make test-programs  the tests that run whole programs: pages' code, examples, further processes
#   make test-ranks    the tests of several processes, over Gloo on the CPU
#   make test-ranks-often  the same ROUNDS times (20), until one fails or hangs
#   make test-report   a report in a real browser: the packages chromium and chromium-driver (Debian)
#   make notebooks  the notebooks, run from top to bottom
#   make campaign   kills of savers, damaged files and odd calls, thousands of each   (some minutes)
#   make soak       twenty minutes of small trainings, whose memory must not grow
#   make docs       the documents and the API reference as a site                          (site/)
#   make test-gpu   the tests that need a GPU
#   make test-gpu2  the tests that need two GPUs
#   make bench      times of the library, its results checked                              (runs/bench.json)
#   make info       devices, versions, and what runs or is missing
#   make size       how much Python the packages are, in tokens
#   make clean      remove .venv, runs and caches

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS_VENV := .venv-clients
CLIENTS_BIN := $(CLIENTS_VENV)/bin
comma := ,
ROUNDS ?= 20

# the CUDA libraries are installed where a working NVIDIA driver is
GPU := $(if $(shell nvidia-smi -L 2>/dev/null | grep GPU),cuda13)
DEMO := $(VENV)/.installed-demo$(if $(GPU),-$(GPU))
TEST := $(VENV)/.installed-test$(if $(GPU),-$(GPU))
CLIENTS := $(CLIENTS_VENV)/.installed
DOCS := $(VENV)/.installed-docs
NOTEBOOKS := $(VENV)/.installed-notebooks

# XLA compiles the JAX tests' programs, which run for milliseconds, and is half of their time: here without
# LLVM's expensive passes, without the emitters of fused loops that set up MLIR anew for each, and in one part
XLA := --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 \
       --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false \
       --xla_cpu_parallel_codegen_split_count=1

# The tests start a hundred interpreters: bytecode is kept for them, also where the environment says
# otherwise, as those of containers do; the numbers of threads are for two tests at a time.
TESTING := PYTHONDONTWRITEBYTECODE= OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1

.PHONY: a-browser a-gpu demo test test-kernels test-clients test-combinations test-programs test-ranks \
        test-ranks-often test-report notebooks campaign soak docs test-gpu test-gpu2 bench info size clean
.DELETE_ON_ERROR:

demo: $(DEMO)
	$(BIN)/python -m fp8kit demo

# mypy, which works on one core, beside the tests' start
test: $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy & types=$$!; \
	  $(TESTING) XLA_FLAGS="$(XLA)" $(BIN)/python -m pytest -m "not gpu" -n 2 --dist worksteal; tests=$$?; \
	  wait $$types && exit $$tests

# no signal ends a kernel's source that waits for ever on the host
test-kernels: $(TEST)
	$(TESTING) $(BIN)/python -m pytest -m kernels -n 2 --timeout-method thread tests/raw_kernels

test-clients: $(CLIENTS)
	$(TESTING) XLA_FLAGS="$(XLA)" $(CLIENTS_BIN)/python -m pytest -m "clients and not gpu" -n 2 \
	  --dist loadgroup tests/adapters tests/clients

test-combinations: $(TEST)
	$(TESTING) XLA_FLAGS="$(XLA)" $(BIN)/python -m pytest -m "combinations and not gpu" -n 2 \
	  --dist worksteal

test-programs: $(TEST)
	$(TESTING) XLA_FLAGS="$(XLA)" $(BIN)/python -m pytest -m "programs and not gpu" -n 2 --dist worksteal

test-ranks: $(TEST)
	$(TESTING) $(BIN)/python -m pytest -m "programs and not gpu2" tests/commands/test_launch.py \
	  tests/nn/test_sharded_optimizer.py tests/adapters/torch/test_distributed.py \
	  tests/adapters/torch/test_tensor_parallel.py tests/adapters/torch/test_context_parallel.py \
	  tests/adapters/torch/test_mesh_checkpoint.py tests/adapters/torch/test_mesh_plans.py \
	  tests/adapters/torch/test_mesh_pipeline.py tests/adapters/torch/test_failing_ranks.py \
	  tests/adapters/jax/test_processes.py

test-ranks-often: $(TEST)
	for round in $$(seq $(ROUNDS)); do \
	  echo "$$(date) round $$round"; $(MAKE) --no-print-directory test-ranks || exit 1; \
	done

test-report: a-browser $(TEST)
	$(TESTING) $(BIN)/python -m pytest -m report tests/numerics

notebooks: $(NOTEBOOKS)
	$(TESTING) $(BIN)/python -m pytest -m notebooks -n 2 tests/notebooks

campaign: $(TEST)
	$(TESTING) $(BIN)/python -m tests.campaign

soak: $(TEST)
	$(TESTING) XLA_FLAGS="$(XLA)" $(BIN)/python -m tests.campaign.soak

# warnings are errors; the variable silences the theme's own notice about another version of mkdocs
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

a-browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	  (echo "make test-report: chromium or chromedriver is missing: apt-get install chromium chromium-driver"; \
	  exit 1)

a-gpu:
	@$(if $(GPU),true,echo "make $(MAKECMDGOALS): nvidia-smi finds no GPU" && exit 1)

test-gpu: a-gpu $(TEST)
	$(BIN)/python -m pytest -m gpu

test-gpu2: a-gpu $(TEST)
	$(BIN)/python -m pytest -m gpu2

bench: $(DEMO)
	mkdir -p runs
	$(BIN)/python -m fp8kit bench --json runs/bench.json

info: $(DEMO)
	$(BIN)/python -m fp8kit info

size: $(TEST)
	$(BIN)/python -m tests.support.size

clean:
	rm -rf $(VENV) $(CLIENTS_VENV) runs site .pytest_cache .mypy_cache .ruff_cache .hypothesis

%/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fp8kit needs Python 3.11 or newer")'
	$(PYTHON) -m venv $*

$(DEMO): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[demo$(if $(GPU),$(comma)$(GPU))]'
	@touch $@

$(TEST): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[test$(if $(GPU),$(comma)$(GPU))]'
	@touch $@

$(CLIENTS): pyproject.toml | $(CLIENTS_BIN)/python
	$(CLIENTS_BIN)/python -m pip install --quiet --editable '.[clients]'
	@touch $@

$(NOTEBOOKS): $(TEST)
	$(BIN)/python -m pip install --quiet --editable '.[notebooks]'
	@touch $@

$(DOCS): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@
