# `make demo` and `make test` need Python 3.11 and a package index, nothing else.
PYTHON ?= python3.11
VENV ?= .venv
SITE ?= site
BIN := $(VENV)/bin
# Nothing here needs the Hub: a hidden download is a bug.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
INPUTS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-mutation test-transformers lint format docs clean

help:           ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo     ## what works, each number beside its baseline, in minutes; goes on from an earlier demo
	$(BIN)/python -m hf_ctxmodels demo --output_dir demo $(DEMO_ARGS)

test: $(VENV)/.dev      ## the test suite; FAMILY=bert runs the tests of one family
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" $(if $(FAMILY),--family $(FAMILY)) $(PYTEST_ARGS)

test-slow: $(VENV)/.dev ## the tests that take long
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-mutation: $(VENV)/.mutation ## the share of sampled mutants that the tests kill, per room
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutation/score.py $(MUTATION_ARGS)

test-transformers: $(VENV)/.transformers-tests ## the common tests of transformers for all models and tokenizers
	$(BIN)/python tests/transformers_suite/fetch.py $(VENV)/transformers-tests
	OMP_NUM_THREADS=1 TRANSFORMERS_TESTS=$(VENV)/transformers-tests $(BIN)/python -m pytest tests/transformers_suite -n 2 --dist worksteal -r fE $(PYTEST_ARGS)

lint: $(VENV)/.dev      ## style, types and the direction of imports, as CI checks them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev    ## mend style in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs     ## the site, into site/; a broken link is an error
	rm -rf $(SITE)
	$(BIN)/python docs/build.py --output $(SITE)

clean:          ## remove the environment, caches and outputs
	rm -rf $(VENV) demo .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone: a resolver that sees it among other requirements may pick another build of it.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' constraints.txt)
	@touch $@

# The stamps spare a second call the installation; `dev` contains `demo`; `transformers-tests` and `mutation` contain `dev`.
$(VENV)/.demo $(VENV)/.dev $(VENV)/.docs $(VENV)/.transformers-tests $(VENV)/.mutation: $(VENV)/.%: $(VENV)/.torch $(INPUTS)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$*]'
	@touch $@
