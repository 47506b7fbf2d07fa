# make demo | test | test-slow | test-all | test-xla | test-newest | test-toy | test-engines | test-programs | soak | gpu-check | check | docs | package | bench | changes | release
# Everything is installed into .venv, at the versions in constraints.txt; for test-xla into .venv-xla, with torch 2.9;
# for test-newest into .venv-newest, and for test-programs into .venv-programs, as pip finds it.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt
# The packages beside this one, which tests and benchmarks take from this tree.
CONTRIB := --no-deps $(patsubst %,--editable ./%,$(wildcard contrib/*-*))

# The number of tests that run side by side. They often wait for their processes, so three keep two cores busy.
TESTS  ?= 3
# In continuous integration a failed test gets one more run.
PYTEST := $(if $(CI),.ci/pytest_again.py,-m pytest) --numprocesses $(TESTS) --dist worksteal

XLA    := .venv-xla
XLA_PIP = $(XLA)/bin/pip --disable-pip-version-check install --quiet --no-compile --constraint $(XLA)/constraints.txt
ON_XLA := PJRT_DEVICE=CPU $(XLA)/bin/python $(PYTEST) --backend xla

NEWEST := .venv-newest
# Python, too: the newest that pyenv has, or else the same.
NEWEST_PYTHON ?= $(lastword $(PYTHON) $(sort $(wildcard $(dir $(shell command -v $(PYTHON)))../versions/3.1[3-9].*/bin/python3)))
NEWEST_PIP := $(NEWEST)/bin/pip --disable-pip-version-check install --quiet --no-compile --upgrade

PROGRAMS := .venv-programs
# It asks for older transformers and numpy than it needs, and for clients of each cloud.
MOSAIC := mosaicml-streaming zstd python-snappy cramjam Brotli catalogue
PROGRAMS_PIP := $(PROGRAMS)/bin/pip --disable-pip-version-check install --quiet --no-compile

.PHONY: demo test test-slow test-all test-xla test-newest test-toy test-engines test-programs soak gpu-check check docs package bench changes release clean

# The last line is the hash of the weights, the same for DEVICES=1, 2, 3 and 4.
DEVICES ?= 2
demo: $(VENV)/.examples
	$(BIN)/python examples/demo.py --devices $(DEVICES)

test: $(VENV)/.test
	$(BIN)/python $(PYTEST) -m "not slow and not programs"

test-slow: $(VENV)/.test
	$(BIN)/python $(PYTEST) -m "slow and not programs"

test-all: $(VENV)/.test
	$(BIN)/python $(PYTEST) -m "not programs"

# The engines that clusters run, with Ray; SSH and SLURM where sshd and slurm-wlm are here.
test-engines: $(VENV)/.test $(VENV)/.engines
	$(BIN)/python $(PYTEST) tests/engines

# A process has one number of virtual devices. What depends on how many there are is the joint reduction, so that with
# four and eight run the tests of collectives, and those of whole runs: so few that a third pytest would not pay.
ON_MORE := tests/xla/test_xla_replicas.py tests/training/test_collectives.py tests/training/prepared/test_exactness.py
test-xla: $(XLA)/.test
	CPU_NUM_DEVICES=2 $(ON_XLA) -m "any_family or xla"
	CPU_NUM_DEVICES=4 $(ON_XLA) --numprocesses 2 -m "any_family or xla" -k "threads-4 or test_xla" $(ON_MORE) \
	    tests/xla/test_xla_compilations.py tests/training/test_unequal_gathers.py tests/contract/test_communicator.py
	CPU_NUM_DEVICES=8 $(ON_XLA) --numprocesses 2 -m "any_family or xla" -k "threads-8 or test_xla" $(ON_MORE)

# With what `pip install` gives users today: the newest torch of the index, and the newest of everything else.
test-newest: $(NEWEST)/.test
	$(NEWEST)/bin/python -m pip list | grep -iE "^(torch|triton|numpy|cloudpickle|psutil) "
	$(NEWEST)/bin/python $(PYTEST) -m "not slow and not programs"

# Programs of other libraries, by `unisono run` and by torchrun; one after the other, about 8 minutes.
test-programs: $(PROGRAMS)/.test
	$(PROGRAMS)/bin/python -m pytest tests/libraries

# On an accelerator of four devices that is made of main memory; g++ builds it.
test-toy: $(VENV)/.test
	PYTHONPATH=tests/toy/package $(BIN)/python $(PYTEST) --backend toy -m "any_family and not slow"

# Random trainings under random faults; in continuous integration, two.
MINUTES ?= 30
soak: $(VENV)/.test
	$(BIN)/python tests/soak.py --minutes $(MINUTES)

