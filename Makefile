# Two commands: `make demo` (install, let the small model talk) and `make test` (everything CI checks).
#
#   PYTHON=/path/to/python   use that environment, which has a suitable torch already; it is never replaced
#   HOST_PYTHON=python3.12   the interpreter that .venv is made from (default python3)
#   TORCH_INDEX=URL          another index for torch, e.g. https://download.pytorch.org/whl/cpu; its +cpu wheels win
#   TESTS="tests/cli -x"     what pytest runs; JOBS=2 worker processes
#   KERNEL_TESTS="..."       then, in processes of their own, GPU kernels in Triton's interpreter
# `make kernels` compiles every GPU kernel without a GPU (part of `make test` unless TESTS picks some tests).

HOST_PYTHON ?= python3
JOBS ?= 2
TESTS ?= tests
KERNEL_TESTS ?= $(wildcard tests/ops/test_triton_*.py)
export PIP_DISABLE_PIP_VERSION_CHECK = 1

ifdef PYTHON
  PY := $(PYTHON)
  STATE := build/env-$(shell printf '%s' '$(PYTHON)' | cksum | cut -d' ' -f1)
else
  PY := .venv/bin/python
  STATE := .venv/state
endif
PIP = $(PY) -m pip install -q
INSTALLED_FROM := pyproject.toml setup.py constraints.txt

.PHONY: demo test lint kernels gpu-test native clean FORCE
.DELETE_ON_ERROR:

demo: native
	@$(PY) examples/demo.py

test: $(STATE)/test-installed native lint
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) $(TESTS) --ignore-glob='*/test_triton_*.py'
	@if [ -z "$(KERNEL_TESTS)" ]; then :; elif $(PY) -c 'import triton' 2> /dev/null; then \
	  TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) $(KERNEL_TESTS); \
	else echo "make: no triton for this platform, GPU kernels are not tested"; fi
	$(if $(filter tests,$(TESTS)),$(PY) -m tools.compile_kernels --jobs $(JOBS))

lint: $(STATE)/test-installed
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -c 'from importlinter.cli import lint_imports_command as run; run()'

# Every GPU kernel compiled for sm_90a and sm_100a, without a GPU: instructions, spills (tools/compile_kernels.py).
kernels: $(STATE)/test-installed
	$(PY) -m tools.compile_kernels --jobs $(JOBS)

# On a machine with a GPU: every kernel against its reference, the goldens, the engine. `make gpu-test ARGS=--sanitize`
gpu-test:
	$(PY) tests/gpu/run.py $(ARGS)

# Does nothing when the library is current; without a C++ compiler it says so, and the reference ops run.
native: $(STATE)/installed
	@-$(PY) deepinfer/ops/native/build.py > /dev/null
	@-$(PY) deepinfer/ops/native/build_cuda.py --if-useful > /dev/null

clean:
	rm -rf .venv build dist *.egg-info deepinfer/ops/native/*.so

ifdef PYTHON
# Looked at each time, because that environment may have got another torch meanwhile.
$(STATE)/torch: FORCE
	@mkdir -p $(STATE)
	@$(PY) -m tools.pin_torch > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
FORCE:
CONSTRAINTS = $(STATE)/torch
else
$(STATE)/torch: constraints.txt
	@$(HOST_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make: DeepInfer needs Python 3.11 or later; HOST_PYTHON=... names another")'
	@echo "Making .venv and installing torch (once; a few hundred MB)"
	@test -x $(PY) || $(HOST_PYTHON) -m venv .venv
	@$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt torch
	@mkdir -p $(STATE) && touch $@
CONSTRAINTS = constraints.txt
endif

# --no-build-isolation: the C++ ops are built against the torch of this environment, no other one is downloaded.
$(STATE)/installed: $(STATE)/torch $(INSTALLED_FROM)
	@echo "Installing deepinfer and its dependencies"
	@$(PIP) -c $(CONSTRAINTS) 'setuptools>=77'
	@$(PIP) -c $(CONSTRAINTS) --no-build-isolation -e .
	@touch $@

$(STATE)/test-installed: $(STATE)/installed
	@$(PIP) -c $(CONSTRAINTS) --no-build-isolation -e '.[test]'
	@touch $@
