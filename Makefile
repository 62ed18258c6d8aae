# make book   execute every notebook, write the figures, build the HTML book
# make test   run every check
# Both set up .venv on a fresh Linux machine with Python >= 3.11. `make help` lists the parts.
#
#   VENV=dir         another place for the virtual environment
#   BASE_PYTHON=exe  the Python that the environment is made with (default: the first suitable python3). One that was
#                    built without --enable-optimizations, as pyenv does, takes a sixth longer for the tests
#   PYTHON=exe       use this interpreter as it is, for example one of a conda environment; nothing is installed
#   ATTNLIB_REPLAY=1 never measure, not even where a GPU is

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory --no-builtin-rules
.NOTPARALLEL:

VENV ?= .venv
CONSTRAINTS ?= constraints.txt
PYTHONS := $(or $(BASE_PYTHON),python3 python3.13 python3.12 python3.11)

ifdef PYTHON
  PY := $(PYTHON)
  READY := use-python
else
  PY := $(VENV)/bin/python
  READY := $(VENV)/installed
endif
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
# A run starts some hundred Python processes; each compiles what it imports unless the first one may keep the bytecode.
export PYTHONPYCACHEPREFIX ?= $(CURDIR)/build/pycache
unexport PYTHONDONTWRITEBYTECODE

say = @printf '\n\033[1m== %s\033[0m\n' "$(1)"
can_measure = $(PY) -c 'import sys; from attnlib.bench.records import can_measure; sys.exit(not can_measure())'

.PHONY: help book test venv use-python linux lint unit gpu hygiene compile every chapters replay figures redraw docs site browser compat next in_next run html clean

help:  ## this list
	@echo "attnlib: the two commands are 'make book' and 'make test'; their parts:"
	@sed -n 's/^\([a-z]*\):[^#]*## /  \1	/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

# ---------------------------------------------------------------- the two commands

book: $(READY)  ## execute the notebooks (GPU: measure, else replay), write the figures, build the HTML book
	@if $(can_measure); then $(MAKE) run html; else \
	    echo "No CUDA GPU here: measurements are replayed, outputs go to build/, committed files stay as they are."; \
	    $(MAKE) replay figures html; fi
	@echo; echo "The book: build/html/index.html"

PARTS := lint unit compile chapters

test: $(READY)  ## every check; GPU tests too where a CUDA GPU is
	@part=0; for name in $(PARTS); do \
	    part=$$((part + 1)); begin=$$SECONDS; \
	    printf '\n\033[1m== part %s of %s: %s\033[0m\n' $$part $(words $(PARTS)) $$name; \
	    $(MAKE) $$name || { echo "make test: part $$part of $(words $(PARTS)), $$name, failed; alone: make $$name" >&2; exit 1; }; \
	    echo "part $$part of $(words $(PARTS)), $$name, passed in $$((SECONDS - begin)) s"; \
	done
	@echo; echo "make test: everything passed"

# ---------------------------------------------------------------- set-up

venv: $(READY)  ## set up .venv with the tested versions (constraints.txt)

linux:
	@[ "$$(uname -s)" = Linux ] || { \
	    echo "attnlib needs Linux (Triton publishes no build for $$(uname -s)). On Windows use WSL 2, on macOS a Linux container." >&2; \
	    exit 1; }

$(VENV)/installed: pyproject.toml $(CONSTRAINTS) | linux
	@python=""; \
	for candidate in $(PYTHONS); do \
	    if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        python="$$candidate"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "attnlib needs Python 3.11 or newer with its venv module. Here is:" >&2; \
	    for candidate in $(PYTHONS); do echo "    $$candidate: $$("$$candidate" --version 2>&1)" >&2 || true; done; \
	    echo "Install one (Debian, Ubuntu: apt install python3 python3-venv) or name one: make BASE_PYTHON=/path/to/python3" >&2; \
	    exit 1; fi; \
	printf '\n\033[1m== %s\033[0m\n' "setting up $(VENV) with $$("$$python" --version) (about 5 GB, some minutes)"; \
	"$$python" -m venv "$(VENV)"; \
	"$(VENV)/bin/python" -m pip install --no-compile --progress-bar $(if $(CI),off,on) -c $(CONSTRAINTS) -e ".[book,dev]"
	@touch "$@"