# What can be seen on the GPUs that are here, item by item; about 15 minutes. Without one it says so.
gpu-check: $(VENV)/.test
	$(BIN)/python tests/gpu/gpu_check.py

check: $(VENV)/.test $(VENV)/.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright

# The site, in out/site: static files. A warning, a link that leads nowhere among them, is an error.
docs: $(VENV)/.docs
	COLUMNS=100 NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo out/site/index.html

# What users install, in dist: the sdist, the wheel made from it; and the quickstart by that wheel, in an empty environment.
package: $(VENV)/.test $(VENV)/.package
	$(BIN)/python .ci/package.py

# What docs/performance.md shows: the files of results, and the tables made from them. A quarter of an hour, on a machine
# that does nothing else; `make bench BENCH="--blocks 1"` shows sooner that all of it runs.
bench: $(VENV)/.bench
	$(BIN)/python bench/run.py $(BENCH) -o bench/results/cpu.json
	if test -x $(XLA)/bin/python; then \
	    PJRT_DEVICE=CPU $(XLA)/bin/python bench/run.py $(BENCH) --device xla -o bench/results/xla.json; fi
	$(BIN)/python docs/generate/performance.py

# The next section of CHANGELOG.md, from the fragments in changes/.
changes: $(VENV)/.check
	$(BIN)/towncrier build --draft

# `make release VERSION=0.2.0`: checks, builds, and tags; nothing is uploaded.
release: $(VENV)/.test $(VENV)/.check $(VENV)/.docs $(VENV)/.package
	.ci/release $(VERSION)

clean:
	rm -rf $(VENV) $(XLA) $(NEWEST) $(PROGRAMS) build dist out *.egg-info contrib/*/build contrib/*/*.egg-info

# One stamp per extra of setup.cfg: what is installed stays installed.
$(VENV)/.%: setup.cfg constraints.txt | $(BIN)/python
	@echo "installing unisono[$*] into $(VENV): 1.3 GB with a CPU build of torch, 5 GB with a CUDA build; a few minutes the first time"
	@$(PIP) --editable '.[$*]'
	@touch $@

$(VENV)/.test $(VENV)/.bench: $(VENV)/.contrib
$(VENV)/.contrib: $(wildcard contrib/*/pyproject.toml) | $(BIN)/python
	@$(PIP) $(CONTRIB)
	@touch $@

# The pair from setup.cfg first: every other torch of the index is as large, and constraints.txt names a newer one. A
# separate target: it needs nothing of this tree, so it can be installed while tests run.
$(XLA)/.pair: setup.cfg constraints.txt
	@echo "installing torch 2.9 and torch-xla 2.9 into $(XLA): 7 GB, a few minutes the first time"
	@test -x $(XLA)/bin/python || $(PYTHON) -m venv $(XLA)
	@grep -v '^torch==' constraints.txt > $(XLA)/constraints.txt
	@$(XLA_PIP) $(patsubst %,'%',$(shell sed -n '/^xla =/,/^#/s/^    //p' setup.cfg))
	@touch $@

$(XLA)/.test: $(XLA)/.pair
	@$(XLA_PIP) --editable '.[test,xla]'
	@$(XLA_PIP) $(CONTRIB)
	@touch $@

# torch first: to reconcile everything at once, pip would go back to an older one. `rm -r .venv-newest` gets newer versions.
# A separate target, as above.
$(NEWEST)/.torch: setup.cfg
	@echo "installing the newest torch into $(NEWEST): 5 GB with a CUDA build, a few minutes the first time"
	@test -x $(NEWEST)/bin/python || $(NEWEST_PYTHON) -m venv $(NEWEST)
	@$(NEWEST_PIP) torch
	@touch $@

$(NEWEST)/.test: $(NEWEST)/.torch
	@$(NEWEST_PIP) --editable '.[test]'
	@$(NEWEST_PIP) $(CONTRIB)
	@touch $@

# torch first, as above: the others require it, each with bounds of its own.
$(PROGRAMS)/.torch: setup.cfg
	@echo "installing torch and the libraries of tests/libraries into $(PROGRAMS): 2 GB with a CPU build of torch, 6 GB with a CUDA build; a few minutes the first time"
	@test -x $(PROGRAMS)/bin/python || $(PYTHON) -m venv $(PROGRAMS)
	@$(PROGRAMS_PIP) torch
	@touch $@

$(PROGRAMS)/.test: $(PROGRAMS)/.torch
	@$(PROGRAMS_PIP) --editable '.[programs]'
	@$(PROGRAMS_PIP) $(CONTRIB)
	@$(PROGRAMS_PIP) --no-deps $(MOSAIC)
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Unisono needs Python 3.11 or later, and this is " + \
	    sys.version.split()[0] + "; name another one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
