# make bench    a short head-to-head of the transports, in less than five minutes
# make bench-full  every transport, workload and size: takes hours, Ctrl-C keeps what there is
# make test     the whole test suite; what skips for want of a browser, or unless run by root,
#               fails with MQ_NEED=browser,root (see tests/needs.py)
# make check    format, lint, types
# make stress   the conformance suite ten times in a row beside a busy core
# make oldest   what meets other libraries, over the oldest of them that setup.cfg allows
# make ding     DI-engine's workers over mq, with DI-engine installed beside the environment

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
DING := $(CURDIR)/$(VENV)/ding
OLDEST := $(CURDIR)/$(VENV)/oldest

.PHONY: bench bench-full test check stress clean ding oldest

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

oldest: $(OLDEST)/ready
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest -p no:cacheprovider \
		tests/test_oldest.py tests/test_codec.py tests/test_hostile_payloads.py \
		tests/test_speed.py tests/test_speed_messages.py tests/test_devices.py tests/test_handshake.py \
		tests/test_links.py tests/test_zmq_link.py tests/test_nng_link.py \
		tests/test_safe_types.py tests/test_safe_tensordicts.py
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest -p no:cacheprovider \
		tests/test_conformance.py -k "zmq:tcp or nng:ipc or shm-"

$(OLDEST)/ready: $(READY) tests/oldest.txt
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(OLDEST) --requirement tests/oldest.txt
	touch $@

ding: $(DING)/ready
	PYTHONPATH=$(DING) $(BIN)/python -m pytest -p no:cacheprovider tests/test_apps_ding.py

$(DING)/ready: $(READY) tests/ding.txt
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(DING) --requirement tests/ding.txt
	touch $@

$(READY): setup.cfg pyproject.toml constraints.txt .build/backend.py $(wildcard mq/_*.c mq/_*.h)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; say which: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
