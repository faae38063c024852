#!/usr/bin/env python3
"""Shows that the exploration of crates/store finds mistakes: breaks the code in one way at a time, in a copy.

    python3 tests/broken_store.py [NAME...]

`make broken-store` runs it. The exit code is 1 if a mistake is not found, or if its place in the code has changed.
"""

import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
COPY = os.path.join(ROOT, "target", "broken-store")

# What is wrong, the file in crates/store/src, the code, and the code with the mistake.
MISTAKES = [
    (
        "a refund goes to the window after that of the charge",
        "scripts.rs",
        "let RefundTarget { kind, number, limit, used_max, counter, .. } = *self;",
        "let RefundTarget { kind, mut number, limit, used_max, counter, .. } = *self;\n        number += 1;",
    ),
    (
        "a refund gives the place of requests that wait to others",
        "shared_counters.rs",
        "rule.rule.delays().then_some(layer.request.limit.into())",
        "rule.rule.delays().then_some(u64::from(layer.request.limit) + 9)",
    ),
    (
        "tokens are reserved after another window than that which the request waits for",
        "exact_mode.rs",
        "reserved_after_ms: if charge.request.ceiling > layer.capacity.into() { charge.usage.end_ms } else { 0 },",
        "reserved_after_ms: 0,",
    ),
    (
        "leased tokens outlast their window",
        "token_fetch.rs",
        "match self.table.deposit(fetch.counter, lease_end_ms, tokens, now_ms) {",
        "match self.table.deposit(fetch.counter, lease_end_ms + 3_600_000, tokens, now_ms) {",
    ),
    (
        "granted tokens are deposited twice",
        "token_fetch.rs",
        "match self.table.deposit(fetch.counter, lease_end_ms, tokens, now_ms) {",
        "match self.table.deposit(fetch.counter, lease_end_ms, 2 * tokens, now_ms) {",
    ),
    (
        "a request waits without a deadline",
        "shared_decision.rs",
        "() = tokio::time::sleep_until(deadline) => {}",
        "() = tokio::time::sleep_until(deadline + Duration::from_secs(3600)) => {}",
    ),
    (
        "the charge of a client that leaves is kept",
        "exact_mode.rs",
        "if let Err(ChargeOutcome::Granted(replies)) = sender.send(outcome) {",
        "if let Err(ChargeOutcome::Granted(replies)) = sender.send(outcome) && false {",
    ),
    (
        "a rule that cannot be counted admits, although it should refuse",
        "shared_decision.rs",
        ".any(|layer_ref| charge_plan.rule_of(*layer_ref).rule.on_outage == OnOutage::Refuse)",
        ".any(|_| false)",
    ),
    (
        "the usage that a gateway knows is not sent to a store that has lost data",
        "shared_counters.rs",
        "self.reconnected_ms.set(self.clock.now().unix_ms.saturating_sub(elapsed.as_millis() as u64));",
        "_ = elapsed;",
    ),
    (
        "the usage that is sent to such a store lacks refunds on their way",
        "known_usage.rs",
        "used.saturating_add(order.refunding_in(window, now_ms))",
        "used",
    ),
    (
        "idle tokens go back to the store and stay leased",
        "shared_counters.rs",
        "let tokens = self.table.withdraw(counter, target.end_ms, u32::MAX);",
        "let tokens = self.table.leased_tokens(counter, now_ms);",
    ),
    (
        "a refused request keeps what other rules have charged",
        "shared_decision.rs",
        "shared.undo(charge_plan.rule_set(), &mut self.context, first, Vec::new());\n        if !is_refused {",
        "if !is_refused {",
    ),
    (
        "usage counted in an outage is not reported",
        "outage.rs",
        "self.send_kept_refunds(server).await && self.report(server).await",
        "self.send_kept_refunds(server).await",
    ),
    (
        "a refund whose reply is lost is sent again",
        "shared_counters.rs",
        "let reply = self.store.refund(refunds).await;",
        "let mut reply = self.store.refund(refunds).await;\n        if reply.is_err() {\n            reply = self.store.refund(refunds).await;\n        }",
    ),
    (
        "a late grant is admitted beyond the limit",
        "exact_mode.rs",
        "let is_late = is_counted_here && is_more_known && used > charge.request.ceiling;",
        "let is_late = is_counted_here && is_more_known && used > charge.request.ceiling && false;",
    ),
    (
        "refunds that cannot be sent are dropped",
        "shared_counters.rs",
        "self.record_error(self.store.server_of(&first.key_base), &error);\n            is_reachable = false;",
        "return self.record_error(self.store.server_of(&first.key_base), &error);",
    ),
    (
        "charges without a reply count twice",
        "known_usage.rs",
        "let with_charges = reported.saturating_add(noted.unanswered.charges).max(least);",
        "let with_charges = reported.saturating_add(unanswered.charges).max(least);",
    ),
    (
        "a call relies on what was known when another connection was open",
        "shared_counters.rs",
        "let generation = requests.iter().map(|request| request.generation).min().unwrap_or(0);",
        "let generation = self.generation.get();",
    ),
    (
        "a refusal is taken for a grant",
        "exact_mode.rs",
        "break ChargeOutcome::Refused(all);",
        "break ChargeOutcome::Granted(all);",
    ),
]


def test():
    """Runs the exploration in the copy; returns the exit code and the output."""
    command = ["cargo", "test", "--locked", "--package", "transom-store", "--lib", "--", "exploration::"]
    environment = dict(os.environ, CARGO_TARGET_DIR=os.path.join(COPY, "target"), CARGO_INCREMENTAL="0", TRANSOM_SEED="1")
    result = subprocess.run(command, cwd=COPY, env=environment, capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


def found_by(output):
    """The tests that have failed; `None` if none has run."""
    if "running " not in output:
        return None
    failed = {line.split()[1].split("::")[-1] for line in output.splitlines() if line.endswith("... FAILED")}
    return sorted(failed)


def main():
    os.makedirs(COPY, exist_ok=True)
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    for file in filter(None, files):
        source, target = os.path.join(ROOT, file), os.path.join(COPY, file)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copyfile(source, target)
    if test()[0] != 0:
        print("The tests fail without a mistake.")
        sys.exit(1)
    missed = []
    for name, file, code, mistake in MISTAKES:
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        path = os.path.join(COPY, "crates", "store", "src", file)
        with open(path) as source:
            text = source.read()
        if text.count(code) != 1:
            print(f"NOT FOUND in {file}: {code}")
            missed.append(name)
            continue
        with open(path, "w") as broken:
            broken.write(text.replace(code, mistake))
        code, output = test()
        with open(path, "w") as mended:
            mended.write(text)
        tests = found_by(output)
        if code == 0 or not tests:
            print(f"MISSED: {name}\n{output[-2000:] if tests is None else ''}", flush=True)
            missed.append(name)
        else:
            print(f"{name}: found by {', '.join(tests)}", flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
