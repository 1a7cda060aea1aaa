# Two commands, each complete on a fresh Debian or Ubuntu machine with Python 3.11 or later: `make quickstart`, `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MEMBERS := core $(sort $(dir $(wildcard plugins/*/pyproject.toml plugins_sandbox/*/pyproject.toml plugins_models/*/pyproject.toml)))
STAMP := $(VENV)/.installed
JOBS ?= 2

.PHONY: quickstart test test-full lint system system-test clean
quickstart: $(STAMP) system
	$(BIN)/rlcore train quickstart $(ARGS)

test: $(STAMP) system-test lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" --cov=rlcore --cov-report=term:skip-covered $(ARGS)

test-full: $(STAMP) system-test lint
	OMP_NUM_THREADS=1 HYPOTHESIS_PROFILE=full $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# One idempotent target installs every member, editable; it runs again when a member's pyproject.toml changes.
$(STAMP): constraints.txt tools/dev-requirements.txt $(addsuffix pyproject.toml,$(addsuffix /,$(patsubst %/,%,$(MEMBERS)))) tools/install.sh
	PYTHON=$(PYTHON) sh tools/install.sh $(VENV) $(MEMBERS)
	touch $@

# Packages of the system: bubblewrap for local sandboxes. Installed where root may, named where not.
system:
	@sh tools/system-packages.sh

# What the tests need besides: a Docker engine and a static busybox; `make test SKIP_DOCKER=1` does without.
system-test:
	@sh tools/system-packages.sh test

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
