# Every target makes .venv itself, with the versions of constraints.txt; a second call is instant.
# PYTHON chooses the interpreter, PIP_FLAGS adds to pip (an index with CPU-only torch, for example).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo bench-full test test-slow lint clean help

help:
	@echo "make install     make .venv and install dreams-nas into it"
	@echo "make demo        the whole loop on the embedded target -> runs/demo (minutes)"
	@echo "make bench-full  the long comparison -> runs/bench-full"
	@echo "make test        fast tests; make test-slow: the slow ones"
	@echo "make lint        ruff and mypy"
	@echo "make clean       remove .venv and caches; runs/ stays"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no python3 found; install Python 3.11 or newer, or set PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) does not run or is older than Python 3.11; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); echo "make: $(PYTHON) cannot make $(VENV); on Debian and Ubuntu the package python3-venv is missing" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev]' || { echo "make: installing into $(VENV) failed (reason above); after fixing it run make again, or make clean first" >&2; exit 1; }
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/dreams-nas demo --out runs/demo

bench-full: $(STAMP)
	$(BIN)/dreams-nas demo --full --out runs/bench-full

test: $(STAMP)
	$(BIN)/python -m pytest

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
