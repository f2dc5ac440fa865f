# make setup       .venv with everything, pinned           make quickstart [SEED=k]   GRPO, DCPO, DCPO-proper on CPU
# make test        the test suite                          make lint                  ruff and mypy
PYTHON ?= python3
SEED ?= 1
OUT ?= runs/quickstart
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup setup-sandbox quickstart policy test lint fuzz attacks code-data clean

setup: $(VENV)/.installed

# torch first and alone: its CPU build satisfies the pin where pip can find it, and nothing later replaces it.
$(VENV)/.installed: setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable ".[cpu,dev]" --constraint constraints.txt
	touch $@

# bubblewrap, for programs that models write; where it cannot be had, tests run under Landlock and say so
setup-sandbox:
	@command -v bwrap >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get -qq update && \
		apt-get -qq install --yes bubblewrap >/dev/null; } || echo "bubblewrap is not installed and could not be: programs are tested under Landlock only" >&2

quickstart: setup
	$(BIN)/python examples/quickstart/run.py --seed $(SEED) --out $(OUT)

# rebuild the starting policy and the problems of the quickstart (they are in git)
policy: setup
	$(BIN)/python examples/quickstart/make_policy.py

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# 200,000 fuzzed outputs through the confidence parser and the block splitter (the suite runs 5,000)
fuzz: setup
	DCPO_FUZZ=200000 $(BIN)/python -m pytest tests/unit/test_blocks.py

# hostile programs against every sandbox that works here
attacks: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/sandbox/test_attacks.py

# MBPP+ and LeetCodeDataset: canonical solutions pass, changed ones fail (long)
code-data: setup
	DCPO_ALL_CODE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/sandbox/test_datasets_pass.py

clean:
	rm -rf runs build *.egg-info
