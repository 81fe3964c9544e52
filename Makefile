# Everything a fresh machine needs is python3 >= 3.11; the rest is installed into .venv by the first command.
PYTHON ?= python3
BIN := .venv/bin
FALLEN := || [ $$? = 3 ]  # a claim that does not hold is a result: the others run
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test pages nightly lowest newest bench smoke docs clean

demo: .venv/stamp-demo  ## Train a small model on handwritten digits; run it again to go on where it stopped.
	$(BIN)/braidax train digits

# The processes that tests start find our modules compiled, also where Python was told to compile nothing.
test pages nightly: export PYTHONDONTWRITEBYTECODE :=

test: .venv/stamp-test  ## Lint, types, tests.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# Meanwhile all modules are compiled to bytecode, which else each process of the tests would do for itself.
	@$(BIN)/python -m pytest --collect-only --quiet >/dev/null 2>&1 & \
	  $(BIN)/pyright --pythonpath $(BIN)/python; status=$$?; wait; exit $$status
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

pages: .venv/stamp-test  ## What users copy: the examples, the tutorial and the blocks of the pages that the tests leave to the night.
	$(BIN)/python -m pytest -n 2 -m slow --timeout 900 tests/test_examples.py tests/laws/test_docs.py tests/laws/test_tutorial.py

nightly: .venv/stamp-nightly  ## The tests marked slow, and the oracles without the compiler's shortcuts.
	$(BIN)/python -m pytest -m slow --timeout 900 --session-timeout 14400
	BRAIDAX_TESTS_COMPILE=fully $(BIN)/python -m pytest -n 2 --dist loadfile --timeout 900 --session-timeout 14400 tests/parallel tests/program tests/tasks

VERSIONED := tests/program tests/checkpoint tests/cli tests/data tests/torch tests/laws/test_release.py

lowest: .venv-lowest/stamp  ## Tests with the lowest versions of all that is required.
	.venv-lowest/bin/python -m pytest -n 2 --dist loadfile $(VERSIONED)

newest: .venv-newest/stamp  ## Tests with the newest versions, of JAX beyond what pyproject.toml admits.
	BRAIDAX_TESTS_COMPILE=fully .venv-newest/bin/python -m pytest -n 2 --dist loadfile $(VERSIONED)  # new compilers know no old shortcuts

bench: .venv/stamp-bench .venv/peers/spectrax/stamp .venv-streaming/stamp .venv-torchrec/stamp .venv-frames/stamp  ## Run the benchmarks, peers beside us; ARGS="--quick" and the like are handed on.
	$(BIN)/python -m benchmarks.naive $(ARGS) $(FALLEN)
	$(BIN)/python -m benchmarks.comm $(ARGS) $(FALLEN)
	$(BIN)/python -m benchmarks.cylon --frames .venv-frames/bin/python $(ARGS) $(FALLEN)
	$(BIN)/python -m benchmarks.parax $(ARGS) $(FALLEN)
	$(BIN)/python -m benchmarks.parallax --torchrec .venv-torchrec/bin/python $(ARGS) $(FALLEN)
	$(BIN)/python -m benchmarks.sharded $(ARGS) $(FALLEN)
	$(BIN)/python -m benchmarks.sharded.compiled $(ARGS) $(FALLEN)
	$(BIN)/python -m benchmarks.rotated $(ARGS) $(FALLEN)
	$(BIN)/python -m benchmarks.pipedream $(ARGS) $(FALLEN)
	$(BIN)/python -m benchmarks.servers --fbgemm .venv-torchrec/bin/python $(ARGS) $(FALLEN)
	$(BIN)/python -m benchmarks.balance $(ARGS) $(FALLEN)
	$(BIN)/python -m benchmarks.checkfreq $(ARGS) $(FALLEN)
	$(BIN)/python -m benchmarks.formats $(ARGS) $(FALLEN)
	$(BIN)/python -W ignore -m benchmarks.shuffle --streaming .venv-streaming/bin/python $(ARGS) $(FALLEN)
	$(BIN)/python -m benchmarks.page

# Those whose peers lie in the same environment, or are left out where they are not installed.
SMOKED := comm sharded rotated balance checkfreq formats

smoke: .venv/stamp-bench  ## Some benchmarks in their smallest size; fails on a crash only, SMOKED="comm" chooses.
	for name in $(SMOKED); do echo "benchmarks.$$name --quick"; $(BIN)/python -m benchmarks.$$name --quick || exit; done

docs: .venv-docs/stamp  ## The documentation as a site, in build/site; every dead link is an error.
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

clean:  ## Remove the environment, build outputs and caches; data, checkpoints and traces stay.
	rm -rf .venv .venv-docs .venv-frames .venv-lowest .venv-newest .venv-streaming .venv-torchrec build dist .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +

.venv/stamp-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "braidax needs Python 3.11 or newer; $(PYTHON) is '$$($(PYTHON) --version 2>&1)'." \
	       "Install a newer one and name it: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: install its venv package" \
	       "(on Debian and Ubuntu: apt install python3-venv)." >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	@touch $@

