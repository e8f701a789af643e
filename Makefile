# make demo    install into .venv and run FedHeN, NoSide and Decouple side by side on embedded data
# make quick   the quick tests, in two processes: under a minute on two cores
# make test    all tests          make check    format, lint and types          make format    mend the format
# make torture kill runs 200 times, and compare them with runs that were left alone
# make executorch  the tests of ExecuTorch files, in an environment of their own (.venv-executorch)
# make docs    rewrite the README's tree of packages and the table of settings from the code
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo quick test executorch check format torture docs wheel clean

demo: .venv/demo
	$(BIN)/fedhen compare digits

quick: .venv/ready
	$(BIN)/python -m pytest -n 2 -m "not slow and not process and not fleet and not fuzz and not gpu"

# Four processes even on two cores: tests of kills, ranks and fleets mostly wait.
test: .venv/ready
	$(BIN)/python -m pytest -n 4 --dist loadgroup

# ExecuTorch needs one torch exactly, and brings many packages.
executorch: .venv-executorch/ready
	.venv-executorch/bin/python -m pytest -n 2 --dist loadgroup tests/integration/test_export_executorch.py

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

torture: .venv/ready
	$(BIN)/python benchmarks/torture.py

docs: .venv/ready
	$(BIN)/python tests/support/tree.py
	PYTHONPATH=tests $(BIN)/python tests/system/test_docs.py

wheel: .venv/ready
	$(BIN)/python -m build --wheel

clean:
	rm -rf .venv .venv-executorch build dist

.venv/demo: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "fedhen needs Python 3.11 or newer: make PYTHON=python3.11 demo"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) --editable .
	@touch $@

.venv/ready: .venv/demo
	$(PIP) --editable '.[dev]'
	@touch $@

.venv-executorch/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-executorch
	.venv-executorch/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[executorch]' pytest pytest-xdist hypothesis
	@touch $@
