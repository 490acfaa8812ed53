# make book    build the book into _build/html
# make test    lint, types, tests, and every chapter re-executed
# make quick   lint, types, and the tests that take seconds; no chapters
# make gpu     run the experiments, then every chapter, at the paper's sizes;
#              SCALE=smoke does the same in minutes, without a GPU
# make lab     open the chapters in JupyterLab
# make experiments  run the paper's experiments; stop it when you like, it goes on
# make mirror  write src/swindles/*.py from the chapters
# make lock    compile constraints.txt anew
# make wheel   what is released, into dist
# make clean   remove what was built (.venv stays)
#
# EXTRA=cuda12 installs JAX for an NVIDIA GPU; PYTHON names another interpreter.

PYTHON ?= python3
EXTRA ?=
SCALE ?= paper

comma := ,
extras := book,test$(if $(EXTRA),$(comma)$(EXTRA))
bin := .venv/bin
ready := .venv/.ready-$(extras)
viewers := .venv/share/jupyter/lab/settings/overrides.d/jupytext.json
linted := $(wildcard src tests tools benchmarks conftest.py book/*.py)

# With these XLA compiles for a CPU in less time, and what it compiles is as fast.
quickly := --xla_cpu_use_fusion_emitters=false
on_cpu := XLA_FLAGS="$(quickly) $$XLA_FLAGS"
in_chapters := $(if $(filter paper,$(SWINDLES_SCALE)),,XLA_FLAGS="$(quickly) \
	--xla_backend_optimization_level=1 $$XLA_FLAGS" OPENBLAS_NUM_THREADS=1)

# What a build depends on, as one line. The execution cache and Sphinx see neither a
# changed module, nor lock, nor scale: when $(code) differs, they start afresh.
code := src book/experiments.py book/pipeline.py pyproject.toml constraints.txt
text := book _config.yml _toc.yml tools CITATION.cff
fingerprint = { echo "$(SWINDLES_SCALE) $(extras)"; find $1 -type f ! -name '*.pyc' \
	! -path '*/.*' | LC_ALL=C sort | xargs cksum; } | cksum

.PHONY: book test quick gpu lint lab experiments mirror lock wheel clean

book: $(ready)
	@$(call fingerprint,$(code)) | cmp -s - _build/.code || \
		{ rm -rf _build && mkdir _build && $(call fingerprint,$(code)) > _build/.code; }
	@$(call fingerprint,$(code) $(text)) | cmp -s - _build/.book || $(MAKE) -s _build/html
	@echo "The book is in _build/html/index.html"

.PHONY: _build/html
_build/html:
	@rm -f _build/.book
	@$(bin)/python tools/mirror.py --check
	@echo "Running the chapters"
	@$(in_chapters) $(bin)/python tools/execute.py $(if $(EXTRA),1,2) 2> _build/run.log || \
		{ grep -v IPKernelApp _build/run.log; exit 1; }
	@echo "Building the book"
	@$(bin)/jupyter-book build . -W --keep-going -q > _build/build.log 2>&1 || \
		{ grep -v IPKernelApp _build/build.log; rm -rf _build/.doctrees; exit 1; }
	@$(bin)/python tools/offline.py _build/html
	@$(call fingerprint,$(code) $(text)) > _build/.book

# Two workers with two threads each for linear algebra would wait for each other. Tests
# and chapters compile many of the same programs: the second finds them on disk.
cached := JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.pytest_cache/jax \
	JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
run_tests = OPENBLAS_NUM_THREADS=1 $(cached) $(on_cpu) $(bin)/python -m pytest -q -n 2
lint: $(ready)
	@$(bin)/ruff check -q $(linted)
	@$(bin)/ruff format -q --check $(linted)
	@$(bin)/mypy --no-error-summary

test: lint
	@$(run_tests)

quick: lint
	@$(run_tests) -m "not slow" tests

# One process at a time has the GPU; without one, two share the cores.
workers = $(if $(filter smoke,$(SCALE)),-n 2)
at_scale = SWINDLES_SCALE=$(SCALE) $(cached) $(if $(filter smoke,$(SCALE)),$(on_cpu))
gpu: $(ready)
	@echo "Experiments, then chapters, at scale $(SCALE)"
	@$(at_scale) $(bin)/python book/experiments.py
	@$(at_scale) $(bin)/python -m pytest -q book $(workers)

lab: $(ready) $(viewers)
	@cd book && ../$(bin)/jupyter lab

experiments: $(ready)
	@$(bin)/python book/experiments.py

mirror: $(ready)
	@$(bin)/python tools/mirror.py

lock: $(bin)/uv
	@$(bin)/uv pip compile -q --universal --fork-strategy fewest --python-version 3.11 \
		--all-extras --no-emit-index-url --no-emit-find-links --upgrade \
		--custom-compile-command "make lock" pyproject.toml -o constraints.txt

wheel: $(ready)
	@rm -rf dist && $(bin)/uv build -q -o dist

clean:
	@rm -rf _build dist .pytest_cache .mypy_cache .ruff_cache
	@find src tests tools benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

$(bin)/uv:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
		"swindles needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] \
		+ ". Name another one: make PYTHON=python3.12")'
	@echo "Setting up .venv"
	@$(PYTHON) -m venv .venv
	@$(bin)/python -m pip install -q --disable-pip-version-check -c constraints.txt uv

$(ready): pyproject.toml constraints.txt | $(bin)/uv
	@echo "Installing $(extras)"
	@$(bin)/uv pip install -q --python $(bin)/python -c constraints.txt -e '.[$(extras)]'
	@touch $@

$(viewers): $(ready)
	@mkdir -p $(@D)
	@printf '{"@jupyterlab/docmanager-extension:plugin": {"defaultViewers": {%s, %s}}}\n' \
		'"markdown": "Jupytext Notebook"' '"myst": "Jupytext Notebook"' > $@
