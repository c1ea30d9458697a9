# The verbs of the house; `make study` is the one command.
BIN := .venv/bin
READY := .venv/ready
# What describes the study from outside has an environment of its own.
SUPPLY := .setup/supply
LOCK := uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --quiet \
	--override overrides.txt
# A set-up without bytecode makes every later import slow.
unexport PYTHONDONTWRITEBYTECODE
# Snakemake, Triton and PyTorch keep their caches there.
ifeq ($(shell test -n "$$HOME" && test -w "$$HOME" && echo yes),)
export HOME := $(CURDIR)/.home
endif

.PHONY: study smoke paper report test test-all mutants docs lint image image-test lint-image sbom \
	audit crate cluster slurm-test record tuned capabilities headline lock setup peers latex clean \
	image-archive

study: setup
	$(BIN)/snakemake --cores all

smoke: setup
	$(BIN)/snakemake --cores all --configfile config/smoke.yaml

paper report: setup
	$(BIN)/snakemake --cores all $@

# Without the network the tests against Hugging Face's models are skipped, and the others run.
test: MARKED = -m 'not slow'
test test-all: setup
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements/network.txt \
		|| echo "tilewright: requirements/network.txt is not installed; its tests are skipped" >&2
	$(BIN)/python -m pytest $(MARKED) -n 3 --dist worksteal --durations=30

mutants: setup
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements/mutants.txt
	$(BIN)/python tests/mutants.py $(ONLY)

# Strict: a dead link or an anchor that is gone is an error.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

lint: $(READY)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/codespell
	$(BIN)/snakefmt --check Snakefile workflow && $(BIN)/snakemake --lint && $(BIN)/lint-imports
	$(BIN)/python docs/prose.py && $(BIN)/python docs/lab/index.py --check
	$(BIN)/python docs/rooms.py --check && $(BIN)/python docs/formats.py --check

# Arguments of the Dockerfile, as far as they are named: make image FLASH_ATTN=no
GIVEN := $(foreach name,BASE_IMAGE RUNTIME_IMAGE FLASH_ATTN FLASH_ATTN_CUDA_ARCHS MAX_JOBS TILEWRIGHT_SOURCE,\
	$(if $($(name)),--build-arg $(name)='$($(name))'))

BUILD = build --tag tilewright $(GIVEN) \
	--build-arg TILEWRIGHT_VERSION=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) --build-arg \
	TILEWRIGHT_COMMIT=$$(git rev-parse HEAD)$$(test -z "$$(git status --porcelain)" || echo -dirty) .

image:
	docker $(BUILD)

# One file to hand over: docker load, podman load and apptainer build read it.
image-archive:
	docker buildx $(BUILD) --output \
		type=oci,dest=tilewright.oci.tar,compression=zstd,compression-level=9,force-compression=true

image-test: lint-image
	image/test.sh

lint-image: $(SUPPLY)/ready
	$(SUPPLY)/bin/hadolint Dockerfile

sbom: $(READY) $(SUPPLY)/ready
	mkdir -p results/sbom
	$(SUPPLY)/bin/python image/sbom.py --environment .venv --out results/sbom

# Asks the network for known faults of the locked packages; one that cannot be judged is a failure.
audit: $(SUPPLY)/ready
	$(SUPPLY)/bin/pip-audit --disable-pip --require-hashes --strict --progress-spinner off \
		$(foreach set,cuda peers flash-attn,-r requirements/$(set).txt)

$(SUPPLY)/ready: requirements/supply.txt
	$(or $(PYTHON),python3) -m venv --clear $(SUPPLY)
	$(SUPPLY)/bin/python -m pip install --quiet --require-hashes --no-deps -r $< && touch $@

crate: $(READY)
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements/crate.txt
	$(BIN)/python -m harness.results.crate --run results/study --out results/study.crate.zip

cluster: $(READY)
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements/cluster.txt

slurm-test: cluster
	SLURM_SMOKE=1 $(BIN)/python -m pytest -ra tests/cluster

record: $(READY)
	$(BIN)/python -m harness.results.record --run results/study --into $(or $(INTO),$(error say where: make record INTO=results/recorded/<machine>))

tuned: $(READY)
	$(BIN)/python -m harness.tune.merge --run results/study --into kernels/tuned

capabilities: $(READY)
	$(BIN)/python -m harness.summarize.capabilities --recorded results/recorded/hopper --out docs/capabilities.md

headline:
	cp results/study/figures/headline.svg docs/
	$(BIN)/python paper/readme.py --run results/study --out README.md

lock: $(READY)
	$(BIN)/python -m pip install --quiet uv
	cd requirements && for set in study.in *.in; do ../$(BIN)/$(LOCK) $$set -o $${set%.in}.txt; done

setup: $(READY) latex
	@requirements/setup.sh check .venv

peers: $(READY)
	$(BIN)/python -m pip install --require-hashes --no-deps -r requirements/peers.txt

$(READY): $(addprefix requirements/,setup.sh study.txt cuda.txt cpu.txt)
	requirements/setup.sh python .venv && touch $@

latex:
	@requirements/setup.sh latex

# Runs that were measured stay, unless RUN names them here: one that a shell exports names none.
clean:
	$(or $(wildcard $(BIN)/python),python3) -m harness.results.measured \
		--also $(if $(findstring command,$(origin RUN)),$(RUN))