# An install is repeated only when pyproject.toml, or what is compiled while installing, has changed.
COMPILED := hatch_build.py $(wildcard src/braidax/*/*/*.c src/braidax/*/*/*.h)

.venv/stamp-demo: .venv/stamp-python pyproject.toml $(COMPILED)
	$(INSTALL) --editable '.[tasks]'
	@touch $@

# The compiler for GPUs, the extra aot, lies where JAX does not look: JAX would complain at each start that no GPU is there.
PJRT = "jax-cuda12-pjrt==$$($(@D)/bin/python -c 'import jaxlib; print(jaxlib.__version__)')"

.venv/stamp-test: .venv/stamp-python pyproject.toml $(COMPILED)
	$(INSTALL) --editable '.[test]'
	rm -rf .venv/aot
	$(INSTALL) --no-deps --target .venv/aot $(PJRT)
	@touch $@

.venv/stamp-nightly: .venv/stamp-test
	$(INSTALL) 'tensorflow-cpu>=2.18'  # a source feeds tf.data
	$(INSTALL) --upgrade --no-deps --target .venv/aot 'libtpu>=0.0.42'
	@touch $@

.venv/stamp-bench: .venv/stamp-python pyproject.toml $(COMPILED)
	$(INSTALL) --editable '.[bench]'
	$(INSTALL) --upgrade --no-deps --target .venv/aot $(PJRT) 'libtpu>=0.0.42'
	@touch $@

# The extra docs without the package, whose docstrings are read and not imported.
.venv-docs/stamp: .venv/stamp-python pyproject.toml
	$(PYTHON) -m venv --clear .venv-docs
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > .venv-docs/requirements.txt
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --requirement .venv-docs/requirements.txt
	@touch $@

# The floors of what is required, and beside them what the tests need, as new as goes with them.
.venv-lowest/stamp: .venv/stamp-python pyproject.toml $(COMPILED)
	$(PYTHON) -m venv --clear .venv-lowest
	$(PYTHON) -c 'import re, tomllib; print(*(re.sub(r">=([\d.]+).*", r"==\1", line) for line in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]), sep="\n")' > .venv-lowest/constraints.txt
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-lowest/constraints.txt --editable '.[test]'
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv-lowest/aot $(PJRT)
	@touch $@

.venv-newest/stamp: .venv/stamp-python pyproject.toml $(COMPILED)
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --pre --editable '.[test]'
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --pre --no-deps jax jaxlib
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --pre --target .venv-newest/aot $(PJRT)
	@touch $@

# SpectraX is under the AGPL: it is run as a peer, by what its description tells, and stays in an environment of its own.
.venv/peers/spectrax/stamp: .venv/stamp-python
	$(PYTHON) -m venv --clear .venv/peers/spectrax
	.venv/peers/spectrax/bin/python -m pip install --quiet --disable-pip-version-check 'spectrax-lib==0.1.4' 'jax==0.10.2' 'optax==0.2.8' 'rich>=13.7'
	@touch $@

# MosaicML Streaming asks for older versions of what the other peers need newer. Its torchvision is not used.
.venv-streaming/stamp: .venv/stamp-python
	$(PYTHON) -m venv --clear .venv-streaming
	.venv-streaming/bin/python -m pip install --quiet --disable-pip-version-check 'torch==2.13.0'
	.venv-streaming/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'torchvision==0.28.0'
	.venv-streaming/bin/python -m pip install --quiet --disable-pip-version-check 'mosaicml-streaming>=0.13' 'torch==2.13.0' 'transformers<5'
	@touch $@

# torchrec asks for fbgemm-gpu, which overwrites files of fbgemm-gpu-cpu; 1.9 lacks a symbol with this torch.
.venv-torchrec/stamp: .venv/stamp-python
	$(PYTHON) -m venv --clear .venv-torchrec
	.venv-torchrec/bin/python -m pip install --quiet --disable-pip-version-check 'torch==2.13.0' numpy pyre-extensions tensordict 'torchmetrics==1.0.3' tqdm
	.venv-torchrec/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'fbgemm-gpu-cpu==1.8.0' 'torchrec==1.8.0'
	@touch $@

# Daft asks for an older Ray than the newest. Ray Data reads files through fsspec's HTTP part, whatever they are.
.venv-frames/stamp: .venv/stamp-python
	$(PYTHON) -m venv --clear .venv-frames
	.venv-frames/bin/python -m pip install --quiet --disable-pip-version-check 'daft[ray]>=0.7.26' 'ray[data]' 'dask[dataframe]>=2026.8' \
	  'distributed>=2026.8' 'duckdb>=2.0' 'pysail>=0.7.2' 'pyspark-client>=4.2' 'pandas>=3.1' 'tpchgen-cli>=4.0' 'fsspec[http]'
	@touch $@
