# Two commands set everything up on a fresh machine: `make test` and `make train`.
# They need Python, pip and make, and keep all they install in .venv; what other packages need lies in .venv-interop.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INTEROP := .venv-interop
BARE := .venv-bare
DOCS := .venv-docs
RELEASE := .venv-release
BROWSER := .browser/chromium

.PHONY: help test test-front test-interop test-all test-thorough test-device conformance train lint bare docs pages bench gpu release clean
.NOTPARALLEL:

help:
	@echo "make test           every capability once, one case of each test; ARGS='-k name' picks some"
	@echo "make test-front     one test of each capability of the README, in a minute"
	@echo "make test-interop   sherd under other packages (Ray, Lightning, TRL, W&B, S3 and more) and the recipes"
	@echo "make test-all       every case, also campaigns, kills and what waits"
	@echo "make test-thorough  more random cases and all combinations of parameters, with coverage"
	@echo "make test-device    the simulated accelerator's own tests, and tests/device and tests/gpu on it: every setting once;"
	@echo "                    ARGS=--suite=all for every case"
	@echo "make conformance    PyTorch's own public tests of FSDP, on sherd; ARGS='--tests RE' picks some"
	@echo "make train          train a small language model, sharded over 2 processes; ARGS='...' go to sherd train"
	@echo "make lint           ruff (lint and format) and mypy --strict"
	@echo "make bare           what a newcomer does first, with torch and nothing else installed (in .venv-bare)"
	@echo "make docs           build the documentation site into site/; ARGS='...' go to mkdocs build"
	@echo "make pages          compute docs/data and the summaries of pages anew, where that takes seconds"
	@echo "make bench          sherd beside DDP, FSDP1 and FSDP2; ARGS='...' go to python -m bench"
	@echo "make gpu            ten minutes on this machine's GPUs, compared with FSDP2: a table, and what to send"
	@echo "make release        build and check the wheel, the source distribution and the notes, into dist/"
	@echo "make clean          remove .venv, caches and builds"

# One thread per process: the ranks of a test share the machine's cores. Two files at a time: while the ranks of one
# wait for each other, those of the other compute. The files in the order that tests/conftest.py gives them.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
ALL := OMP_NUM_THREADS=1 $(INTEROP)/bin/python -m
WORKERS := 2
SPLIT = -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=10
OTHERS := tests/interop tests/recipes

test: $(VENV)/.test
	$(PYTEST) $(SPLIT) $(OTHERS:%=--ignore=%) $(ARGS)

test-front: $(VENV)/.test
	$(PYTEST) -m front $$(grep -rl --include='test_*.py' 'mark\.front' tests) $(ARGS)

test-interop: $(INTEROP)/.interop
	$(ALL) pytest $(SPLIT) $(if $(filter tests/%,$(ARGS)),,$(OTHERS)) $(ARGS)

test-all: $(INTEROP)/.all $(BROWSER)
	$(ALL) pytest $(SPLIT) --suite=all $(ARGS)

test-thorough: $(INTEROP)/.all $(BROWSER)
	$(ALL) coverage run -m pytest $(SPLIT) --suite=thorough $(ARGS)
	$(ALL) coverage combine --quiet
	$(ALL) coverage report --skip-covered --format=total

# On the simulated accelerator (simdevice/README.md), which is compiled if there is a compiler. In a pytest of its own:
# once loaded, it is the accelerator of the whole process.
test-device: $(VENV)/.test
	$(PYTEST) $(SPLIT) --device=sim simdevice/tests tests/device tests/gpu $(ARGS)

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
	$(BARE)/bin/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt .
	$(BARE)/bin/python .ci/bare.py

docs: $(DOCS)/.docs
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict $(ARGS)

# What needs minutes or a quiet machine is written by hand: python -m bench.published, bench.predicted, tests.faults.
pages: $(VENV)/.test
	$(BIN)/python -m bench.padding --write
	$(BIN)/python -m bench.published --render

bench: $(VENV)/.train
	$(BIN)/python -m bench $(ARGS)

gpu: $(VENV)/.train
	$(BIN)/sherd doctor --gpus $(ARGS)

release: $(RELEASE)/.release $(DOCS)/.docs
	$(RELEASE)/bin/python .ci/release.py

clean:
	rm -rf $(VENV) $(INTEROP) $(BARE) $(DOCS) $(RELEASE) .browser .conformance simdevice/.build simdevice/build site build dist *.egg-info .hypothesis .coverage* .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp for each purpose: the second call finds it and installs nothing. torch comes by pip, which its user may have told
# where to look; the rest by uv, which takes a quarter of the time, or by pip too where uv cannot. What is imported is
# compiled, nothing else, and kept, or each process would do it anew.
unexport PYTHONDONTWRITEBYTECODE
PIP = $(@D)/bin/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt
UV = $(@D)/bin/python -m uv pip install -q --python $(@D) -c constraints.txt
$(VENV)/.test: EXTRAS := train,tools,hf,test
$(VENV)/.test: DEVICE := -e ./simdevice
$(VENV)/.train: EXTRAS := train
$(VENV)/.lint: EXTRAS := train,tools,hf,test,dev
$(INTEROP)/.interop: EXTRAS := train,tools,hf,test,test-interop
$(INTEROP)/.all: EXTRAS := train,tools,hf,test,test-interop,lm-eval
# Alone: it asks for a `datasets` older than that of transformers, which its tests have no use for. The extra
# `test-interop` has what they import.
$(INTEROP)/.interop $(INTEROP)/.all: TITAN := 'torchtitan; python_version >= "3.11"'
$(VENV)/.test $(VENV)/.train $(VENV)/.lint $(INTEROP)/.interop $(INTEROP)/.all: pyproject.toml constraints.txt simdevice/pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(PIP) torch uv
	$(UV) -e '.[$(EXTRAS)]' $(DEVICE) || $(PIP) -e '.[$(EXTRAS)]' $(DEVICE)
	$(if $(TITAN),$(UV) --no-deps $(TITAN) || $(PIP) --no-deps $(TITAN))
	@$(@D)/bin/python -c 'import torch._dynamo, sherd'
	@$(@D)/bin/python -c 'import matplotlib.pyplot' 2>/dev/null || true  # which finds fonts the first time
	@touch $@

# The site is built from the sources as they are read, and so is a release: the packages of the extra, without sherd and
# so without torch.
$(DOCS)/.docs $(RELEASE)/.release: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(PIP) $$(sed -n 's/^$(patsubst .%,%,$(@F)) = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",')
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

$(BARE)/bin/python:
	$(PYTHON) -m venv $(BARE)
