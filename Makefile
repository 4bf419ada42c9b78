# Two commands do everything: `make book` builds the site, `make test` proves it.
# Each makes its own environment from a hashed lock. PYTHON=python3.12 chooses
# the interpreter; MESHBOOK_SIZE and MESHBOOK_DATA pass through to the chapters.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
START := .venv-start
RAY := .venv-ray
AOT := .venv-aot
TRUST := .venv-trust
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
export UV_PYTHON_DOWNLOADS := never

.PHONY: help environment aot-environment start book test serve sync data bench aot aot-all \
	test-aot ray tensorboard screenshots pictures soak mutants generated-faults right-variants properties stranger trust links lock clean
help:
	@sed -n 's/^\([a-z-]*\):.*## /make \1: /p' Makefile

start: $(START)/installed-$(VERSION)  ## the preface alone, on the terminal
	@$(START)/bin/python book/_ext/run_chapter.py book/start-here.md

book: $(VENV)/installed-$(VERSION)  ## execute every chapter, build the site
	@rm -rf _build/.doctrees _build/html
	@find _build/compiled -type f -mtime +7 -delete 2>/dev/null || true
	@$(BIN)/jupyter-book build . -q -n -W --keep-going
	@echo "The book is at $(CURDIR)/_build/html/index.html"

TESTS ?= notebooks tests
REPORT ?= _build/tests.xml
WORKERS ?= 2
test: $(VENV)/installed-$(VERSION)  ## all tests; the chapters at the size "test"
	MESHBOOK_SIZE=test $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		--nbmake --durations=20 --junitxml=$(REPORT) $(TESTS)

environment: $(VENV)/installed-$(VERSION)  ## what book and test install, and no more

aot-environment: $(AOT)/installed-$(VERSION)  ## the TPU's compiler, for aot and test-aot

serve:  ## the built site on http://127.0.0.1:8000, for this machine only
	$(PYTHON) -m http.server 8000 --bind 127.0.0.1 --directory _build/html

sync: $(VENV)/installed-$(VERSION)  ## write notebooks/ from book/
	@$(BIN)/python book/_ext/notebooks.py

data: $(VENV)/installed-$(VERSION)  ## download CIFAR-10 and TinyStories into MESHBOOK_DATA, or data/
	@$(BIN)/python -m meshbook.data.images "$(or $(MESHBOOK_DATA),data)"
	@$(BIN)/python -m meshbook.data.stories "$(or $(MESHBOOK_DATA),data)"

bench: $(VENV)/installed-$(VERSION)  ## every benchmark, into results/
	@$(BIN)/python -m benchmarks

aot: $(AOT)/installed-$(VERSION)  ## compile the nine experiments for TPUs that are not here, into results/
	@$(AOT)/bin/python -m benchmarks.aot

aot-all: $(AOT)/installed-$(VERSION)  ## and all other programs that the book has compiled for TPUs
	@$(AOT)/bin/python -m benchmarks.aot all
	@$(AOT)/bin/python -m benchmarks.aot_overlap

test-aot: $(AOT)/installed-$(VERSION)  ## the tests that need the TPU's compiler
	$(AOT)/bin/python -m pytest -o addopts=-ra -n 2 --junitxml=$(REPORT) \
		tests/planning/test_topologies.py tests/planning/test_dry_runs.py \
		tests/planning/test_mesh_programs.py

tensorboard: $(VENV)/installed-$(VERSION)  ## chapter 9's runs in TensorBoard, for this machine only
	@$(BIN)/python -m meshbook.profiling.tensorboard _build/profiles

screenshots: $(VENV)/installed-$(VERSION)  ## take the book's pictures of TensorBoard again
	@$(BIN)/python book/_ext/screenshots.py

pictures: $(VENV)/installed-$(VERSION)  ## take what the tests draw now for what somebody has looked at
	@MESHBOOK_PICTURES=1 $(BIN)/python -m pytest -q tests/drawing

soak: $(VENV)/installed-$(VERSION)  ## kill training runs 50 times, of one process and of four; compare every loss
	@$(BIN)/python tests/support/soak.py 50
	@$(BIN)/python tests/support/soak.py 50 0 4

mutants: $(VENV)/installed-$(VERSION)  ## plant faults in the package, and see which page catches each
	@$(BIN)/python -m benchmarks.mutants

