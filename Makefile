# Two commands are all a fresh machine needs: `make bench` and `make test`.
#   TORCH="torch==2.13.0"   another torch requirement, such as a CPU-only wheel
#   PYTHON=python3.12       another interpreter (3.11 or newer)
#   JOBS=4                  test processes, each about 1 GB
PYTHON ?= python3
TORCH ?= torch>=2.11,<2.14
VENV := .venv
BIN := $(VENV)/bin
DB ?= sqlite:///ddtree-bench.db
PYTEST_ARGS ?=
JOBS ?= 2
# One thread: the models are tiny, and several test processes share few cores.
test test-gpu: export OMP_NUM_THREADS = 1

.PHONY: bench dashboard test test-gpu lint install clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#//p' Makefile
	@echo "targets: bench dashboard test test-gpu lint install clean"

$(BIN)/ddtree-bench: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile "$(TORCH)"
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[test]"
	@# On every core, where pip compiles on one; what is left out is imported by few, or by nobody.
	@$(BIN)/python -m compileall -q -j 0 -x 'transformers/models/|/tests/' $(VENV)/lib >/dev/null || true
	@touch $@

install: $(BIN)/ddtree-bench

bench: install
	$(BIN)/ddtree-bench --db "$(DB)" db upgrade
	$(BIN)/ddtree-bench --db "$(DB)" ingest benchmarks/recorded
	$(BIN)/ddtree-bench --db "$(DB)" run --profile quick
	$(BIN)/ddtree-bench --db "$(DB)" detect
	$(BIN)/ddtree-bench --db "$(DB)" diagnose
	$(BIN)/ddtree-bench --db "$(DB)" diagnose --incident

dashboard: install
	$(BIN)/ddtree-bench --db "$(DB)" dashboard

test: install
	$(BIN)/python -m pytest -m "not gpu" --numprocesses $(JOBS) --dist loadfile $(PYTEST_ARGS)

test-gpu: install
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .asv ddtree-bench.db
