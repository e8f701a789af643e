# make demo    install into .venv and run FedHeN, NoSide and Decouple side by side on embedded data
# make quick   the tests of a second or two each, in one process: under a minute on two cores
# make test    all tests          make check    format, lint and types          make format    mend the format
# make torture kill runs 200 times, and compare them with runs that were left alone
# make tree    rewrite the README's tree of packages from their docstrings
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo quick test check format torture tree wheel clean

demo: .venv/ready
	$(BIN)/fedhen compare digits

quick: .venv/ready
	$(BIN)/python -m pytest -n 2 -m "not slow and not process and not fleet and not fuzz and not gpu"

test: .venv/ready
	$(BIN)/python -m pytest -n 2 --dist loadgroup

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

torture: .venv/ready
	$(BIN)/python benchmarks/torture.py

tree: .venv/ready
	$(BIN)/python tests/support/tree.py

wheel: .venv/ready
	$(BIN)/python -m build --wheel

clean:
	rm -rf .venv build dist

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "fedhen needs Python 3.11 or newer: make PYTHON=python3.11 demo"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
