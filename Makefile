# `make book` and `make test` set up all they need, from nothing. `make help` lists the rest.
PYTHON ?= python3
PORT ?= 8000
CHAPTERS ?= $(wildcard notebooks/*.md)
GPU_PYTHON ?= $(BIN)/python
GPU_OPTIONS ?= --record

BIN := .venv/bin
READY := .venv/.ready
HIDDEN_CACHES := .pytest_cache .ruff_cache .hypothesis

.DEFAULT_GOAL := help
.PHONY: help book test lint serve notebooks lab bench evidence links gpu gpu-book smoke clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

# --all reads every page again: without it, a second run after a failure finds nothing to do and ends well.
# Chapters are run again only when they, a package, a recorded result or the pins changed (book/_ext/labbook.py).
# Pages and twins show the model that ships; LABCORE_MODEL is for `make lab`.
book test notebooks: export LABCORE_MODEL =

book: $(READY)  ## build the book: _build/html/index.html
	@rm -rf _build/html
	$(BIN)/jupyter-book build . --all -W -n --keep-going

# One torch thread a process: two processes with two threads each wait for one another on two cores.
test: lint book  ## lint, build the book, run every test and every chapter
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(READY)  ## style and spelling
	$(BIN)/ruff check .
	$(BIN)/codespell

serve: book  ## build the book and show it on http://localhost:8000 (PORT=...)
	$(BIN)/python -m http.server $(PORT) --bind 127.0.0.1 --directory _build/html

notebooks: $(READY)  ## after editing notebooks/*.md: write the .ipynb twins and run them (CHAPTERS=...)
	$(BIN)/python book/write_twins.py $(CHAPTERS)

lab: $(READY)  ## edit and run the chapters in JupyterLab (LAB_OPTIONS=--no-browser)
	$(BIN)/python -m pip install -q -c constraints.txt jupyterlab
	$(BIN)/jupyter lab --notebook-dir=notebooks $(LAB_OPTIONS)

bench: $(READY)  ## print the speed figures, one process each
	@set -e; for name in blocks decode simulator prefix sweep; do \
	  echo "== benchmarks/$$name.py"; $(BIN)/python benchmarks/$$name.py; done

evidence: $(READY)  ## print every claim of the book, its ground and its page, and the reference's beside ours
	@$(BIN)/python book/_ext/evidence_register.py

links: book  ## print every link out of the book, and whether it still leads somewhere
	@$(BIN)/python book/check_links.py

# On a GPU runtime: make gpu GPU_PYTHON=python3. That takes the torch and Triton that are there and installs
# nothing; the tests then do without nbval, and take other versions' warnings for what they are.
gpu: $(if $(filter $(BIN)/%,$(GPU_PYTHON)),$(READY))  ## time the kernels on a GPU, in four minutes, and test them there
	PYTHONPATH=. $(GPU_PYTHON) benchmarks/gpu.py $(GPU_OPTIONS)
	$(GPU_PYTHON) -m pytest -o addopts= -o filterwarnings= -m gpu tests/test_kernel.py tests/test_kernel_on_gpu.py

# GPU_PYTHON needs nbclient and ipykernel, too. Chapter 6 computes on the GPU, the others on the CPU; the last
# cell of each copy says on what it ran. The twins stay as they are.
gpu-book: gpu  ## on a GPU, after make gpu: run every chapter; copies with outputs go to _build/gpu
	LABCORE_MODEL= $(GPU_PYTHON) book/smoke.py --here _build/gpu $(CHAPTERS)

smoke: $(READY)  ## run three chapters in clean environments of other versions (SMOKE="--torch 2.13")
	$(BIN)/python book/smoke.py $(SMOKE)

clean:  ## remove everything built, keep .venv
	rm -rf _build $(HIDDEN_CACHES)

$(READY): requirements.txt constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "This needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	       "Name another one: make PYTHON=python3.12"; exit 1; }
	@echo "Installing into .venv: about three minutes, once."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -r requirements.txt -c constraints.txt
	$(BIN)/python -m pip install -q --no-deps -e .
	@touch $@
