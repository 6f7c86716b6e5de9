# All commands for users and developers. `make demo` and `make test` also set up a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := configs/constraints.txt
EXTRAS := slurm,sims,video,lerobot,math,reasoning,search,serve,gguf,peft,dev
export PIP_CONSTRAINT := $(CURDIR)/$(CONSTRAINTS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# One thread per process, because more threads slow small models down. Idle threads must not spin.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 0
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
PYTEST := $(BIN)/python -m pytest -p no:cacheprovider
# Tests on Slurm mostly wait: one pytest worker runs them, the other one runs the rest.
WORKERS ?= 2
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help install env envs demo test test-backends test-slow test-gpu gpu-check golden docs test-browser browser renderer vulkan apptainer test-fast chaos lint format bench bench-learning equality wheel slurm-up slurm-down clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(VENV)/.installed  ## Create the Python environment in .venv

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	@echo "setting up $(VENV): two to five minutes, PyTorch first"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	# Install the pinned torch first, so that no later package replaces it with a CUDA build.
	$(BIN)/python -m pip install -q torch==2.13.0
	$(BIN)/python -m pip install -q -e '.[$(EXTRAS)]'
	touch $@

# Separate Python environments for components whose packages conflict with those of .venv; task.python,
# engine.python, engine.server_python and trainer.python select them. Each file pins all packages of
# one environment, and pip installs only these (--no-deps): unneeded dependencies are left out.
ENVS := $(if $(RLINF_ENVS),$(RLINF_ENVS),$(HOME)/.cache/rlinf/envs)
ENV_FILE = configs/environments/$(NAME).txt
# Those for GPUs (NAME-gpu) have packages for CUDA, 8 to 12 GB each, which tests do not use.
CPU_ENVS := $(filter-out %-gpu,$(basename $(notdir $(wildcard configs/environments/*.txt))))

# Hard-link torch files that several environments share, if the filesystem supports it.
SHARED = hardlink -q -c $(wildcard $(VENV)/lib/python3*/site-packages/torch) \
	  $(wildcard $(ENVS)/*/lib/python3*/site-packages/torch) \
	  $(1)/lib/python3*/site-packages/torch 2>/dev/null || true

env:  ## Create the Python environment NAME of configs/environments, outside the checkout
	@test -n "$(NAME)" -a -f "$(ENV_FILE)" || { echo "make env NAME=...: one of" \
	  $(basename $(notdir $(wildcard configs/environments/*.txt))) >&2; exit 65; }
	@cmp -s $(ENV_FILE) $(ENVS)/$(NAME)/.installed && echo "$(ENVS)/$(NAME) is ready" || { set -e; \
	  test -x $(ENVS)/$(NAME)/bin/python || $(PYTHON) -m venv $(ENVS)/$(NAME); \
	  export PIP_CONSTRAINT=$(CURDIR)/$(ENV_FILE); \
	  torch=$$(sed -n '/^torch==/p' $(ENV_FILE)); \
	  test -z "$$torch" || $(ENVS)/$(NAME)/bin/python -m pip install -q $$torch; \
	  $(ENVS)/$(NAME)/bin/python -m pip install -q --no-deps -r $(ENV_FILE); \
	  $(call SHARED,$(ENVS)/$(NAME)); \
	  cp $(ENV_FILE) $(ENVS)/$(NAME)/.installed; }

envs: install  ## Create all environments except those for GPUs; ten minutes each the first time
	@set -e; for name in $(CPU_ENVS); do $(MAKE) -s env NAME=$$name; done

demo: install  ## Train the arithmetic model (SFT, then GRPO) and print the path of the report
	@echo "five to twelve minutes on two cores; if you interrupt it, the same command resumes it"
	$(BIN)/python -m rlinf.launch experiment=arithmetic_grpo $(ARGS)

test: install browser renderer  ## Run the core suite, on a Slurm that it starts
	RLINF_REQUIRE_SLURM=1 RLINF_REQUIRE_BROWSER=1 RLINF_CORE_TESTS=1 $(PYTEST) $(PARALLEL) tests -m 'not slow and not chaos' $(ARGS)

test-backends: install renderer vulkan envs  ## Run the tests of engines, trainers and simulators in their environments
	RLINF_REQUIRE_ENVS=1 $(PYTEST) $(PARALLEL) tests -m 'backends and not slow and not chaos' $(ARGS)

test-slow: install renderer envs  ## Run the slow tests: minutes each, or variants of other tests
	RLINF_REQUIRE_SLURM=1 RLINF_REQUIRE_ENVS=1 $(PYTEST) tests -m 'slow and not chaos' $(ARGS)

golden: install  ## Compare eight short runs with stored digests: in one process, as jobs, in pools, killed and resumed
	$(PYTEST) $(PARALLEL) tests/golden $(ARGS)

test-gpu: install  ## Run the tests that need a CUDA device; needs a CUDA build of torch in .venv
	$(PYTEST) tests -m gpu $(ARGS)

gpu-check: install  ## Check on a GPU what runs and how fast: at most eight minutes, one JSON line per figure
	$(BIN)/python -m benchmarks.gpu_check --output gpu-check.jsonl $(ARGS)

chaos: install  ## Inject faults into runs on the dev cluster, 40 of each kind (RLINF_CHAOS_FAULTS, RLINF_CHAOS_SEED)
	RLINF_REQUIRE_SLURM=1 RLINF_DEVCLUSTER_MODE=net $(PYTEST) tests/cluster/test_chaos.py -m chaos -s $(ARGS)

test-browser: install browser  ## Test the report in Chromium
	RLINF_REQUIRE_BROWSER=1 $(PYTEST) tests -m browser $(ARGS)

browser:  ## Install Chromium for test-browser, if it is missing (root; Debian packages)
	@command -v chromedriver >/dev/null || { export DEBIAN_FRONTEND=noninteractive; \
	  need="apt-get install -q -y --no-install-recommends chromium chromium-driver fonts-dejavu-core"; \
	  $$need >/dev/null || { apt-get -q update && $$need >/dev/null; }; }

renderer:  ## Install Mesa's EGL, with which simulators render without a GPU, if it is missing (root)
	@ldconfig -p | grep -q libEGL_mesa || { export DEBIAN_FRONTEND=noninteractive; \
	  need="apt-get install -q -y --no-install-recommends libegl1 libegl-mesa0 libgl1-mesa-dri"; \
	  $$need >/dev/null || { apt-get -q update && $$need >/dev/null; }; }

# Mesa of Debian 12 is too old for SAPIEN: unpack that of the backports, outside the system folders.
VULKAN := $(ENVS)/vulkan
MESA := mesa-vulkan-drivers libdrm2 libdrm-amdgpu1 libdrm-common
vulkan:  ## Download Mesa's software Vulkan, with which ManiSkill renders without a GPU
	@test -f $(VULKAN)/lvp.json || { set -e; mkdir -p $(VULKAN)/apt/lists/partial $(VULKAN)/apt/archives/partial; \
	  cd $(VULKAN)/apt; key=/usr/share/keyrings/debian-archive-keyring.gpg; \
	  echo "deb [signed-by=$$key] http://deb.debian.org/debian bookworm-backports main" > sources.list; \
	  own="-q -o Dir::Etc::sourcelist=$$PWD/sources.list -o Dir::Etc::sourceparts=/dev/null \
	    -o Dir::State::lists=$$PWD/lists -o Dir::Cache=$$PWD -o APT::Sandbox::User=root"; \
	  apt-get $$own update >/dev/null; apt-get $$own download $(MESA) >/dev/null; \
	  for file in *.deb; do dpkg -x $$file ..; done; cd ..; rm -r apt; \
	  sed "s#libvulkan_lvp.so#$$PWD/usr/lib/x86_64-linux-gnu/libvulkan_lvp.so#" \
	    usr/share/vulkan/icd.d/lvp_icd.json > lvp.json; }
	@echo "export VK_ICD_FILENAMES=$(VULKAN)/lvp.json LD_LIBRARY_PATH=$(VULKAN)/usr/lib/x86_64-linux-gnu"

apptainer:  ## Unpack Apptainer and a small image, with which tests run workers in a container (root; Debian packages)
	slurm/devcluster/apptainer.sh $(ENVS)/apptainer

test-fast: install  ## Run the tests that need no cluster and are not slow
	$(PYTEST) $(PARALLEL) tests -m 'not cluster and not slow and not chaos' $(ARGS)

lint: install  ## Run ruff, mypy, codespell and snakefmt
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/snakefmt --check --diff -l 100 Snakefile

format: install  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/snakefmt -l 100 Snakefile

$(VENV)/.bench: $(VENV)/.installed
	$(BIN)/python -m pip install -q -e '.[$(EXTRAS),bench]'
	touch $@

bench: $(VENV)/.bench  ## Run all benchmarks, or that of one row (NAME=row); writes benchmarks/results.json
	$(BIN)/python -m benchmarks $(if $(NAME),--name $(NAME)) $(ARGS)

bench-learning: $(VENV)/.bench  ## Measure and plot a learning curve (NAME=row); resumes an interrupted one
	$(BIN)/python -m benchmarks.learning --name $(NAME) $(ARGS)

equality: install  ## Compare one update by every trainer and one response of every engine; prints tables
	@set -e; for name in deepspeed megatron vllm sglang; do $(MAKE) -s env NAME=$$name; done
	$(BIN)/python -m benchmarks.equality $(ARGS)

docs: install  ## Generate the reference pages and build site/; fails on a broken link
	@$(MAKE) -s env NAME=docs
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(ENVS)/docs/bin/mkdocs build --strict --quiet
	@echo "open site/index.html"

wheel: install  ## Build the wheel in dist/
	rm -rf dist
	$(BIN)/python -m build -q --wheel --no-isolation

slurm-up:  ## Start the local Slurm dev cluster (root; installs Slurm if needed)
	slurm/devcluster/up.sh

slurm-down:  ## Stop the local Slurm dev cluster
	slurm/devcluster/down.sh

clean:  ## Remove build products and caches; keeps runs
	rm -rf dist build site .pytest_cache .mypy_cache .ruff_cache
