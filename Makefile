# `make demo` and `make test` both work as the first command after a clone. They need Python 3.11 or newer, and make.
PYTHON ?= python3
TESTARGS ?=
VERSION ?= newest

VENV := .venv
BIN := $(VENV)/bin
PINS := -c constraints.txt
REQUIREMENTS := -e ".[dev]"
# Python compiles a file at its first import, if it may keep the result. pip would take most of a minute to compile all.
LAZY := $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(LAZY) $(PINS)
STAMP := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)
TRANSFORMERS_PIN := $(shell sed -n 's/^transformers==//p' constraints.txt)
OLDEST := $(shell sed -n 's/.*"transformers>=\(.*\)".*/\1/p' pyproject.toml)
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: help demo test test-upstream test-transformers test-edges lint clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    compare plain and speculative decoding with the default model"
	@echo "make test    run the tests; choose others with TESTARGS, e.g. make test TESTARGS=\"-m slow\""
	@echo "make test-upstream TRANSFORMERS=FOLDER    run transformers' own tests of generation through speculate"
	@echo "make test-transformers VERSION=oldest|newest|5.20.0    run the tests of what transformers may change"
	@echo "make lint    run ruff and mypy"
	@echo "make clean   remove the virtual environment and all caches in this folder"
	@echo "The first command creates $(VENV) with $(PYTHON); choose another: make test PYTHON=python3.12"

demo: $(STAMP)
	@$(BIN)/python scripts/demo.py

# One process for each core, with one thread each: the tests' models are too small for more threads.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal
test: $(STAMP)
	@$(PYTEST) $(TESTARGS)

# FOLDER is a checkout of transformers' repository. Takes ten minutes; not part of `make test`.
test-upstream: $(STAMP)
	@$(PIP) --quiet parameterized pytest-timeout timeout-decorator httpx
	@$(BIN)/python tests/upstream/run.py "$(TRANSFORMERS)" $(TESTARGS)

# In an environment of its own, made anew, where torch alone is pinned: with the oldest transformers that pyproject.toml
# takes, the newest that the index has, or another release.
test-transformers:
	@rm -rf $(VENV)-$(VERSION)
	@$(MAKE) --no-print-directory test-edges VENV=$(VENV)-$(VERSION) PINS= \
		REQUIREMENTS='-e ".[dev]" $(if $(filter newest,$(VERSION)),,transformers==$(VERSION:oldest=$(OLDEST)))'

EDGES := tests/decode/hf tests/decode/cpu/test_packed_experts.py \
	$(addprefix tests/decode/models/test_,architectures.py compatibility.py default_model.py loading.py \
	transformers_versions.py) $(addprefix tests/heads/test_,jump.py mtp.py written_checkpoint.py) tests/test_docs.py
test-edges: $(STAMP)
	@found=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("transformers"))'); \
	[ "$$found" != "$(TRANSFORMERS_PIN)" ] || pinned=", the pinned one, with the newest of all other packages"; \
	echo "testing with transformers $$found$$pinned"; \
	$(PYTEST) -m "not gpu" $(EDGES) $(TESTARGS) || { echo "the tests above fail with transformers $$found"; exit 1; }

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

clean:
	rm -rf $(VENV) $(VENV)-* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is not Python 3.11 or newer; choose one that is: make PYTHON=python3.12 ..."; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"; exit 1; }

# The CPU build of torch is a tenth of the size. pip looks for it in its own index first, then in torch's.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/pip
	@$(PIP) --quiet --upgrade pip
	@echo "installing torch into $(VENV) (200 MB for a CPU, more for a GPU)"
	@if [ "$$(uname)" = Darwin ] || nvidia-smi >/dev/null 2>&1; then \
		$(PIP) "$(TORCH)"; \
	else \
		$(PIP) "$(TORCH)+cpu" 2>/dev/null || $(PIP) "$(TORCH)" --index-url $(TORCH_CPU_INDEX) --retries 1 || \
			$(PIP) "$(TORCH)"; \
	fi
	@echo "installing draftless and its other requirements into $(VENV) (80 MB, a minute)"
	@PYTHONWARNINGS=ignore $(PIP) --quiet $(REQUIREMENTS)
	@touch $@
