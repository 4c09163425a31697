# trainyard's commands. `make` alone lists them.

PYTHON ?= python3
YARD ?= yard
RECIPE ?= recipes/quickstart.toml
PROFILE ?= local
TORCH_INDEX ?=
TORCH_SHA256 ?=
JOBS ?= 2
UI_PORT ?= 4200
BROWSE_PORT ?= 4201
FUZZ_SECONDS ?= 20
FUZZ_SEED ?= 1
PART ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Prefect's database of the runs: beside their outputs if those are on this machine.
LOCAL_YARD := $(if $(findstring ://,$(YARD)),yard,$(YARD))

# One for every stage, and one for the flows.
ALL_IMAGES = $(filter-out cuda/%,$(patsubst images/locks/%.txt,%,$(filter-out \
  %/build.txt %/install.txt %/pip.txt %/sbom.txt,$(wildcard images/locks/*.txt))))

# Overrides the environment: tests start hundreds of programs, each of which would recompile its
# imports.
export PYTHONDONTWRITEBYTECODE :=

# Tests run side by side, so one thread each.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# Each of these starts up to eight processes, so one at a time.
LAYOUTS := tests/trainyard/training/layouts

# These need the one Slurm cluster that a machine can have.
CLUSTERED := tests/yard/slurm tests/yard/test_everywhere.py tests/yard/operator/test_scheduled.py

.DEFAULT_GOAL := help
.PHONY: help install quickstart quickstart-corpus quickstart-retro pretrain-gpt register test test-distributed test-slow test-yard \
  test-in-yard test-full fuzz bench check lint format ui env images locks pins up down clean \
  clean-quickstart

help: ## List targets and variables
	@echo "trainyard: make TARGET [VARIABLE=value]"
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 20
	@echo
	@echo "  PYTHON=$(PYTHON)  interpreter for .venv, 3.11 or newer"
	@echo "  YARD=$(YARD)  folder for all output"
	@echo "  RECIPE=$(RECIPE)  what make pretrain-gpt runs"
	@echo "  PROFILE=$(PROFILE)  where it runs: a file of deploy/yards, by its name or path"
	@echo "  TORCH_INDEX=$(TORCH_INDEX)  where pip takes torch from, if not from your usual index:"
	@echo "      CPU only, 200 MB:  https://download.pytorch.org/whl/cpu"
	@echo "      CUDA 13:           https://download.pytorch.org/whl/cu130"
	@echo "  TORCH_SHA256=$(TORCH_SHA256)  hash of its file, if images/locks/torch has not; any: unchecked"
	@echo "  JOBS=$(JOBS)  test processes side by side"
	@echo "  UI_PORT=$(UI_PORT)  port of make ui"
	@echo "  BROWSE_PORT=$(BROWSE_PORT)  port where make ui shows the files of YARD"
	@echo "  PART=$(PART)  part of make test-full; empty: all that have not passed on this commit"
	@echo "  FUZZ_SECONDS=$(FUZZ_SECONDS)  seconds for each target of make fuzz"
	@echo "  FUZZ_SEED=$(FUZZ_SEED)  random seed; 0: a new one every time"

install: $(STAMP) ## Make .venv with everything that quickstart, tests and checks need

$(STAMP): pyproject.toml constraints.txt images/install-torch images/locks/install.txt \
  images/locks/pip.txt images/locks/cuda/install.txt $(wildcard images/locks/torch/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "trainyard needs Python 3.11 or newer, which '$(PYTHON)' is not:" \
	    "$$($(PYTHON) --version 2>&1 | tail -n 1)"; \
	    echo "Name another one: make install PYTHON=python3.12"; exit 2; } >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@echo "installing into $(VENV): one to two minutes, more where pip must fetch CUDA libraries"
	@# Upgrade pip first: it installs the 200 packages twice as fast as the one of Python 3.11.
	@$(PIP) install -qq --no-compile --no-deps --require-hashes -r images/locks/pip.txt
	@$(PIP) install -qq --no-compile --no-deps --require-hashes -r images/locks/install.txt
	@TORCH_INDEX="$(TORCH_INDEX)" TORCH_SHA256="$(TORCH_SHA256)" \
	  images/install-torch images/locks/torch $(PIP) install -qq --no-compile --no-deps
	@# The libraries of a CUDA build. Of a build of your own, only its versions are known.
	@$(PIP) install -qq --no-compile "$$(grep ^torch== constraints.txt)" $(if $(TORCH_SHA256), \
	  --constraint constraints.txt,--require-hashes --constraint images/locks/cuda/install.txt)
	@$(PIP) install -qq --no-compile --no-build-isolation --no-deps --editable .
	@# pip compiles bytecode on one core; this uses all.
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib trainyard stages flows >/dev/null || true
	@touch $@

# Where `make ui` shows the targets of the pages' links.
quickstart quickstart-corpus quickstart-retro pretrain-gpt: export TRAINYARD_BROWSE ?= \
  $(if $(findstring ://,$(YARD)),$(YARD),$(abspath $(YARD)))=http://127.0.0.1:$(BROWSE_PORT)
quickstart: export YARD := $(YARD)
quickstart: install ## Text to a trained, evaluated GPT and its run card
	@$(BIN)/python -m flows.pretrain_gpt recipes/quickstart.toml

quickstart-corpus: export YARD := $(YARD)
quickstart-corpus: install ## A Wikipedia dump in miniature to a clean corpus and its datasheet
	@mkdir -p yard/miniature
	@$(BIN)/python -m trainyard.testing.wiki_dump yard/miniature/pages-articles.xml.bz2 \
	  --articles 2000 --items yard/miniature/items.jsonl > yard/miniature/planted.json
	@$(BIN)/python -m flows.collect_corpus recipes/corpora/corpus_quickstart.toml > /dev/null
	@$(BIN)/python -m trainyard.testing.planted_found yard/miniature/planted.json \
	  "$(YARD)/corpus_quickstart/current.json"

quickstart-retro: export YARD := $(YARD)
quickstart-retro: install ## Text to a chunk database, an index, neighbours and a trained Retro
	@$(BIN)/python -m flows.pretrain_retro recipes/retro_quickstart.toml

pretrain-gpt: install ## The same flow on RECIPE, where PROFILE says
	@$(BIN)/python -m flows.pretrain_gpt $(RECIPE) --profile $(PROFILE)

register: install ## Configure the server of PREFECT_API_URL for yard PROFILE
	@$(BIN)/python -m flows.register --profile $(PROFILE)

ui: install ## Prefect's pages for the runs under YARD, on localhost behind a password
	@exec $(BIN)/python -m flows.ui --root "$(YARD)" --port $(UI_PORT) --browse-port $(BROWSE_PORT)

env: ## .env for docker compose: settings of this machine, new secrets; keeps existing ones
	@$(PYTHON) deploy/env.py

images: env ## Build images of stages and flows; IMAGES="tokenize flow": only these
	@docker compose --profile '*' build $(or $(IMAGES),$(ALL_IMAGES))

locks: ## Update images/locks, which installations check, after a change of dependencies; needs uv
	@$(PYTHON) images/lock.py

pins: ## Update the digests of the base images (docs/images.md)
	@$(PYTHON) images/pins.py

# The worker starts last: it refuses deployments that another version registered.
up: env ## Start database, Prefect, worker and object store (docs/operate.md)
	@docker compose up --detach --wait server
	@docker compose run --rm flow python -m flows.register --profile compose
	@docker compose up --detach --wait

down: ## Stop them; volumes stay
	@docker compose --profile '*' down

test: install ## Unit tests, about two minutes
	@$(PYTEST) -q -n $(JOBS) --dist loadfile

test-distributed: install ## Trainings on up to eight ranks against one process, every case, minutes
	@$(PYTEST) -q -m 'not full' --durations=10 $(LAYOUTS)

test-slow: install ## Slow and kill-anywhere suites, every case, minutes
	@$(PYTEST) -q -n $(JOBS) -m '(slow or kill) and not yard and not full' --ignore=$(LAYOUTS)

test-yard: install ## Images, compose, Slurm and an object store, started and removed by itself
	@deploy/dev/with-yard.sh $(MAKE) --no-print-directory test-in-yard

# Also runs the quick start's recipe with `docker compose run --rm` on the yard's store.
test-in-yard:
	@$(BIN)/python -m tests.yard.compose.engine $(ALL_IMAGES) postgres store
	@$(PYTEST) -q -n $(JOBS) --dist loadfile -m 'yard and not full' $(CLUSTERED:%=--ignore=%) tests/yard
	@$(PYTEST) -q -m 'yard and not full' $(CLUSTERED)
	@$(PYTEST) -q -m yard -k 'quick_start and compose' tests/yard/test_everywhere.py

# Runs the parts that have not passed on this commit, and records each when it ends.
test-full: install ## Everything but unit tests, two and a half hours; PART=yard: slow, large, layouts, yard, fuzz
	@JOBS=$(JOBS) $(BIN)/python -m tests.full $(PART)

fuzz: install ## Feed file readers damaged bytes, each of six for FUZZ_SECONDS
	@TRAINYARD_FUZZ_SECONDS=$(FUZZ_SECONDS) TRAINYARD_FUZZ_SEED=$(FUZZ_SEED) $(PYTEST) -q -n $(JOBS) -m fuzz tests/fuzz

bench: install ## Speed and memory of the corpus stages and their peers; 40 minutes
	@$(BIN)/python -m benchmarks.corpus

lint: install ## Style, types and import contracts
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports

check: lint test ## What a change must pass

format: install ## Format the sources
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

clean-quickstart: ## Remove YARD/quickstart and Prefect's records of all runs in YARD
	rm -rf "$(LOCAL_YARD)/quickstart" "$(LOCAL_YARD)/.prefect"

clean: ## Remove .venv and the caches of checks; YARD stays
	rm -rf $(VENV) build trainyard.egg-info .pytest_cache .mypy_cache .ruff_cache \
	  .import_linter_cache .hypothesis
	find trainyard stages flows tests -name __pycache__ -prune -exec rm -rf {} +