use-python: | linux
	@"$(PY)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "PYTHON=$(PY): attnlib needs Python 3.11 or newer, this is $$("$(PY)" --version 2>&1)" >&2; exit 1; }
	@"$(PY)" -c 'import torch, triton, nbclient, nbconvert, matplotlib, pandas, seaborn' || { \
	    echo "PYTHON=$(PY) is used as it is, and lacks a package. Complete it with" >&2; \
	    echo "    $(PY) -m pip install -c constraints.txt -e '.[book,dev]'" >&2; \
	    echo "or leave PYTHON unset: then make sets up $(VENV) itself." >&2; exit 1; }

# ---------------------------------------------------------------- parts of make book

# On a GPU Triton builds a small C launcher: it needs a compiler and Python.h, and says so only inside a notebook.
define launcher_check
import os, shutil, sys, sysconfig
if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")):
    sys.exit("Triton needs a C compiler on a GPU machine (Debian, Ubuntu: apt install gcc)")
if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
    sys.exit("Triton needs Python.h on a GPU machine (Debian, Ubuntu: apt install python3-dev)")
endef
export launcher_check

# The profile comes first, where Nsight Compute may read counters: chapters show it. Elsewhere one sentence says why not.
run: $(READY)  ## (GPU) profile every step, execute every notebook in place: outputs, records, figures, README
	$(call say,executing the notebooks on this GPU)
	@$(PY) -c "$$launcher_check"
	@$(PY) -m attnlib.bench --profile --book
	@$(PY) -m attnlib.book run
	@$(PY) -m attnlib.book figures
	@$(PY) -m attnlib.book readme

replay: $(READY)  ## execute every notebook into build/notebooks, measurements replayed from figures/data
	$(call say,replaying the notebooks into build/notebooks)
	@ATTNLIB_REPLAY=1 $(PY) -m attnlib.book replay

figures: $(READY)  ## draw the figures of the replayed notebooks into build/figures
	$(call say,writing build/figures)
	@$(PY) -m attnlib.book figures --source build/notebooks --out build/figures

html: $(READY)  ## build the HTML book from the committed notebooks
	$(call say,building the HTML book)
	@rm -rf build/html
	@$(PY) -m sphinx -b html -W --keep-going -q -d build/doctrees notebooks build/html

# ---------------------------------------------------------------- parts of make test

lint: $(READY)  ## ruff, notebooks too
	$(call say,ruff)
	@$(PY) -m ruff check .

hygiene: $(READY)  ## notebooks: execution order, errors, size, ids, paths; README and text against the records
	$(call say,notebook hygiene)
	@$(PY) -m attnlib.book check

# Files of tests at a time: two, up to four where there are cores for them.
JOBS := $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 2 ? 2 : n > 4 ? 4 : n)))
# Tests that time a launch want a GPU for themselves. In their own order the long files do not come last and alone.
side_by_side = $$($(can_measure) || echo "-n $(JOBS) --dist loadfile --no-loadscope-reorder")
# A machine with a GPU has the time for every case, see tests/helpers/chosen.py.
every = if $(can_measure); then export ATTNLIB_EVERY_CASE=1; fi

# Which the part `hygiene` does.
same_as_hygiene := test_the_committed_notebooks_and_readme_are_clean

unit: $(READY)  ## the tests: on the GPU where there is one, else in Triton's interpreter
	$(call say,tests)
	@$(every); OMP_NUM_THREADS=1 $(PY) -m pytest -q tests --ignore tests/book/test_replay.py --ignore tests/book/test_site.py \
	    --deselect tests/book/test_book.py::$(same_as_hygiene) $(side_by_side)

