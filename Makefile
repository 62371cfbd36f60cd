# Two commands set everything up on a fresh machine: `make test` and `make train`.
# They need Python, pip and make, and keep all they install in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BARE := .venv-bare
DOCS := .venv-docs
RELEASE := .venv-release
BROWSER := .browser/chromium

.PHONY: help test test-front test-all test-thorough test-device conformance train lint bare docs pages bench release clean
.NOTPARALLEL:

help:
	@echo "make test           every capability once, in some 15 minutes: one case of each test; ARGS='-k name' picks some"
	@echo "make test-front     one test of each capability of the README, in a minute"
	@echo "make test-all       every case, also campaigns, kills and what waits"
	@echo "make test-thorough  more random cases and all combinations of parameters, with coverage"
	@echo "make test-device    the device code on a simulated accelerator, tests/device and tests/gpu: every setting once;"
	@echo "                    ARGS=--suite=all for every case"
	@echo "make conformance    PyTorch's own public tests of FSDP, on sherd; ARGS='--tests RE' picks some"
	@echo "make train          train a small language model, sharded over 2 processes; ARGS='...' go to sherd train"
	@echo "make lint           ruff (lint and format) and mypy --strict"
	@echo "make bare           what a newcomer does first, with torch and nothing else installed (in .venv-bare)"
	@echo "make docs           build the documentation site into site/; ARGS='...' go to mkdocs build"
	@echo "make pages          compute docs/data and the summaries of pages anew, where that takes seconds"
	@echo "make bench          sherd beside DDP, FSDP1 and FSDP2; ARGS='...' go to python -m bench"
	@echo "make release        build and check the wheel, the source distribution and the notes, into dist/"
	@echo "make clean          remove .venv, caches and builds"

# One thread per process: the ranks of a test share the machine's cores. Two files at a time: while the ranks of one
# wait for each other, those of the other compute. The files in the order that tests/conftest.py gives them.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
SPLIT := -n 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.test
	$(PYTEST) $(SPLIT) --durations=10 $(ARGS)

test-front: $(VENV)/.test
	$(PYTEST) -m front $$(grep -rl --include='test_*.py' 'mark\.front' tests) $(ARGS)

test-all: $(VENV)/.all $(BROWSER)
	$(PYTEST) $(SPLIT) --suite=all --durations=10 $(ARGS)

test-thorough: $(VENV)/.test $(BROWSER)
	OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest $(SPLIT) --suite=thorough --durations=10 $(ARGS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --skip-covered --format=total

# On the simulated accelerator (tests/device/README.md), which is compiled if there is a compiler. In a pytest of its own:
# once loaded, it is the accelerator of the whole process.
test-device: $(VENV)/.test
	$(PYTEST) $(SPLIT) --device=sim tests/device tests/gpu $(ARGS)

conformance: $(VENV)/.test
	$(BIN)/python -m tests.conformance $(ARGS)
	$(BIN)/python -m tests.conformance.newer

train: $(VENV)/.train
	$(BIN)/sherd train $(ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict sherd

# Installed anew each time, and not from the sources: what is tried is what `pip install .` gives.
bare: $(BARE)/bin/python
	rm -rf build
	$(BARE)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt .
	$(BARE)/bin/python .ci/bare.py

docs: $(DOCS)/.docs
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict $(ARGS)

# What needs minutes or a quiet machine is written by hand: python -m bench.published, bench.predicted, tests.faults.
pages: $(VENV)/.test
	$(BIN)/python -m bench.padding --write
	$(BIN)/python -m bench.published --render

bench: $(VENV)/.train
	$(BIN)/python -m bench $(ARGS)

release: $(RELEASE)/.release $(DOCS)/.docs
	$(RELEASE)/bin/python .ci/release.py

clean:
	rm -rf $(VENV) $(BARE) $(DOCS) $(RELEASE) .browser .conformance .device-build site build dist *.egg-info .hypothesis .coverage* .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp for each purpose: the second call finds it and installs nothing.
$(VENV)/.test: EXTRAS := train,tools,hf,tensorboard,ray,test
$(VENV)/.all: EXTRAS := train,tools,hf,tensorboard,ray,lm-eval,test
# Alone: it asks for a `datasets` older than that of transformers, which its tests have no use for. The extra `test` has
# what they import.
$(VENV)/.test $(VENV)/.all: TITAN := 'torchtitan; python_version >= "3.11"'
$(VENV)/.train: EXTRAS := train
$(VENV)/.lint: EXTRAS := train,tools,hf,test,dev
$(VENV)/.test $(VENV)/.all $(VENV)/.train $(VENV)/.lint: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	$(if $(TITAN),$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps $(TITAN))
	@touch $@

# The site is built from the sources as they are read, and so is a release: the packages of the extra, without sherd and
# so without torch.
$(DOCS)/.docs $(RELEASE)/.release: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		$$(sed -n 's/^$(patsubst .%,%,$(@F)) = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",')
	@touch $@

# A headless Chromium from a package of npm, for the tests that open a page. It is for Linux on x86_64; elsewhere, and
# where there is no npm, those tests are skipped.
$(BROWSER):
	@if [ "$$(uname -sm)" = "Linux x86_64" ] && command -v npm >/dev/null; then set -e; \
		npm install --prefix $(@D) --ignore-scripts --no-audit --no-fund --silent @sparticuz/chromium@153.0.0; \
		cd $(@D); \
		unpacked() { \
			node -e 'process.stdin.pipe(require("zlib").createBrotliDecompress()).pipe(process.stdout)' \
				<node_modules/@sparticuz/chromium/bin/$$1.br; }; \
		unpacked al2023.tar | tar x; \
		unpacked chromium >chromium.part; \
		chmod +x chromium.part; \
		rm -rf node_modules package.json package-lock.json; \
		mv chromium.part chromium; \
	else echo "no npm, or no browser for this machine: the tests that open a page are skipped"; fi

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(BARE)/bin/python:
	$(PYTHON) -m venv $(BARE)
