# The commands people type. Needs make and Python 3.11 or newer; everything else goes into .venv.
# The plain commands beneath each target are in README.md.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help run test test-sqlite test-postgresql lint bench clean
MAKEFLAGS += --no-print-directory

# The first interpreter that runs, is new enough, and can make environments: a name on the PATH may be a dead shim.
# PYTHON=/path/to/python chooses another one.
PYTHON ?= $(shell for name in python3.13 python3.12 python3.11 python3 python; do \
	"$$name" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { echo "$$name"; break; }; done)

BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
PORT ?= 8000
PYTEST_ARGS ?=

help:
	@echo "make run     start the console at http://127.0.0.1:$(PORT) (SQLite, no other service); PORT=8001 chooses another port"
	@echo "make test    the whole test suite, on SQLite and on PostgreSQL at the same time"
	@echo "make lint    ruff, mypy, import rules, missing migrations"
	@echo "make bench   the benchmarks"
	@echo "make clean   remove what these commands made, but not the data in var/"

# Each stamp is renewed when pyproject.toml changes, and only then: a second "make run" installs nothing.
.venv/installed: pyproject.toml .venv/pyvenv.cfg
	@$(PIP) --editable . && touch $@

.venv/installed-dev: pyproject.toml .venv/pyvenv.cfg
	@$(PIP) --editable '.[dev]' && touch $@ .venv/installed

.venv/installed-bench: pyproject.toml .venv/pyvenv.cfg
	@$(PIP) --editable '.[dev,bench]' && touch $@ .venv/installed-dev .venv/installed

# An environment whose interpreter has gone, say after an upgrade of the system, is made anew.
ifneq ($(shell $(BIN)/python -c '' >/dev/null 2>&1 && echo runs),runs)
.PHONY: .venv/pyvenv.cfg
endif

.venv/pyvenv.cfg:
	@test -w . || { echo "This folder is read-only: copy it to where .venv and var may be written." >&2; exit 1; }
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, with its venv module; python3 here says:" \
		"$$(python3 --version 2>&1 || true)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
		|| { echo "$(PYTHON) is no Python 3.11 or newer with a venv module." >&2; exit 1; }
	@echo "installing into .venv (once; this takes a minute or two)"
	@$(PYTHON) -m venv --clear .venv

run: .venv/installed
	@exec $(BIN)/python manage.py up --port $(PORT)

# Both at the same time, because a run waits more than it computes; says how each ended.
test: .venv/installed-dev
	@exec $(BIN)/python -m tests $(PYTEST_ARGS)

test-sqlite: .venv/installed-dev
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-postgresql: .venv/installed-dev
	@$(BIN)/python -m pytest --database postgresql $(PYTEST_ARGS)

lint: .venv/installed-dev
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy --no-error-summary
	@report=$$($(BIN)/lint-imports --no-cache 2>&1) || { echo "$$report"; exit 1; }
	@report=$$($(BIN)/python manage.py makemigrations --check --dry-run 2>&1) || { echo "$$report"; exit 1; }
	@echo "lint: nothing to complain about"

bench: .venv/installed-bench
	@$(BIN)/python -m benchmarks

# var/ stays: it holds the data of "make run".
clean:
	@rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