gpu: $(READY)  ## only the tests that need a CUDA GPU
	$(call say,GPU tests)
	@$(PY) -m pytest -q tests/gpu

compile: $(READY)  ## compile kernels for sm_90 without a GPU: spills, tensor-core instructions, shared memory
	$(call say,compiling for sm_90)
	@$(every); OMP_NUM_THREADS=1 $(PY) -m pytest -q tests/compile -n $(JOBS) --dist loadfile --no-loadscope-reorder

every: $(READY)  ## `unit` and `compile` with every case, as where a GPU is; elsewhere they take those that stand for all
	@ATTNLIB_EVERY_CASE=1 $(MAKE) unit compile

# Checking text and building the book keep one core busy: they have what replaying leaves, most of it at its end.
chapters: $(READY)  ## redraw, and beside it hygiene and site, which are shown after it
	@mkdir -p build; nice $(MAKE) hygiene site >build/beside.log 2>&1 & \
	$(MAKE) redraw && passed=0 || passed=1; wait $$! || passed=1; cat build/beside.log; exit $$passed

redraw: $(READY)  ## replay all notebooks once: they run, stubs fail, solutions pass, figures are the committed ones
	$(call say,replaying the notebooks and redrawing the figures)
	@$(PY) -m pytest -q -s tests/book/test_replay.py

docs: html  ## the HTML book, warnings as errors

site: html  ## the built book: no remote reference, no dead link, every chapter there
	$(call say,checking the built book)
	@$(PY) -m pytest -q tests/book/test_site.py

browser: $(READY)  ## open every page of the built book in headless Chromium (needs chromium)
	$(call say,opening the book in Chromium)
	@$(PY) tests/browser/check_pages.py --screens

# Each has a Triton of its own; all else is that of $(PY), which stands behind it on the path.
COMPAT := 3.7.1 3.8.0 3.9.0
purelib = -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'

.venv-compat-%/installed: | $(READY)
	$(call say,setting up $(@D))
	@"$(PY)" -m venv "$(@D)"
	@"$(@D)/bin/python" -m pip install --progress-bar $(if $(CI),off,on) --no-deps "triton==$*"
	@"$(PY)" $(purelib) > "$$("$(@D)/bin/python" $(purelib))/all-else.pth"
	@touch "$@"

.PRECIOUS: .venv-compat-%/installed
compat: $(COMPAT:%=.venv-compat-%/installed)  ## compile kernels of every family with other versions of Triton
	$(call say,compiling for sm_90 with triton $(COMPAT))
	@status=0; for version in $(COMPAT); do \
	    PYTHONWARNINGS=ignore ".venv-compat-$$version/bin/python" tests/compile/compat.py || status=1; \
	done; exit $$status

# The second tested set (constraints-next.txt) has an environment of its own. Planted bugs say nothing about it.
NEXT := $(addprefix tests/,emulator kernels api/test_torch_ops.py api/test_scored_operator.py \
    api/test_decode_operator.py api/test_node.py api/test_varlen.py hf/test_compiled.py)

.venv-next/constraints.txt: constraints-next.txt constraints.txt
	@mkdir -p $(@D); { cat $<; grep -vE '^(torch|triton)==' constraints.txt; } >$@

next: .venv-next/constraints.txt  ## a part of the tests with the next torch and its Triton (constraints-next.txt)
	@$(MAKE) PYTHON= VENV=.venv-next CONSTRAINTS=$< in_next

in_next: $(READY)
	$(call say,tests with $(CONSTRAINTS))
	@OMP_NUM_THREADS=1 $(PY) -m pytest -q $(NEXT) --ignore-glob "*_mutations.py" $(side_by_side)
	@OMP_NUM_THREADS=1 $(PY) -m pytest -q tests/compile/test_direct_launch.py
	@$(PY) tests/compile/compat.py

clean:  ## remove what was made (build/); .venv, .venv-next and .venv-compat-* stay
	rm -rf build
