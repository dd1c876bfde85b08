# Two commands are enough: `make demo` and `make test`. Both make .venv and install what they need, once.
PYTHON ?= $(firstword $(foreach name,python3 python,$(if $(shell command -v $(name)),$(name))))
BIN := .venv/bin
DEMO := .venv/demo.stamp
DEV := .venv/dev.stamp
PYTEST := $(BIN)/python -m pytest -q
unexport PYTHONDONTWRITEBYTECODE  # without its cache, each of the hundred programs that tests start compiles the package again

.PHONY: help demo test check format docs look pages bench resume hf rivals buckets long laws soak crash oracle constraints clean
.NOTPARALLEL:

help:  ## show this list
	@grep -hE '^[a-z]+:.*## ' Makefile | sed -E 's/^([a-z]+):.*## (.*)/make \1	\2/' | expand -t 20

demo: $(DEMO)  ## train, kill, resume, compare (about a minute)
	$(BIN)/trainfold demo

test: check  ## every gate, every test, and the strict build of the docs
	$(PYTEST) -n 3 --dist loadfile  # of two cores: tests wait for other processes a quarter of their time

# The collection writes the byte code of what tests import: without it, each process of the test run makes the same code again at once.
check: $(DEV)  ## the static gates (half a minute at first, then seconds), mypy beside the others
	@set -x; $(BIN)/mypy & \
	{ $(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/lint-imports --no-logo && $(BIN)/codespell && \
	$(BIN)/deptry --no-ansi core backends adapters properties && \
	$(BIN)/deptry --no-ansi --ignore DEP002,DEP004 --exclude '\.venv' --exclude _build tests docs examples benchmarks && \
	{ mkdir -p build && $(PYTEST) --collect-only >build/collected || { cat build/collected; false; }; }; }; \
	others=$$?; wait $$! && exit $$others

format: $(DEV)  ## let ruff write
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEV)  ## the documentation, strictly, into docs/_build/html
	$(BIN)/python -m sphinx -q -W -n --keep-going -b html docs docs/_build/html
	@touch docs/_build/strict

look: docs  ## open every page in a browser at three widths, and list what sticks out (needs playwright and chromium)
	$(BIN)/python docs/look.py

pages: $(DEV)  ## what `trainfold page` writes, in a browser, light and dark, with axe-core (needs playwright, chromium and npm)
	npm install --silent --no-audit --no-fund --prefix build/axe axe-core@4.14.1
	$(PYTEST) -m "" tests/adapters/cli/page

resume: $(DEV)  ## a resume under seven tools, compared bit for bit (installs the rivals; half an hour)
	$(PIP) install --quiet --disable-pip-version-check -c constraints.txt -e '.[rivals]'
	$(BIN)/python benchmarks/resume.py

hf: $(DEV)  ## the tests on models of transformers and adapters of peft, which it installs (a minute)
	$(PIP) install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf]'
	$(PYTEST) -m "" tests/adapters/bridges/test_trainer_hf.py tests/adapters/construct/test_construct_hf.py tests/adapters/outside/test_lora.py tests/core/transform/families/test_hub_rules_hf.py tests/core/transform/converters/test_lora_of_peft.py tests/backends/weights/test_hub_writer_hf.py

rivals: $(DEV)  ## the tests with accelerate and Lightning, which it installs: bridges, and checkpoints that they have written (minutes)
	$(PIP) install --quiet --disable-pip-version-check -c constraints.txt -e '.[rivals]'
	$(PYTEST) -m "" tests/adapters/bridges/test_lightning_rivals.py tests/adapters/bridges/test_accelerate_rivals.py tests/adapters/loaders/test_prepared_loader.py tests/backends/weights/foreign/test_programs_rivals.py

buckets: $(DEV)  ## all tests of runs in buckets, on emulators of S3, Google Cloud Storage and Azure, which it installs (half an hour)
	$(PIP) install --quiet --disable-pip-version-check -c constraints.txt -e '.[buckets]'
	npm install --silent --no-audit --no-fund --prefix build/azurite azurite@3.35.0
	TRAINFOLD_AZURITE=$(CURDIR)/build/azurite/node_modules/.bin $(PYTEST) -m "" tests/backends/stores/object_store tests/laws/test_manager_machine.py

bench: $(DEV)  ## what it costs: benchmarks/
	@for program in $(filter-out benchmarks/resume.py,$(wildcard benchmarks/[a-z]*.py)); do echo "== $$program"; $(BIN)/python $$program || exit 1; done

long: $(DEV)  ## the tests that `make test` leaves out: further variants of what it proves (minutes)
	$(PYTEST) -n 3 --dist loadfile -m long

laws: $(DEV)  ## the laws with many more examples (minutes)
	HYPOTHESIS_PROFILE=laws $(PYTEST) -n 2 --dist loadfile --timeout 1800 -m "" tests

soak: $(DEV)  ## the laws for hours, with new examples each time
	HYPOTHESIS_PROFILE=soak TRAINFOLD_FUZZ_CASES=50000000 $(PYTEST) -n 2 --dist loadfile --timeout 0 -m "" tests

crash: $(DEV)  ## every disk that a crash may leave of a save, 200 power cuts, every call failing (root for some; an hour)
	HYPOTHESIS_PROFILE=soak $(PYTEST) -n 2 --dist load --timeout 0 -rP -m "" tests/crash

oracle: $(DEV)  ## a million random evaluations and 1e5 of Hypothesis against fractions (an hour)
	TRAINFOLD_RANDOM_CASES=1000000 TRAINFOLD_EXAMPLES=100000 $(PYTEST) -n 2 tests/core/evaluate/test_evaluation_oracle.py

constraints: $(DEV)  ## write constraints.txt from what is installed
	@{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --all --exclude pip --exclude-editable | sed 's/+cpu$$//' | grep -v '^#' | sort -f; } \
		> constraints.new && mv constraints.new constraints.txt

clean:  ## remove .venv and everything that was built
	rm -rf .venv docs/_build docs/reference/generated build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# --- set-up -----------------------------------------------------------------------------------------------------------

# A Python without ensurepip (Debian without python3-venv) has an outer pip that can install into the environment.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
		echo "trainfold needs Python 3.11, 3.12 or 3.13; found: $$($(PYTHON) --version 2>&1). Say: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv || $(PYTHON) -m venv --clear --without-pip .venv

PIP = $(if $(shell $(BIN)/python -c 'import pip' 2>/dev/null && echo yes),$(BIN)/python -m pip,$(PYTHON) -m pip --python $(BIN)/python)

# pip would compile all of torch, on one core; Python compiles what is imported.
$(DEMO): $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e '.[plot]'
	@touch $@

$(DEV): $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@ $(DEMO)
