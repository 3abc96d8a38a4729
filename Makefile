# `make demo` and `make test` need only Python 3.11 and a package index.
PYTHON ?= python3.11
VENV ?= .venv
SITE ?= site
BIN := $(VENV)/bin
# No target needs the Hub; a hidden download is a bug.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
INPUTS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-mutation test-transformers lint format docs clean

help:           ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo     ## run the demo (some minutes), with baselines; resumes an earlier demo
	$(BIN)/python -m hf_ctxmodels demo --output_dir demo $(DEMO_ARGS)
	@echo 'hf-ctxmodels is $(BIN)/hf-ctxmodels; activate its environment: source $(BIN)/activate'

test: $(VENV)/.dev      ## run the test suite; FAMILY=bert runs the tests of one family
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" $(if $(FAMILY),--family $(FAMILY)) $(PYTEST_ARGS)

test-slow: $(VENV)/.dev ## run the slow tests, among them the common tests for all families
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m slow $(PYTEST_ARGS)

test-mutation: $(VENV)/.mutation ## fraction of sampled mutants that the tests kill, by package
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutation/score.py $(MUTATION_ARGS)

test-transformers: $(VENV)/.transformers-tests ## run the common tests of transformers for all models and tokenizers
	$(BIN)/python tests/transformers_suite/fetch.py $(VENV)/transformers-tests
	OMP_NUM_THREADS=1 TRANSFORMERS_TESTS=$(VENV)/transformers-tests $(BIN)/python -m pytest tests/transformers_suite -n 2 --dist worksteal -r fE $(PYTEST_ARGS)

lint: $(VENV)/.dev      ## check style, types and import direction, as in CI
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev    ## fix style in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs     ## build the site in site/; broken links are errors
	rm -rf $(SITE)
	$(BIN)/python docs/build.py --output $(SITE)

clean:          ## remove the environment, caches and outputs
	rm -rf $(VENV) demo .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Install torch first and separately: with other requirements, pip may resolve a different build.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' constraints.txt)
	@touch $@

# Stamp files avoid repeated installation; `dev` contains `demo`; `transformers-tests` and `mutation` contain `dev`.
$(VENV)/.demo $(VENV)/.dev $(VENV)/.docs $(VENV)/.transformers-tests $(VENV)/.mutation: $(VENV)/.%: $(VENV)/.torch $(INPUTS)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$*]'
	@touch $@
