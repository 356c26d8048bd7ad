# Two commands on a machine that has only Python: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
PIP := -m pip install --quiet --disable-pip-version-check -c constraints.txt
PIP_SHOWN := $(subst --quiet ,,$(PIP)) --progress-bar on
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal
MORE := types or long or browser or kernels or fuzz or pages or onnx

.PHONY: demo test test-more coverage docs models wheel wheel-check benchmark faults federated slurm fuzz clean

.venv/installed: pyproject.toml constraints.txt
	@echo "Installing into .venv, once: PyTorch first (some minutes without a cache), then the rest."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python $(PIP_SHOWN) torch
	@$(BIN)/python $(PIP_SHOWN) -e '.[dev,networks,cluster,onnx,serve,federated,docs]'
	@$(BIN)/m2lgdg --version
	@touch $@

demo: .venv/installed
	@$(BIN)/m2lgdg demo --out demo
	@echo "The report: file://$(CURDIR)/demo/results/report.html"

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) -m "not ($(MORE))"

# The groups that need more time or a browser: types, long trainings and audits, pages in Chromium, kernels in Triton's
# interpreter, random bytes, the numbers of the pages computed again from results/, and ONNX graphs of all networks.
test-more: .venv/installed
	$(BIN)/mypy
	$(PYTEST) -m "$(MORE)"

# The lines that the tests of `make test` run, by file; apart from it, since measuring takes half as much time again, and with
# Python 3.11 a thread can fail to be measured, which fails its test.
coverage: .venv/installed
	$(PYTEST) -m "not ($(MORE))" --cov=m2lgdg --cov-report=term:skip-covered

# The pages of docs/ as a site in build/site; every command of the tutorial is run on the way.
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Wrote build/site. To read and search it: $(PYTHON) -m http.server -d build/site"

# The models that come with the package, from a cohort of ABIDE I; benchmarks/packaged_models.py says how to convert it.
models: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/packaged_models.py $(COHORT)

# The sdist and the wheel that an index takes: one wheel for every system, without a compiled file.
wheel:
	rm -rf dist build/tools
	$(PYTHON) -m venv build/tools
	build/tools/bin/python $(PIP) build
	build/tools/bin/python -m build --outdir dist

# The wheel in an empty environment: its size, then the demo and a prediction, without PyTorch.
wheel-check: wheel
	rm -rf build/empty build/wheel-demo build/wheel-card
	$(PYTHON) -m venv build/empty
	build/empty/bin/python $(PIP) dist/*.whl
	du -sm build/empty
	cd build && empty/bin/m2lgdg doctor
	cd build && empty/bin/m2lgdg models && empty/bin/m2lgdg card abide-aal --out wheel-card
	cd build && empty/bin/m2lgdg demo --preset tiny --out wheel-demo
	cd build && empty/bin/m2lgdg fit wheel-demo/tiny.cohort --out wheel-demo/model
	cd build && empty/bin/m2lgdg predict wheel-demo/model wheel-demo/tiny.cohort --out wheel-demo/predictions.csv

benchmark: .venv/installed
	$(BIN)/python benchmarks/reading.py

faults: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/faults.py

# Five hospitals train one model, by files and through Flower: the same bits, and the probabilities of `fit`.
# An environment of its own, since Flower needs older versions of some libraries.
federated:
	$(PYTHON) -m venv build/flower
	build/flower/bin/python $(PIP) '.[flower]'
	OMP_NUM_THREADS=1 build/flower/bin/python benchmarks/federated.py

# The scripts of docs/cluster.md on a SLURM of two nodes on this machine (Debian: apt-get install slurm-wlm munge).
slurm: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/slurm.py

# More random input for the parsers than `make test` has.
fuzz: .venv/installed
	M2LGDG_FUZZ=50 OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal tests/test_fuzz.py

clean:
	rm -rf .venv demo build dist
