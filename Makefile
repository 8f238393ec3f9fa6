# `make run` shows what the package does; `make test` checks that it does it. Both set up .venv first.
PY := .venv/bin/python

# Tests start many processes; without compiled files each of them would compile thousands of modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup run test lint test-slow test-timing test-gpu test-durability test-minimums test-outside studies docs bench clean

setup:
	./scripts/setup.sh cli,model

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

test-durability:
	./scripts/setup.sh dev
	$(PY) -m pytest -m durability tests/training/test_durability.py

# The lowest versions that pyproject.toml allows, in a folder of their own.
test-minimums:
	test -x .venv-minimums/bin/python || $${PYTHON:-python3} -m venv .venv-minimums
	.venv-minimums/bin/python -m pip install --quiet --no-compile -c constraints-minimums.txt -e '.[report,ray,hf]' pytest pytest-timeout pytest-xdist hypothesis
	.venv-minimums/bin/python -m pytest -n 2 --dist worksteal tests/training tests/lra tests/own tests/cli tests/report tests/model tests/hf tests/test_minimums.py

# Tests that other projects wrote. SKYFORMER_TRANSFORMERS_TESTS names a folder with the tests of transformers.
test-outside:
	./scripts/setup.sh dev
	$(PY) -m tests.outside.torch_transforms
	$(PY) -m pytest -m outside -rs tests/outside/test_transformers.py
	test -z "$$SKYFORMER_TRANSFORMERS_TESTS" || $(PY) tests/outside/families.py "$$SKYFORMER_TRANSFORMERS_TESTS"
	$(PY) scripts/pages.py

studies:
	./scripts/setup.sh train,hf
	$(PY) -m skyformer study all --small --threads 2

# The tables of docs/ that come from results/ are written first; the site is then in build/docs/index.html.
docs:
	./scripts/setup.sh docs
	$(PY) scripts/pages.py
	$(PY) -m sphinx --fail-on-warning --keep-going --quiet -b html docs build/docs
	@echo "open build/docs/index.html"

bench:
	./scripts/setup.sh cli,peers
	$(PY) -m skyformer bench targets

clean:
	rm -rf .venv .venv-minimums build dist .pytest_cache .mypy_cache .ruff_cache
