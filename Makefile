# make demo   set up .venv and show all of it on the bundled model
# make test   set up .venv and run every check, those with vLLM in .venv-vllm
# make lint   ruff and mypy only
# make unit   everything but vLLM
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# vLLM pins its own versions of everything
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

.PHONY: demo test lint unit test-vllm install clean

demo: $(STAMP)
	$(BIN)/allocmoe demo

# vLLM for the CPU comes ready-made for this platform only
ifeq ($(shell uname -sm),Linux x86_64)
test: lint unit test-vllm
else
test: lint unit
	@echo "no vLLM for the CPU on this platform: its tests were left out"
endif

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/python -m pytest -n 2 --durations 5

$(VLLM_STAMP): pyproject.toml constraints.txt tests/serving/install.sh
	tests/serving/install.sh $(PYTHON) $(VLLM_VENV)
	touch $(VLLM_STAMP)

test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest tests/serving --show-capture=no -p no:logging --durations 5

clean:
	rm -rf $(VENV) $(VLLM_VENV)
