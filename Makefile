# Everything starts here. `make demo` and `make test` set up what they need first; a second run starts at once.
#   PYTHON=/path/to/python3  the interpreter to build .venv with (default: the first of 3.11, 3.12, 3.13 found)
#   PYTEST_ARGS="-k wire"    what pytest runs

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint docs notebooks compat triton clean

BIN := .venv/bin

# Setup leaves compiling the packages to their first import, so that import must be allowed to keep what it compiled.
export PYTHONDONTWRITEBYTECODE :=

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## build .venv with everything the demo and the tests need
	@.ci/setup

demo: setup  ## run the demo on this machine's CPU
	@$(BIN)/kvcomm demo $(DEMO_ARGS)

lint: setup  ## style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

triton: setup  ## Triton beside .venv, for tests of kernels and of vLLM's second-generation runner in its interpreter
	@[ -d .triton/triton ] || $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-input --no-deps \
	  --target .triton -r requirements/triton.txt || echo "Triton could not be installed: its tests are skipped"

test: lint triton  ## style, types, layers, then every test
	$(BIN)/pytest $(PYTEST_ARGS)

docs: setup  ## build the documentation into site/
	$(BIN)/python -m mkdocs build --strict --quiet

notebooks: setup  ## run every example notebook on the real engine and store what it shows
	KVCOMM_NOTEBOOKS=write $(BIN)/pytest tests/engine/test_notebooks.py

compat: setup  ## does this vLLM have all that is relied upon? make compat VLLM=0.33.0; without: the installed one
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; wheel=; if [ -n "$(VLLM)" ]; then \
	  $(BIN)/pip download --quiet --no-deps --only-binary :all: --dest "$$folder" "vllm==$(VLLM)" || exit; \
	  wheel=$$(echo "$$folder"/*.whl); fi; $(BIN)/python -m kvcomm_integrations.connector.contract $$wheel

clean:  ## remove .venv and caches of tools
	rm -rf .venv .triton .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist site
