# Two commands do everything on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: serve test lint types format check install install-dev clean help

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (once; torch is the largest part)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . --group dev
	@touch $@

install: $(VENV)/.installed ## make .venv with the server in it

install-dev: $(VENV)/.installed-dev ## the same with test and lint tools

serve: install ## serve the embedded default model on 127.0.0.1:8000 (ARGS="--port 9000 ...")
	@exec $(BIN)/atom-async serve $(ARGS)

test: install-dev ## run the test suite (ARGS="tests/cache -k evict")
	$(BIN)/python -m atom_async.cli models fetch default
	$(BIN)/python -m pytest $(ARGS)

lint: install-dev ## ruff: lint and format check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install-dev ## mypy
	$(BIN)/mypy

format: install-dev ## rewrite in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint types test ## everything CI runs

clean:
	rm -rf $(VENV) build *.egg-info
