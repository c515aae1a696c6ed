# Two commands matter: `make demo` trains, loses a rank and goes on; `make test` checks everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: bench-watched demo fuzz test lint types unit oracle parity nightly kills reconfigure bench-language replay bench-simulator bench-membership pictures gap never-worse uniformity amplification bench-schedules bench-compiler bench-search bench-emulated bench-interpreter bench-executor bench-iteration bench-chunks gpu-check clean bench-heartbeats
.DELETE_ON_ERROR:

# Train and lose a rank half-way; then the same job without the loss, and the two compared.
demo: $(VENV)/.run
	$(BIN)/resihp train examples/stdlib.toml
	$(BIN)/resihp train examples/stdlib.toml --no-inject
	$(BIN)/resihp compare

test: lint types unit

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/pyright --pythonpath $(BIN)/python

unit: $(VENV)/.dev
	$(BIN)/python -m pytest

# The verifier against slow oracles and real runs of random plans, far more than in the suite.
oracle: $(VENV)/.dev
	$(BIN)/python tests/ir/oracle.py

# Plans of the whole grid trained for ten steps, against training in one process; WORDS=... some.
parity: $(VENV)/.dev
	$(BIN)/python tests/executor/parity.py $(WORDS)

# What strangers may send and what plans may hold, far more of it than in the suite.
fuzz: $(VENV)/.dev
	$(BIN)/python -m pytest --hypothesis-profile=long --timeout=1200 -k "not golden" tests/wire tests/ir/test_fuzz.py

nightly: fuzz oracle parity gap never-worse sweep schedules
	$(BIN)/python -m pytest -m nightly

kills: $(VENV)/.run
	$(BIN)/python benchmarks/random_kills.py

reconfigure: $(VENV)/.run
	$(BIN)/python benchmarks/reconfigure.py

# Times of the plan language; FILE=... says where the numbers of the run before are.
bench-language: $(VENV)/.run
	$(BIN)/python benchmarks/language.py $(if $(FILE),--results $(FILE))

# Whole simulated clusters under random faults, 10,000 seeded schedules; ARGS="--family F --seed S".
schedules: $(VENV)/.dev
	$(BIN)/python tests/monitor/schedules.py $(ARGS)

# Production traces played by the simulator; says so where ../shared/data is not there.
replay: $(VENV)/.bench
	$(BIN)/python benchmarks/trace_replay.py

bench-simulator: $(VENV)/.run
	$(BIN)/python benchmarks/simulator.py $(if $(FILE),--results $(FILE))

# Who holds what after failures, and how often devices that flap are taken back.
bench-membership: $(VENV)/.run
	$(BIN)/python benchmarks/membership.py $(if $(FILE),--results $(FILE))

# The pictures of the docs, of the plans beside them.
pictures: $(VENV)/.run
	$(BIN)/resihp show docs/pictures/zb-h1.plan --unit --format svg -o docs/pictures/zb-h1.svg
	$(BIN)/resihp show docs/pictures/migrated.plan --cluster a100-2048x8 --slow rank=4,5:0.5 --width 1320 --format svg -o docs/pictures/migrated.svg

# Planned makespans beside proven optima; N=... small states.
gap: $(VENV)/.bench
	$(BIN)/python benchmarks/optimality_gap.py $(if $(N),--states $(N))

# Every schedule beside its published bubble and the optimum; orders for slow links.
bench-schedules: $(VENV)/.bench
	$(BIN)/python benchmarks/schedules.py

# All policies on random failure states; fails where one has a faster plan than ours. N=... states.
never-worse: $(VENV)/.dev
	$(BIN)/python benchmarks/never_worse.py $(if $(N),--states $(N))

uniformity: $(VENV)/.dev
	$(BIN)/python benchmarks/uniformity.py

amplification: $(VENV)/.run
	$(BIN)/python benchmarks/amplification.py

# Times of the compiler, 64 to 16,384 GPUs; FILE=... says where the numbers of the run before are.
bench-compiler: $(VENV)/.run
	$(BIN)/python benchmarks/compiler.py $(if $(FILE),--results $(FILE))

# Degrees and schedules found by simulation, beside those of the paper.
bench-search: $(VENV)/.run
	$(BIN)/python benchmarks/degrees.py

# What the interpreter costs per instruction.
bench-interpreter: $(VENV)/.run
	$(BIN)/python benchmarks/interpreter.py

# How late heartbeats are while ranks compute; give each rank a core.
bench-heartbeats: $(VENV)/.run
	$(BIN)/python benchmarks/heartbeats.py $(ARGS)

# An iteration, ours against torch.distributed.pipelining, in pairs on an idle machine.
bench-executor: $(VENV)/.run
	$(BIN)/python benchmarks/executor_speed.py $(ARGS)

# Real iterations of two ranks beside the simulator's makespan at their own chunk times.
bench-iteration: $(VENV)/.run
	$(BIN)/python benchmarks/real_iteration.py $(ARGS)

# F, B and W of a stage, in CPU time beside plain autograd.
bench-chunks: $(VENV)/.run
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/chunks.py $(ARGS)

# What one GPU can show, in less than eight minutes; says so where there is none. ARGS=--cpu tries it.
gpu-check: $(VENV)/.dev
	$(BIN)/python benchmarks/gpu_check.py $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find resihp tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The stamps say that the environment holds what the pins ask for.
$(VENV)/.run: requirements.txt pyproject.toml | $(BIN)/python
	$(PIP) -r requirements.txt
	$(PIP) --no-build-isolation --no-deps --editable .
	touch $@

$(VENV)/.dev: requirements-dev.txt $(VENV)/.run
	$(PIP) -r requirements-dev.txt
	touch $@

$(VENV)/.bench: requirements-bench.txt $(VENV)/.run
	$(PIP) -r requirements-bench.txt
	touch $@

# Emulated devices against the simulator, in real and in virtual time.
bench-emulated: $(VENV)/.run
	$(BIN)/python benchmarks/emulated.py

.PHONY: chaos schedules sweep sequences bench-resilience

# A job under a mix of faults, with a score. ARGS="--minutes 60" is the long one.
chaos: $(VENV)/.run
	$(BIN)/resihp chaos examples/chaos.toml $(or $(ARGS),--faults 12)

# A death at every instruction of every rank, in vote, update and recovery; ARGS="--every 10".
sweep: $(VENV)/.dev
	$(BIN)/python tests/e2e/deaths.py $(ARGS)

# Fault sequences of a public reproduction; ARGS=NAME one of them.
sequences: $(VENV)/.run
	$(BIN)/python benchmarks/sequences.py $(ARGS)

# The measured targets of surviving faults; ARGS="--parts kills --faults 100".
bench-resilience: $(VENV)/.run
	$(BIN)/python benchmarks/resilience.py $(ARGS)

.PHONY: bench-checkpoint

# What a saved version costs: the copy, the write beside it, the load. ARGS="--mebibytes 1024".
bench-checkpoint: $(VENV)/.run
	$(BIN)/python benchmarks/checkpoints.py $(ARGS)

.PHONY: bench-state

# What snapshots, audits and checked parcels cost. ARGS="--rounds 0": CPU times alone.
bench-state: $(VENV)/.run
	$(BIN)/python benchmarks/state.py $(ARGS)

.PHONY: bench-step

# A step of a job in which nothing fails, beside one without anything around the executors.
bench-step: $(VENV)/.run
	$(BIN)/python benchmarks/fault_free.py $(ARGS)

# What the watchers alone cost, within one job: they stand still in turn.
bench-watched: $(VENV)/.run
	$(BIN)/python benchmarks/watched.py $(ARGS)