generated-faults: $(VENV)/installed-$(VERSION)  ## plant faults that a seed draws, all of them (hours), or PART=2/7
	@$(BIN)/python -m benchmarks.generated $(PART)

right-variants: $(VENV)/installed-$(VERSION)  ## rewrite the package where it is right, in a hundred ways: nothing may fail
	@$(BIN)/python -m benchmarks.variants $(PART)

LOCK = $(BIN)/uv pip compile -q --universal --python-version 3.11 --upgrade \
	--generate-hashes --no-emit-index-url --custom-compile-command "make lock"
NEEDED = jax|jaxlib|flax|optax|numpy|jaxtyping|grain|scikit-learn|pillow|torchvision|pooch|tqdm|tiktoken|$\
tokenizers|fsspec|pyarrow|orbax-checkpoint|tensorboard|xprof|pandas|matplotlib|rich
lock: $(VENV)/installed-$(VERSION)  ## resolve the requirements again
	$(LOCK) requirements-dev.txt -o requirements.lock
	$(LOCK) requirements-start.txt -c requirements.lock -o requirements-start.lock
	$(LOCK) requirements-aot.txt -c requirements.lock -o requirements-aot.lock
	$(LOCK) requirements-ray.txt -c requirements.lock -o requirements-ray.lock
	$(LOCK) requirements-trust.txt -o requirements-trust.lock
	echo uv | $(LOCK) - -o requirements-uv.lock
	sed -nE 's/^(($(NEEDED))==.*[^ ]) \\$$/\1/p' requirements.lock > meshbook/hosts/pins.txt

properties: $(VENV)/installed-$(VERSION)  ## many examples of each property, others each time (long)
	MESHBOOK_LONG=1 $(MAKE) test TESTS="$$(grep -rl '^from properties' tests)"

stranger: $(VENV)/installed-$(VERSION)  ## every notebook as in Colab, where the repository is not (Python 3.13)
	@$(BIN)/python tests/support/stranger.py

ray: $(RAY)/installed-$(VERSION)  ## Ray, for the test that makes a corpus with it

trust: $(TRUST)/installed-$(VERSION)  ## faults in the workflows, vulnerabilities in the locks (asks the internet)
	@$(TRUST)/bin/zizmor --offline --persona=auditor .github/workflows
	-@for lock in requirements*.lock; do \
		$(TRUST)/bin/pip-audit --require-hashes --disable-pip -r $$lock; done

links: $(TRUST)/installed-$(VERSION)  ## follow every link of the built site (asks the internet)
	@$(TRUST)/bin/linkchecker --check-extern --no-status _build/html/index.html

clean:  ## remove what was built, and the environments
	rm -rf _build .venv* *.egg-info

$(VENV)/installed-$(VERSION): requirements.lock pyproject.toml
	@$(call install,$(VENV),requirements.lock,--compile-bytecode)
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps \
		--no-build-isolation --editable .
	@touch $@

$(START)/installed-$(VERSION): requirements-start.lock
	@$(call install,$(START),requirements-start.lock)
	@touch $@

$(AOT)/installed-$(VERSION): requirements-aot.lock
	@$(call install,$(AOT),requirements-aot.lock,--compile-bytecode)
	@touch $@

$(RAY)/installed-$(VERSION): requirements-ray.lock
	@$(call install,$(RAY),requirements-ray.lock)
	@touch $@

$(TRUST)/installed-$(VERSION): requirements-trust.lock
	@$(call install,$(TRUST),requirements-trust.lock)
	@touch $@

# Nothing is installed whose hash is not in a lock, uv itself included. Bytecode once, for the
# dozens of processes that the pages and the tests are: each would compile its imports for seconds.
define install
$(if $(filter $(VERSION),3.11 3.12 3.13),,$(error The book needs Python 3.11 to 3.13, \
	and $(PYTHON) is $(or $(VERSION),not there): try make PYTHON=python3.12))
echo "Installing $(2) into $(1) ..."
$(PYTHON) -m venv --clear $(1)
$(1)/bin/python -m pip install -qq --disable-pip-version-check \
	--require-hashes -r requirements-uv.lock
$(1)/bin/uv pip install -q $(3) --python $(1)/bin/python --require-hashes -r $(2)
endef
