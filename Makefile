# Everything a person does here. `make demo` and `make test` set up a fresh machine by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := configs/constraints.txt
EXTRAS := slurm,sims,video,lerobot,math,reasoning,search,gguf,peft,dev
export PIP_CONSTRAINT := $(CURDIR)/$(CONSTRAINTS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# One thread per process: more make small models slower, and waiting threads must not spin.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 0
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
PYTEST := $(BIN)/python -m pytest -p no:cacheprovider
# Tests on a Slurm mostly wait: one worker has them, the other has the rest.
WORKERS ?= 2
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help install env envs demo test test-slow test-gpu golden docs test-browser browser renderer vulkan test-fast chaos lint format bench bench-learning equality wheel slurm-up slurm-down clean

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(VENV)/.installed  ## Create the environment in .venv

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	@echo "setting up $(VENV): two to five minutes, PyTorch first"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	# torch first, pinned: nothing later may replace it by a build with CUDA packages.
	$(BIN)/python -m pip install -q torch==2.13.0
	$(BIN)/python -m pip install -q -e '.[$(EXTRAS)]'
	touch $@

# Environments of their own for parts whose packages cannot stand beside ours: the interpreters that
# task.python, engine.python, engine.server_python and trainer.python name. Each has all its packages,
# pinned, in one file: what some of them declare and do without is not there, so nothing else comes.
ENVS := $(if $(RLINF_ENVS),$(RLINF_ENVS),$(HOME)/.cache/rlinf/envs)
ENV_FILE = configs/environments/$(NAME).txt

# The files of torch that two environments have alike are stored once, where their disk can do that.
SHARED = hardlink -q -c $(wildcard $(VENV)/lib/python3*/site-packages/torch) \
	  $(wildcard $(ENVS)/*/lib/python3*/site-packages/torch) \
	  $(1)/lib/python3*/site-packages/torch 2>/dev/null || true

env:  ## Make the environment NAME of configs/environments, outside the checkout
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

envs: install  ## Make all of them: ten minutes each the first time
	@set -e; for file in configs/environments/*.txt; do $(MAKE) -s env NAME=$$(basename $$file .txt); done

demo: install  ## Fine-tune and train the arithmetic model, then say where the report is
	@echo "five to twelve minutes on two cores; interrupt it at any time, the same command goes on"
	$(BIN)/python -m rlinf.launch experiment=arithmetic_grpo $(ARGS)

test: install browser renderer vulkan envs  ## The suite, on a real Slurm brought up for it
	RLINF_REQUIRE_SLURM=1 RLINF_REQUIRE_BROWSER=1 RLINF_REQUIRE_ENVS=1 $(PYTEST) $(PARALLEL) tests -m 'not slow and not chaos' $(ARGS)

test-slow: install renderer envs  ## What the suite leaves out: minutes each, or variants of what it has
	RLINF_REQUIRE_SLURM=1 RLINF_REQUIRE_ENVS=1 $(PYTEST) tests -m 'slow and not chaos' $(ARGS)

golden: install  ## Eight short runs against the digests on file: in one process, as jobs, in pools, killed
	$(PYTEST) $(PARALLEL) tests/golden $(ARGS)

test-gpu: install  ## What needs a CUDA device; with a torch for CUDA in .venv
	$(PYTEST) tests -m gpu $(ARGS)

chaos: install  ## Faults on the dev cluster, 40 of each kind (RLINF_CHAOS_FAULTS, RLINF_CHAOS_SEED)
	RLINF_REQUIRE_SLURM=1 RLINF_DEVCLUSTER_MODE=net $(PYTEST) tests/cluster/test_chaos.py -m chaos -s $(ARGS)

test-browser: install browser  ## The report in a real browser
	RLINF_REQUIRE_BROWSER=1 $(PYTEST) tests -m browser $(ARGS)

browser:  ## Install Chromium, which those tests need, if it is missing (root; Debian's packages)
	@command -v chromedriver >/dev/null || { export DEBIAN_FRONTEND=noninteractive; \
	  need="apt-get install -q -y --no-install-recommends chromium chromium-driver fonts-dejavu-core"; \
	  $$need >/dev/null || { apt-get -q update && $$need >/dev/null; }; }

renderer:  ## Install Mesa's EGL, which simulators render with where there is no GPU, if it is missing (root)
	@ldconfig -p | grep -q libEGL_mesa || { export DEBIAN_FRONTEND=noninteractive; \
	  need="apt-get install -q -y --no-install-recommends libegl1 libegl-mesa0 libgl1-mesa-dri"; \
	  $$need >/dev/null || { apt-get -q update && $$need >/dev/null; }; }

# Debian 12's own Mesa is too old for SAPIEN; that of its backports is unpacked apart from the system.
VULKAN := $(ENVS)/vulkan
MESA := mesa-vulkan-drivers libdrm2 libdrm-amdgpu1 libdrm-common
vulkan:  ## Unpack Mesa's Vulkan in software, for ManiSkill where there is no GPU, beside the environments
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

test-fast: install  ## Without a cluster and without slow tests
	$(PYTEST) $(PARALLEL) tests -m 'not cluster and not slow and not chaos' $(ARGS)

lint: install  ## ruff, mypy, codespell, snakefmt
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

bench: $(VENV)/.bench  ## Measure and write benchmarks/results.json (NAME=row for one row)
	$(BIN)/python -m benchmarks $(if $(NAME),--name $(NAME)) $(ARGS)

bench-learning: $(VENV)/.bench  ## A learning curve and its picture (NAME=row); goes on where it was cut off
	$(BIN)/python -m benchmarks.learning --name $(NAME) $(ARGS)

equality: install  ## One update in every way, one answer of every engine: tables of differences
	@set -e; for name in deepspeed megatron vllm sglang; do $(MAKE) -s env NAME=$$name; done
	$(BIN)/python -m benchmarks.equality $(ARGS)

docs: install  ## Write the generated pages and build the site in site/; a broken link fails
	@$(MAKE) -s env NAME=docs
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(ENVS)/docs/bin/mkdocs build --strict --quiet
	@echo "open site/index.html"

wheel: install  ## Build dist/*.whl
	rm -rf dist
	$(BIN)/python -m build -q --wheel --no-isolation

slurm-up:  ## Start the dev cluster (root; installs Slurm if needed)
	slurm/devcluster/up.sh

slurm-down:  ## Stop the dev cluster
	slurm/devcluster/down.sh

clean:  ## Remove build products; runs are kept
	rm -rf dist build site .pytest_cache .mypy_cache .ruff_cache
