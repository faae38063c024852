#!/usr/bin/env python3
"""Runs all tests: what `make test` does.

    python3 tests/run.py

Installations, builds and tests are steps. A step begins once those that it needs have ended. Tests of the gateway mostly wait, so the
loom models run beside them. Tests without a gateway use all cores: they run one program after the other, with a lower priority. All
but the models is built once, with one profile. Each step writes its output to a file; a line a minute says what is running. The
output of failed steps is printed last, and the exit code is 1.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LOGS = os.path.join(ROOT, "target", "test-logs")
CARGO_TEST = ["cargo", "test", "--locked", "--no-fail-fast"]
INSTRUCTIONS = [sys.executable, os.path.join(ROOT, "benches", "instructions.py"), "--profile", "dev"]
MODELS = [*CARGO_TEST, "-p", "transom-limiter-models", "--features", "loom"]
INTEGRATION_THREADS = 3 * len(os.sched_getaffinity(0))
# Seconds between two lines about progress.
PROGRESS_S = 60
# Failed tests that a line about progress names.
NAMED_FAILURES = 3
# Lines of the output of a failed step that names no failed test.
TAIL_LINES = 60


@dataclass
class Step:
    """A command, which runs once the steps that it needs have passed."""

    name: str
    command: list
    needs: list = field(default_factory=list)
    folder: str = ROOT
    # Threads of the tests; 0: as many as there are cores.
    threads: int = 0
    has_low_priority: bool = False
    # Whether the step uses all cores: no other such step runs at the same time.
    uses_all_cores: bool = False
    # Whether a run without a test is a failure.
    has_tests: bool = False
    # Whether the output is printed too.
    prints: bool = False
    # The steps that this one adds when it has passed.
    next_steps: Callable = lambda step: []
    process: subprocess.Popen = None
    started: float = 0
    # Wall and CPU time, with that of child processes.
    seconds: float = 0
    cpu_seconds: float = 0
    exit_code: int = None
    # Bytes of the output that were printed.
    printed: int = 0

    @property
    def log(self):
        return os.path.join(LOGS, f"{self.name}.log")

    def start(self):
        environment = dict(os.environ)
        if self.threads:
            environment["RUST_TEST_THREADS"] = str(self.threads)
        command = ["nice", "-n", "5", *self.command] if self.has_low_priority else self.command
        self.started = time.monotonic()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log)

    def passed_tests(self):
        if not self.process:
            return 0
        with open(self.log, errors="replace") as log:
            return len(re.findall(r"^test .* \.\.\. ok", log.read(), re.MULTILINE))

    def failed_tests(self):
        """The names of the tests that have failed so far."""
        if not self.process:
            return []
        with open(self.log, errors="replace") as log:
            return re.findall(r"^test (.*) \.\.\. FAILED", log.read(), re.MULTILINE)

    def print_more(self):
        """Prints what was written since the last call."""
        with open(self.log, "rb") as log:
            log.seek(self.printed)
            more = log.read()
        self.printed += len(more)
        print(more.decode(errors="replace"), end="", flush=True)

    def has_ended(self):
        process, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if self.prints:
            self.print_more()
        if process == 0:
            return False
        self.seconds = time.monotonic() - self.started
        self.cpu_seconds = usage.ru_utime + usage.ru_stime
        self.exit_code = self.process.returncode = os.waitstatus_to_exitcode(status)
        if self.has_tests and self.exit_code == 0 and self.passed_tests() == 0:
            self.exit_code = 1
            with open(self.log, "a") as log:
                log.write("\nno test ran\n")
        return True

    def slow_tests(self):
        """Tests that libtest reports as running for over a minute, and that have not ended."""
        with open(self.log, errors="replace") as log:
            text = log.read()
        slow = re.findall(r"^test (\S+) has been running for over", text, re.MULTILINE)
        return [name for name in slow if not re.search(rf"^test {re.escape(name)} \.\.\. ", text, re.MULTILINE)]


def first_steps():
    return [
        Step("parts", ["make", "--no-print-directory", "parts"], prints=True),
        # Examples are left out: `make check` compiles them, and no test uses them.
        Step(
            "tests-build",
            ["cargo", "build", "--locked", "--workspace", "--bins", "--tests", "--message-format=json-render-diagnostics"],
            next_steps=test_programs,
        ),
    ]


def test_programs(build):
    """A step for each test program, and those that cargo runs. Those that use all cores come last."""
    steps = [
        Step("documentation", [*CARGO_TEST, "--workspace", "--doc"], uses_all_cores=True),
        Step("instructions", INSTRUCTIONS, needs=["parts"]),
        Step("models-build", [*MODELS, "--no-run"]),
        # One thread: loom maps memory for each thread of each execution, and threads of one process wait for one another there.
        Step("models", MODELS, needs=["models-build"], threads=1, has_tests=True),
    ]
    with open(build.log) as log:
        lines = log.read().splitlines()
    programs = []
    for line in lines:
        message = json.loads(line) if line.startswith("{") else {}
        if message.get("reason") != "compiler-artifact" or not message["profile"]["test"] or not message["executable"]:
            continue
        folder = os.path.dirname(message["manifest_path"])
        name = f"{os.path.basename(folder)}-{message['target']['name']}" if folder != ROOT else message["target"]["name"]
        if message["target"]["kind"] != ["test"]:
            name += f"-{message['target']['kind'][0]}"
        programs += steps_of_program(name, message["executable"], folder)
    # The threads of the stress test wait for one another, and cost twice as much beside builds.
    return sorted([*programs, *steps], key=lambda step: (step.uses_all_cores, step.name == "limiter-stress"))


def steps_of_program(name, program, folder):
    if name != "integration":
        return [Step(name, [program], folder=folder, has_low_priority=True, uses_all_cores=True, has_tests=True)]
    options = dict(folder=folder, needs=["parts"], has_tests=True)
    return [
        # The soak takes three minutes, with little load.
        Step("soak", [program, "soak::"], **options),
        Step(name, [program, "--skip", "soak::"], threads=INTEGRATION_THREADS, **options),
    ]


def duration(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def run(steps):
    """Runs the steps, and adds those that follow from them. Returns the failed ones."""
    waiting, running, passed, failed = list(steps), [], [], []
    started = last_line = time.monotonic()
    while waiting or running:
        for step in [step for step in running if step.has_ended()]:
            running.remove(step)
            (failed if step.exit_code else passed).append(step)
            outcome = "FAILED" if step.exit_code else "passed"
            took = f"{duration(step.seconds)}, {step.cpu_seconds:.0f} s of CPU time"
            print(f"{duration(time.monotonic() - started)} {step.name}: {outcome} in {took}", flush=True)
            if not step.exit_code:
                added = step.next_steps(step)
                steps += added
                waiting += added
        unavailable = {step.name for step in failed}
        done = {step.name for step in passed}
        for step in list(waiting):
            if unavailable & set(step.needs):
                waiting.remove(step)
                failed.append(step)
                unavailable.add(step.name)
            elif done.issuperset(step.needs) and not (
                step.uses_all_cores and any(other.uses_all_cores for other in running)
            ):
                waiting.remove(step)
                running.append(step)
                step.start()
        if time.monotonic() - last_line >= PROGRESS_S:
            last_line = time.monotonic()
            print(f"{duration(last_line - started)} {progress([*passed, *failed, *running], running)}", flush=True)
        time.sleep(0.1)
    return failed


def progress(started, running):
    tests = sum(step.passed_tests() for step in started)
    failures = [name for step in started for name in step.failed_tests()]
    named = ", ".join(failures[:NAMED_FAILURES]) + (", …" if len(failures) > NAMED_FAILURES else "")
    failed = f", {len(failures)} failed ({named})" if failures else ""
    return f"{tests} tests passed{failed}; running: {', '.join(map(running_step, running))}"


def running_step(step):
    slow = step.slow_tests()
    return f"{step.name} (over a minute: {', '.join(slow)})" if slow else step.name


def report(step):
    """Prints what failed: of tests, their names and output; otherwise the end of the output."""
    if not step.process:
        print(f"\n{step.name}: did not run")
        return
    with open(step.log, errors="replace") as log:
        text = log.read()
    reason = "did not end" if step.exit_code is None else f"failed: exit code {step.exit_code}"
    print(f"\n{step.name} {reason}, output in {os.path.relpath(step.log, ROOT)}")
    text = "\n".join(line for line in text.splitlines() if not line.startswith('{"'))
    details = text.find("\nfailures:\n")
    print(text[details:].strip() if details >= 0 else "\n".join(text.splitlines()[-TAIL_LINES:]))


def gateways_left():
    """Gateways of the tests that are still running."""
    program = os.path.join(ROOT, "target", "debug", "transom")
    left = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            link = os.readlink(f"/proc/{process}/exe")
        except OSError:
            continue
        if link.startswith(program):
            left.append(process)
    return left


def main():
    # `gateways_left` and `instructions.py` look into target/.
    os.environ.pop("CARGO_TARGET_DIR", None)
    os.environ.pop("CARGO_BUILD_TARGET", None)
    shutil.rmtree(LOGS, ignore_errors=True)
    os.makedirs(LOGS)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    steps = first_steps()
    try:
        run(steps)
    except KeyboardInterrupt:
        print("\nstopped", flush=True)
    finally:
        for step in steps:
            if step.process and step.exit_code is None:
                step.process.terminate()
                step.process.wait()
    # What failed comes last, after what could not run because of it.
    failed = [step for step in steps if step.exit_code != 0]
    for step in sorted(failed, key=lambda step: step.process is not None):
        report(step)
    print_skipped(steps)
    left = gateways_left()
    if left:
        print(f"\nThe tests have left gateways running: processes {', '.join(left)}")
    total = sum(step.passed_tests() for step in steps)
    not_run = [step for step in failed if not step.process]
    print(f"\n{total} passed, {sum(failures(step) for step in failed if step.process)} failed", end="")
    print(f"; {len(not_run)} steps did not run" if not_run else "")
    sys.exit(1 if failed or left or total == 0 else 0)


def print_skipped(steps):
    """Repeats what steps have left out."""
    for step in [step for step in steps if step.process]:
        with open(step.log, errors="replace") as log:
            for line in log:
                if line.startswith("SKIPPED"):
                    print(f"\n{step.name}: {line.strip()}")


def failures(step):
    """The number of failed tests of a failed step; 1 for another failure."""
    return max(1, len(step.failed_tests()))


if __name__ == "__main__":
    main()
