# demo and test need Rust 1.90, a C++ compiler and Python 3.10, or newer; everything else is installed into .venv and .nvcc.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENGINE_VERSIONS := 0.33.0 0.22.1
# Tests that also run inside vLLM's environments, on the torch that each pins.
ENGINE_TESTS := $(filter-out %_gpu.py,$(foreach family,mla kda moe nvfp4,$(wildcard tests/test_$(family)_*.py))) \
	tests/test_overlap.py tests/test_routing_bias.py tests/test_dlpack.py tests/test_torch_ops.py tests/vllm

# Plain cargo finds libpython through this Python; maturin sets it by itself.
export PYO3_PYTHON := $(abspath $(BIN)/python)
# nvcc lies apart from .venv, whose torch brings a CUDA runtime of its own.
NVCC := .nvcc
export CUDA_HOME := $(abspath $(NVCC)/nvidia/cu13)
# maturin looks for zig and the venv's Python there.
USER_PATH := $(PATH)
export PATH := $(abspath $(BIN)):$(PATH)
export VIRTUAL_ENV := $(abspath $(VENV))

SOURCES := $(shell find src kernels -type f) build.rs Cargo.toml Cargo.lock pyproject.toml

.PHONY: demo test lint wheel test-vllm gpu-check build clean
.DELETE_ON_ERROR:

demo: build
	$(BIN)/python -m vllm_hotpath doctor
	$(BIN)/python -m vllm_hotpath verify

test: build
	cargo test --quiet
	$(BIN)/python -m pytest -q

lint: build
	cargo fmt --check
	cargo clippy --quiet --all-targets -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest vllm_hotpath._core --concise

# One abi3 file for every Python from 3.10 on, linked by zig against glibc 2.28.
wheel: $(VENV)/.installed
	rm -rf dist
	$(BIN)/maturin build --quiet --release --zig --compatibility manylinux_2_28 --out dist
	ls -l dist

test-vllm: wheel $(addprefix test-vllm-,$(ENGINE_VERSIONS))

.PHONY: $(addprefix test-vllm-,$(ENGINE_VERSIONS))
$(addprefix test-vllm-,$(ENGINE_VERSIONS)): test-vllm-%: .venv-vllm-%/.installed
	$(BIN)/uv pip install --quiet --python .venv-vllm-$*/bin/python --no-deps --reinstall dist/*.whl
	# The tests see the environment of a user, not that of the build.
	env -u CUDA_HOME -u VIRTUAL_ENV -u PYO3_PYTHON PATH='$(USER_PATH)' .venv-vllm-$*/bin/python -m pytest -q $(ENGINE_TESTS)

# On a machine with a GPU: correctness, sanitizers and benchmarks, written to benchmarks/results.
# WHEEL=dist/x.whl tests that file with PYTHON, which needs torch and pytest; without it the checkout is built.
# GPUS=2 runs only what takes that many; PARTS="tests moe_router" only those parts (see benchmarks/gpu_check.py --help).
gpu-check: $(if $(WHEEL),,build)
	$(if $(WHEEL),$(PYTHON),$(BIN)/python) benchmarks/gpu_check.py $(if $(WHEEL),--wheel $(WHEEL)) \
		$(if $(GPUS),--gpus $(GPUS)) $(addprefix --part ,$(PARTS))

build: $(VENV)/.built

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "$(PYTHON) is older than 3.10: set PYTHON")'
	cargo --version
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --group dev
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target $(NVCC) --group nvcc
	touch $@

$(VENV)/.built: $(VENV)/.installed $(SOURCES)
	$(BIN)/maturin develop --quiet --release --uv
	touch $@

.venv-vllm-%/.installed: $(VENV)/.installed
	test -x .venv-vllm-$*/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python .venv-vllm-$*
	$(BIN)/uv pip install --quiet --python .venv-vllm-$*/bin/python vllm==$* 'cuda-bindings<13.4' \
		pytest pytest-timeout hypothesis tblib pip setuptools-scm setuptools-rust wheel 'setuptools<81'
	# vLLM's own tests are in its source distribution, which pip asks for its version without building it.
	rm -rf .venv-vllm-$*/upstream
	VLLM_VERSION_OVERRIDE=$* VLLM_TARGET_DEVICE=empty .venv-vllm-$*/bin/python -m pip download --quiet --no-deps \
		--no-binary vllm --no-build-isolation --dest .venv-vllm-$*/upstream vllm==$*
	tar -xzf .venv-vllm-$*/upstream/vllm-$*.tar.gz -C .venv-vllm-$*/upstream --strip-components=1 --wildcards \
		'*/tests' '*/pyproject.toml'
	rm .venv-vllm-$*/upstream/*.tar.gz
	touch $@

clean:
	rm -rf target dist $(VENV) $(NVCC) .mypy_cache .pytest_cache .ruff_cache .hypothesis $(addprefix .venv-vllm-,$(ENGINE_VERSIONS)) python/vllm_hotpath/_core*.so
