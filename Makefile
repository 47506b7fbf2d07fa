# make demo | test | test-all | check | bench   Everything is installed into .venv, at the versions in constraints.txt.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test test-all check bench clean

demo: $(VENV)/.examples
	$(BIN)/python examples/train_digits.py --mode processes --devices 2

test: $(VENV)/.test
	$(BIN)/python -m pytest -m "not slow"

test-all: $(VENV)/.test
	$(BIN)/python -m pytest

check: $(VENV)/.test $(VENV)/.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/python bench/launch.py
	$(BIN)/python bench/restart.py
	$(BIN)/python bench/failures.py
	$(BIN)/python bench/idle_memory.py
	$(BIN)/python bench/checked.py
	$(BIN)/python bench/steps.py
	$(BIN)/python bench/threads.py
	$(BIN)/python bench/overlap.py
	$(BIN)/python bench/overhead.py
	$(BIN)/python bench/first_batch.py
	$(BIN)/python bench/prefetch_bytes.py
	if test -x $(VENV)-xla/bin/python; then for each in overhead first_batch; do \
	    PJRT_DEVICE=CPU PYTHONPATH=. $(VENV)-xla/bin/python bench/$$each.py || exit 1; done; fi

clean:
	rm -rf $(VENV) build out *.egg-info

# One stamp per extra of setup.cfg: what is installed stays installed.
$(VENV)/.%: setup.cfg constraints.txt | $(BIN)/python
	@echo "installing unisono[$*] into $(VENV): up to 1.3 GB, a few minutes the first time"
	@$(PIP) --editable '.[$*]'
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
