# make setup       .venv with everything, pinned           make quickstart [SEED=k]   GRPO, DCPO, DCPO-proper on CPU
# make test        the test suite                          make lint                  ruff and mypy
PYTHON ?= python3
SEED ?= 1
OUT ?= runs/quickstart
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup quickstart policy test test-grid test-resilience test-soak test-slurm test-multinode test-gpu lint fuzz reference-solutions clean

setup: $(VENV)/.installed

# torch first and alone: its CPU build satisfies the pin where pip can find it, and nothing later replaces it.
$(VENV)/.installed: setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable ".[cpu,dev]" --constraint constraints.txt
	touch $@

quickstart: setup
	$(BIN)/python examples/quickstart/run.py --seed $(SEED) --out $(OUT)

# rebuild the starting policy and the problems of the quickstart (they are in git)
policy: setup
	$(BIN)/python examples/quickstart/make_policy.py

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests

# every combination of the invariance grid (about 1,300 settings on up to 8 processes; the suite covers every pair)
test-grid: setup
	OMP_NUM_THREADS=1 DCPO_GRID=full $(BIN)/python -m pytest tests/distributed/test_grid.py

# 20 SIGKILLs at random moments, half of them in the middle of a save (the suite makes 4)
test-resilience: setup
	OMP_NUM_THREADS=1 DCPO_KILLS=20 $(BIN)/python -m pytest tests/system/test_checkpoints.py tests/system/test_signals.py \
		tests/distributed/test_watch.py tests/distributed/test_nonfinite.py

# 500 steps of the quickstart: memory, threads, files, processes, shared memory
test-soak: setup
	OMP_NUM_THREADS=1 DCPO_SOAK=500 $(BIN)/python -m pytest -s tests/system/test_soak.py

# a real Slurm of two nodes (network namespaces, as root): warned, killed, requeued, resumed. Installs Debian's packages
test-slurm: setup
	command -v slurmctld >/dev/null && command -v munged >/dev/null && command -v ip >/dev/null || \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge iproute2; }
	OMP_NUM_THREADS=1 DCPO_TEST_SLURM=1 $(BIN)/python -m pytest -rs tests/slurm

# two nodes (network namespaces, as root): a rank, a launcher, a node killed, the link cut
test-multinode: setup
	OMP_NUM_THREADS=1 DCPO_TEST_MULTINODE=1 $(BIN)/python -m pytest -rs tests/multinode

# on a machine with a GPU: the same commands on CUDA, NCCL, Transformer Engine
test-gpu: setup
	$(BIN)/python -m pytest -rs tests/gpu

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# 200,000 fuzzed outputs through the confidence parser and the block splitter (the suite runs 5,000)
fuzz: setup
	DCPO_FUZZ=200000 $(BIN)/python -m pytest tests/unit/test_blocks.py

# every reference solution of LeetCodeDataset through the judge: at least 99 % must pass (DATA: where the files are)
DATA ?= ../shared/data
reference-solutions: setup
	$(BIN)/python benchmarks/reference_solutions.py $(DATA)/leetcodedataset/*.jsonl.gz

clean:
	rm -rf runs build *.egg-info
