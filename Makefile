# Every target sets itself up: .venv is made when it is missing or older than pyproject.toml.
#   make quickstart      train the built-in model on the built-in task
#   make test            all tests that are not slow, and the doctests of rl/
#   EXTRA=gpu make setup another accelerator (cpu, gpu, tpu, xla, tpu-sim); VENV=... another place
EXTRA ?= cpu
PYTHON ?= python3
VENV ?= .venv
UV := 0.13.9

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(EXTRA)
RUN_DIR ?= runs/quickstart-$(shell date +%Y%m%d-%H%M%S)
# uv does not read pip's settings: a folder of wheels given to pip is handed on. Without one, torch comes from the
# index of its builds without CUDA (the default index has only CUDA builds for Linux).
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
TORCH := $(if $(strip $(UV_FIND_LINKS)),,$(if $(filter cpu tpu tpu-sim,$(EXTRA)),--torch-backend cpu))

.PHONY: setup quickstart test test-docs test-all lint bench clean
.DEFAULT_GOAL := setup

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 13) else f"Python 3.11 or 3.12 is needed (seen: {v[0]}.{v[1]}); name one: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv==$(UV)
	$(BIN)/uv pip install --python $(BIN)/python $(TORCH) -e '.[$(EXTRA),dev]'
	@$(BIN)/python -c 'import sys, torch; cuda = torch.version.cuda; sys.exit(f"torch {torch.__version__} is a CUDA build (CUDA {cuda}), and EXTRA is $(EXTRA): remove $(VENV) and give a folder with a +cpu wheel, or none" if cuda and "$(EXTRA)" not in ("gpu", "xla") else 0)'
	@rm -f $(VENV)/.installed-*
	@touch $@

quickstart: $(STAMP)
	$(BIN)/parkrl train configs/quickstart.yaml --set run.output_dir=$(RUN_DIR)

test: $(STAMP)
	$(BIN)/pytest -m "not slow" --doctest-modules rl actors/check.py tests

test-all: $(STAMP)
	$(BIN)/pytest --doctest-modules rl actors/check.py tests
	$(BIN)/python tests/run_docs.py

test-docs: $(STAMP)
	$(BIN)/python tests/run_docs.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --python-version 3.12
	$(BIN)/mypy --python-version 3.11

# The peer that bench/trl.py compares with has an environment of its own.
.venv-trl: bench/trl-requirements.txt $(STAMP)
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $@
	$(BIN)/uv pip install --python $@/bin/python $(TORCH) -r $<
	@touch $@

bench: $(STAMP) .venv-trl
	$(BIN)/python -m bench

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
