# make bench    a short head-to-head of the transports, in less than five minutes
# make bench-full  every transport, workload and size: takes hours, Ctrl-C keeps what there is
# make test     the whole test suite; what skips for want of a browser, or unless run by root,
#               fails with MQ_NEED=browser,root (see tests/needs.py)
# make check    format, lint, types
# make stress   the conformance suite ten times in a row beside a busy core
# make ding     DI-engine's workers over mq, with DI-engine installed beside the environment

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
DING := $(CURDIR)/$(VENV)/ding

.PHONY: bench bench-full test check stress clean ding

bench: $(READY)
	$(BIN)/mq bench --quick

bench-full: $(READY)
	$(BIN)/mq bench

test: $(READY)
	$(BIN)/python tests/parts.py

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

stress: $(READY)
	$(BIN)/python tests/stress.py

ding: $(DING)/ready
	PYTHONPATH=$(DING) $(BIN)/python -m pytest -p no:cacheprovider tests/test_apps_ding.py

$(DING)/ready: $(READY) tests/ding.txt
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(DING) --requirement tests/ding.txt
	touch $@

$(READY): setup.cfg pyproject.toml constraints.txt .build/backend.py mq/_speed.c mq/_lock.c mq/_lock.h
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; say which: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
