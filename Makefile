# Two commands matter: `make train` and `make test`. Each sets up what it needs.
PYTHON ?= python3
RUN_DIR ?= runs/demo
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: venv train test science lint format bench docs clean

venv: .venv/installed

# A torch that is already in .venv and satisfies the constraints is kept, so another build can be put there first.
.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# The synchronous twin first, so that the asynchronous run can be printed beside it.
train: venv
	$(BIN)/slipstream train --config configs/demo_sync.toml --run-dir $(RUN_DIR)-sync --overwrite
	$(BIN)/slipstream train --config configs/demo.toml --run-dir $(RUN_DIR) --overwrite --beside $(RUN_DIR)-sync

# Two files at a time, in order of their names: those that take longest come first.
test: venv
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

# Statistical claims over seeds: minutes, and no part of `make test`.
science: venv
	$(BIN)/python -m pytest -m slow

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: venv
	$(BIN)/python benchmarks/muon.py

# The reference, from the code, and the pictures of the concept pages, from the simulators.
docs: venv
	$(BIN)/python docs/make/reference.py
	$(BIN)/python docs/make/pictures.py

clean:
	rm -rf .venv build dist
