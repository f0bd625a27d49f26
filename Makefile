# The commands of a newcomer and of CI. Everything lives in .venv; a second run reinstalls nothing.
#   make demo PYTHON=python3.12          another interpreter
#   make demo INSTALL_FLAGS=--torch-cuda keep the index's CUDA build of torch

PYTHON ?= python3
INSTALL_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
# The operators are compiled when the package is installed.
INPUTS := pyproject.toml hatch_build.py tools/install.py $(wildcard $(foreach part,*.cpp *.h */*.cpp */*.h build.py,runtime/operators/$(part)))
INPUTS += $(if $(wildcard runtime/specexport_runtime/_operators.*),,no-library)

# Two workers on two cores: one thread each, or they fight. Compiled modules are kept, for tests start many processes.
TEST_ENV := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --durations=10

.DEFAULT_GOAL := help
.PHONY: no-library help install demo test test-long test-all test-annex check mutants fuzz audit bench-kernels lint format docs clean distclean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

install: $(VENV)/.installed-demo ## make .venv and install what is needed to build and run bundles

demo: $(VENV)/.installed-demo ## install, build the demo bundle, generate with and without speculation
	@$(BIN)/specexport demo

test: $(VENV)/.installed-dev ## install and run the tests that every change runs
	$(TEST_ENV) $(PYTEST) -m "not whole and not annex" $(PYTEST_ARGS)

test-long: $(VENV)/.installed-dev ## what `make test` leaves out: annexes, kernels for every GPU, wheels, mutants, the docs' commands
	$(TEST_ENV) $(PYTEST) -m "whole or annex" $(PYTEST_ARGS)

test-all: ## the whole CPU suite, one lane after the other
	$(MAKE) test
	$(MAKE) test-long

test-annex: $(VENV)/.installed-dev ## the tests of one annex: ANNEX=chat, playground, ray_serve, tools or train
	$(TEST_ENV) $(PYTEST) tests/$(or $(ANNEX),$(error say which: make test-annex ANNEX=chat)) $(PYTEST_ARGS)

check: lint ## lint, types and the tests that matter while editing: the runtime's, without bundles and drawn inputs
	$(TEST_ENV) $(PYTEST) -q -m "not slow and not fuzz and not bundle and not whole" tests/runtime tests/simulate tests/explain \
		tests/packaging/test_imports.py $(PYTEST_ARGS)

mutants: $(VENV)/.installed-dev ## mistakes in what is proven, each of which `make test` must notice
	$(TEST_ENV) $(PYTEST) tests/test_mutants.py $(PYTEST_ARGS)

# Expands once: each expansion is another number.
SEED ?= $(shell od -vAn -N4 -tu4 /dev/urandom | tr -d ' ')

fuzz: $(VENV)/.installed-dev ## property and differential tests with a random seed (SEED=n) and ten times the examples
	@seed=$(SEED); echo "seed $$seed; again: make fuzz SEED=$$seed"; \
	SPECEXPORT_FUZZ_SEED=$$seed $(TEST_ENV) $(PYTEST) -m fuzz $(PYTEST_ARGS)

audit: $(VENV)/.installed-dev ## ask PyPI for known vulnerabilities of what the images hold (docker/pins)
	$(TEST_ENV) $(PYTEST) tests/packaging/test_pins.py $(PYTEST_ARGS)

bench-kernels: $(VENV)/.installed-dev ## time the products of packed weights; KERNELS_ARGS="--against ../other --kernels avx2"
	$(BIN)/python benchmarks/kernels.py $(KERNELS_ARGS)

CPP := $(wildcard $(foreach part,*.cpp *.h,runtime/operators/$(part) tests/operators/$(part)))
# What every processor compiles: the other files give the same headers their own vectors.
CPP_TIDY := $(filter-out %_avx2.cpp %_avx512.cpp %_avxvnni.cpp %_neon.cpp,$(filter runtime/operators/%.cpp,$(CPP)))
CPP_HEADERS := echo '\#include <math.h>' | c++ -E -x c++ - >/dev/null 2>&1

lint: $(VENV)/.installed-dev ## ruff, mypy, the layers (import-linter), clang-format, clang-tidy, hadolint and the brake on growth (tools/size.py)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports --no-logo && $(BIN)/hadolint docker/*.Dockerfile
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	@if $(CPP_HEADERS); then echo clang-tidy; $(BIN)/clang-tidy --quiet $(CPP_TIDY) -- -std=c++17 -DSPECEXPORT_BUILD='""'; \
	else echo "clang-tidy is skipped: no C headers (apt-get install g++)"; fi
	$(BIN)/python tools/size.py

format: $(VENV)/.installed-dev ## let ruff fix and format, and clang-format format
	$(BIN)/ruff check --fix . && $(BIN)/ruff format . && $(BIN)/clang-format -i $(CPP)

docs: $(VENV)/.installed-docs ## build the documentation site into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo "Open build/site/index.html."

clean: ## remove built bundles and caches, keep .venv
	rm -rf engines/demo dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find specexport runtime tests tools examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## clean, and remove .venv
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("specexport needs Python 3.11 or newer, this is %d.%d. Fix: make <target> PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-demo: $(INPUTS) | $(BIN)/python
	@$(BIN)/python tools/install.py export,cpu $(INSTALL_FLAGS)
	@touch $@

$(VENV)/.installed-dev: $(INPUTS) | $(BIN)/python
	@$(BIN)/python tools/install.py export,cpu,serve,structured,ray,dev $(INSTALL_FLAGS)
	@touch $@ $(VENV)/.installed-demo

$(VENV)/.installed-docs: $(INPUTS) | $(BIN)/python
	@$(BIN)/python tools/install.py docs $(INSTALL_FLAGS)
	@touch $@
