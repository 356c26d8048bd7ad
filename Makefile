# Two commands on a machine that has only Python: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test benchmark faults fuzz clean

.venv/installed: pyproject.toml constraints.txt hatch_build.py src/m2lgdg/data/readers/_numbers.c
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,cluster,onnx,serve]'
	@touch $@

demo: .venv/installed
	$(BIN)/m2lgdg demo --out demo

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal

benchmark: .venv/installed
	$(BIN)/python benchmarks/reading.py

faults: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/kill.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/faults.py

FUZZ_SECONDS ?= 60
fuzz: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore fuzz/run.py --seconds $(FUZZ_SECONDS)
	fuzz/numbers.sh $(FUZZ_SECONDS)

clean:
	rm -rf .venv demo build dist
