# `make run` shows what the package does; `make test` checks that it does it. Both set up .venv first.
PY := .venv/bin/python

# Tests start many processes; without compiled files each of them would compile thousands of modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup run test lint test-slow test-timing test-gpu studies docs bench clean

setup:
	./scripts/setup.sh train

run: setup
	$(PY) -m skyformer demo --output results/run

test: lint
	$(PY) -m pytest -n 2 --dist worksteal

lint:
	./scripts/setup.sh dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

test-slow:
	./scripts/setup.sh dev
	$(PY) -m pytest -m slow

test-timing:
	./scripts/setup.sh dev
	$(PY) -m pytest -m timing

# On a machine with a GPU: the kernels themselves instead of Triton's interpreter.
test-gpu:
	./scripts/setup.sh dev
	TRITON_INTERPRET=0 $(PY) -m pytest tests/test_gpu.py tests/ops/test_triton_compile.py

studies:
	./scripts/setup.sh train,hf
	$(PY) -m skyformer study all --small --threads 2

docs:
	./scripts/setup.sh model
	$(PY) scripts/pages.py

bench:
	./scripts/setup.sh cli,peers
	$(PY) -m skyformer bench targets

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache
