# What CI runs and what a developer runs are the same targets. `make test` and `make check` start
# from a bare Debian machine with Rust on it, and install what they need when they are root.

FUZZ_SECONDS = 60
KILLS = 1000
KILLS_SHARED_S = 60
FAILOVER_S = 600
# Virtual environments of Python, each with the packages that the file of its name lists.
PARTS = tests/.parts
# Where the instrumented gateway and its profile lie, and what merges profiles: the toolchain's (`rustup component add
# llvm-tools`), or Debian's.
TRAINING = target/training
PROFDATA ?= $(firstword $(wildcard $(shell rustc --print target-libdir)/../bin/llvm-profdata) llvm-profdata-19)
# The loom models of the limiter.
MODELS = cargo test --locked --no-fail-fast --profile model -p transom-limiter --features loom --test models
DENY = cargo deny --version >/dev/null 2>&1

.PHONY: help test check release bench model kills kills-shared failover fuzz parts deny advisories
# Two of them would build, install or measure at once.
.NOTPARALLEL:

help:
	@echo "make test        run all tests; installs the servers they talk to"
	@echo "make check       formatting, lints, documentation, licenses of dependencies"
	@echo "make release     target/dist/transom: optimized by a profile of itself under load; builds twice"
	@echo "make bench       builds a release; CPU time per request, beside nginx, HAProxy and Envoy; memory; slow clients"
	@echo "make model       the counting room's models again, with wider bounds"
	@echo "make kills       the gateway killed KILLS times (1000) under load: nobody gets more than the limit"
	@echo "make kills-shared  four gateways on one Redis, killed for KILLS_SHARED_S seconds (60) under load, likewise"
	@echo "make failover    one of two upstream servers killed again and again for FAILOVER_S seconds (600) under load: no request is lost"
	@echo "make fuzz        searches for input that breaks what reads it, FUZZ_SECONDS each (60)"
	@echo "make advisories  known vulnerabilities of dependencies; fetches their list"

# --no-fail-fast: one run shows everything that is broken.
test: parts
	cargo test --locked --no-fail-fast --workspace
	$(MODELS)
	@! ls -l /proc/[0-9]*/exe 2>/dev/null | grep -F ' $(CURDIR)/target/debug/transom' || { \
		echo "The tests have left a gateway running." >&2; exit 1; }

check: deny
	cargo fmt --check --all
	cargo clippy --locked --workspace --all-targets -- -D warnings
	cargo clippy --locked -p transom-limiter --features loom --test models -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --document-private-items
	cargo deny --locked check bans licenses sources

# The instrumented build scripts have written profiles too: they are removed. Cargo does not see that a profile has
# changed, so what was built by the last one is removed as well.
release:
	$(if $(word 2,$(CURDIR)),$(error `make release` needs a path without spaces))
	PROFDATA=$(PROFDATA) tests/external/debian.sh release
	RUSTFLAGS="$$RUSTFLAGS -Cprofile-generate=$(CURDIR)/$(TRAINING)/counts" \
		cargo build --locked --profile dist --bin transom --target-dir $(TRAINING)
	rm -rf $(TRAINING)/counts
	python3 benches/train.py --transom $(TRAINING)/dist/transom
	$(PROFDATA) merge --output $(TRAINING)/profile $(TRAINING)/counts || { \
		echo "What merges profiles must fit the compiler: rustup component add llvm-tools" >&2; exit 1; }
	cargo clean --quiet --profile dist --target-dir target
	RUSTFLAGS="$$RUSTFLAGS -Cprofile-use=$(CURDIR)/$(TRAINING)/profile" \
		cargo build --locked --profile dist --bin transom --target-dir target

bench: release $(PARTS)/envoy/installed
	cargo build --locked --release --target-dir target
	cargo bench --locked
	python3 benches/beside.py
	python3 benches/http2.py
	python3 benches/idle.py
	python3 benches/slow.py
	python3 benches/shared.py

model:
	TRANSOM_MODEL_EXTRA=1 $(MODELS)

# `make test` kills a few times; this says what came of it.
kills:
	TRANSOM_KILLS=$(KILLS) cargo test --locked --test integration -- kills:: kill_while --nocapture --test-threads=1

# Four gateways on one Redis, killed under load.
kills-shared:
	TRANSOM_KILLS_SHARED_S=$(KILLS_SHARED_S) cargo test --locked --test integration -- shared_kills:: --nocapture --test-threads=1

# Two upstream servers killed and started again under 2,000 requests a second, with the default settings. A release build,
# for the load.
failover:
	TRANSOM_FAILOVER_S=$(FAILOVER_S) cargo test --locked --release --test integration -- lose_no_request_under_load --nocapture --test-threads=1

# A nightly compiler instruments what the fuzzer runs. Where there is none, the one that builds everything else is told
# to take the flags of one: that holds for this build alone, which nobody ships. Inputs are long from the first:
# left to itself the fuzzer begins with single bytes, and after a minute has tried no configuration of 18.
fuzz:
	@cargo fuzz --version >/dev/null 2>&1 || cargo install --locked cargo-fuzz
	if RUSTUP_AUTO_INSTALL=0 cargo +nightly --version >/dev/null 2>&1; then fuzz="cargo +nightly fuzz"; \
	else fuzz="cargo fuzz"; export RUSTC_BOOTSTRAP=1; fi; \
	for target in $$($$fuzz list); do \
		case $$target in configuration) seeds="tests/config/good tests/config/bad" ;; *) seeds= ;; esac; \
		mkdir -p fuzz/corpus/$$target; \
		$$fuzz run $$target fuzz/corpus/$$target $$seeds -- \
			-max_total_time=$(FUZZ_SECONDS) -len_control=0 -print_final_stats=1 || exit 1; \
	done

# The servers and programs that tests talk to.
parts: $(PARTS)/httpbin/installed $(PARTS)/clients/installed $(PARTS)/browser/packages
	tests/external/debian.sh

$(PARTS)/%/installed: tests/external/%.txt
	tests/external/debian.sh
	rm -rf $(@D)
	python3 -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

# What drives the browser, by a Node.js of its own.
$(PARTS)/browser/packages: $(PARTS)/browser/installed tests/external/browser/package.json tests/external/browser/package-lock.json
	cp tests/external/browser/*.json $(@D)
	cd $(@D) && PATH="$$PWD/bin:$$PATH" npm ci --ignore-scripts --no-audit --no-fund --no-update-notifier
	touch $@

deny:
	@$(DENY) || cargo install --locked cargo-deny

advisories: deny
	cargo deny --locked check advisories
