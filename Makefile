# Needs Python 3.11 or newer (with venv and pip), git and GNU make; the rest goes into .venv.
# `make help` lists the targets.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LOCK_VENV := .lock-venv
PIP := -m pip --disable-pip-version-check --no-input -qq

# The first of these that is new enough; `make PYTHON=/path/to/python` overrides the choice.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c '$(NEW_ENOUGH)' >/dev/null 2>&1 && { echo "$$p"; break; }; done)

TYPED := $(wildcard aiosched adapters examples)
LINTED := $(TYPED) $(wildcard tests)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check lock clean python

help:
	@echo 'make demo    run the demonstration        (ARGS="..." is passed on)'
	@echo 'make test    run the tests                (ARGS="-k name" is passed on to pytest)'
	@echo 'make check   lint, format check and types (ruff, mypy --strict)'
	@echo 'make lock    pin the newest dependencies that pyproject.toml allows'
	@echo 'make clean   remove caches and build output; .venv stays'
	@echo
	@echo 'The first run makes .venv and installs requirements.lock; later runs install nothing.'

demo: $(INSTALLED)
	@$(BIN)/aiosched demo $(ARGS)

test: $(INSTALLED)
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/mypy $(TYPED)

# The build backend is in the lock, so that the second install needs no network.
$(INSTALLED): requirements.lock pyproject.toml | $(BIN)/python
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
		echo 'make: $(VENV) has no pip; remove it (rm -rf $(VENV)) and run make again.' >&2; exit 1; }
	@echo 'Installing requirements.lock into $(VENV) (once, a few minutes) ...'
	@$(BIN)/python $(PIP) install -r requirements.lock
	@$(BIN)/python $(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

$(BIN)/python:
	@$(MAKE) --no-print-directory python
	@$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }

# Says in one line what is wrong with the Python found.
python:
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { \
		echo 'make: no Python 3.11 or newer found; install one, or name it: make PYTHON=/path/to/python3.11' >&2; \
		exit 1; }
	@"$(PYTHON)" -c '$(NEW_ENOUGH)' || { \
		echo 'make: $(PYTHON) is too old; Python 3.11 or newer is needed.' >&2; exit 1; }
	@"$(PYTHON)" -c 'import venv' >/dev/null 2>&1 || { \
		echo 'make: $(PYTHON) has no venv module; on Debian and Ubuntu install python3-venv.' >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip' >/dev/null 2>&1 || { \
		echo 'make: $(PYTHON) has no ensurepip, so no pip in a venv; on Debian and Ubuntu install python3-venv.' >&2; \
		exit 1; }

# CUDA libraries and triton are left out: torch names the ones it needs on each platform. A local
# version (+cpu, +cu130) says which build this machine has, which is not the lock's business.
lock: python
	@rm -rf $(LOCK_VENV)
	@$(PYTHON) -m venv $(LOCK_VENV)
	@$(LOCK_VENV)/bin/python $(PIP) install '.[dev]' 'setuptools>=77'
	@{ sed -n '/^#/p' requirements.lock; \
		$(LOCK_VENV)/bin/python -m pip freeze --all --exclude pip --exclude wheel --exclude aiosched-engine \
		| grep -Eiv '^(nvidia|cuda|triton)[-_a-z0-9]*==' \
		| sed -E 's/\+[A-Za-z0-9.]+$$//; s/^(uvloop==.*)/\1 ; sys_platform != "win32"/'; \
	} > requirements.lock.new
	@grep -q '^torch==' requirements.lock.new
	@mv requirements.lock.new requirements.lock
	@rm -rf $(LOCK_VENV) build

clean:
	@rm -rf build dist *.egg-info .coverage .coverage.* coverage.xml htmlcov
	@rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache $(LOCK_VENV) requirements.lock.new
	@find $(LINTED) -type d -name __pycache__ -prune -exec rm -rf {} +
