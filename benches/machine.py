"""Cores, free ports, and processes with their CPU time and memory.

All figures come from /proc, so this file needs no privileges and no packages. It knows neither
gateways nor load generators: it starts a command on a core, reports what the command consumed, and makes
sure that no process outlives the benchmark.
"""

import collections
import ctypes
import datetime
import os
import platform
import random
import re
import resource
import signal
import socket
import subprocess
import time

# Debian installs server programs here; only root's PATH has these directories.
os.environ["PATH"] = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
LOOPBACK = "127.0.0.1"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)
_used_ports = set()


class BenchmarkError(Exception):
    """A condition that prevents a measurement or makes it worthless; the text says what to do."""


def free_port():
    """Returns a port without a listener, which the kernel does not give to outgoing connections.

    Ports below the ephemeral range are used because the load itself opens hundreds of connections on
    loopback, whose local ports could otherwise take the one that was just found to be free.
    """
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        lowest_ephemeral = int(file.read().split()[0])
    for _ in range(1000):
        port = random.randrange(10_000, max(lowest_ephemeral, 10_100))
        if port in _used_ports:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
        _used_ports.add(port)
        return port
    raise BenchmarkError("no free port between 10000 and the ephemeral range; end other servers")


class Server:
    """A server process and all its children."""

    def __init__(self, name, command, port, log, cores):
        """Starts `command` on `cores` and waits until it accepts connections at `port`."""
        self.name = name
        self._log = log
        with open(log, "wb") as out:
            # A session of its own, so that the whole tree can be stopped at once.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: _prepare_child(cores),
            )
        try:
            self._await(port)
        except BaseException:
            self.stop()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def _await(self, port):
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                socket.create_connection((LOOPBACK, port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.02)
        raise BenchmarkError(f"{self.name} does not listen on port {port}; its output:\n{self.output()}")

    @property
    def pid(self):
        return self._process.pid

    def output(self):
        with open(self._log, errors="replace") as file:
            return file.read()[-2000:].strip() or "(nothing)"

    def end(self, limit_s):
        """Asks the process to exit, because its final output is needed."""
        self._process.terminate()
        try:
            status = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"{self.name} has not ended within {limit_s} s; its output:\n{self.output()}") from None
        if status != 0:
            raise BenchmarkError(f"{self.name} ended with {status}; its output:\n{self.output()}")

    def stop(self):
        """Stops the process and its children; returns when all have ended."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(3)
            except subprocess.TimeoutExpired:
                pass
        # The rest of the group: children of a process that died before it stopped them.
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def cpu_times_s(self):
        """Returns the user and the system time of the whole tree so far, including ended children, in seconds.

        Fields are numbered as in proc_pid_stat(5): 14 utime, 15 stime, 16 cutime, 17 cstime.
        """
        fields = [[int(field) for field in _stat(pid)[13:17]] for pid in self._tree()]
        return tuple(TICK_S * sum(each[which] + each[which + 2] for each in fields) for which in (0, 1))

    def threads_cpu_s(self):
        """Returns the CPU time of the threads of the process so far by their names, in seconds, without the ticks of
        `cpu_times_s`.

        The first field of /proc/PID/task/TID/schedstat is nanoseconds on a core.
        """
        tasks = f"/proc/{self._process.pid}/task"
        times = collections.Counter()
        for task in os.listdir(tasks):
            with open(f"{tasks}/{task}/comm") as comm, open(f"{tasks}/{task}/schedstat") as schedstat:
                times[comm.read().strip()] += int(schedstat.read().split()[0]) / 1e9
        return times

    def memory_mib(self):
        """Returns the resident memory (VmRSS) of the whole tree, in MiB."""
        kib = 0
        for pid in self._tree():
            with open(f"/proc/{pid}/status") as file:
                kib += sum(int(line.split()[1]) for line in file if line.startswith("VmRSS:"))
        return kib / 1024

    def _tree(self):
        if self._process.poll() is not None:
            raise BenchmarkError(f"{self.name} ended by itself; its output:\n{self.output()}")
        tree = [self._process.pid]
        for pid in tree:
            with open(f"/proc/{pid}/task/{pid}/children") as file:
                tree.extend(int(child) for child in file.read().split())
        return tree


def _stat(pid):
    """Returns the fields of /proc/PID/stat; the second may contain blanks and is split off first."""
    with open(f"/proc/{pid}/stat") as file:
        head, _, tail = file.read().rpartition(")")
    return [*head.split(" (", 1), *tail.split()]


def _prepare_child(cores):
    """Runs in a new process before its program does."""
    os.sched_setaffinity(0, cores)
    # If the benchmark is killed, its servers end with it.
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def run_on(cores, command, timeout_s):
    """Runs `command` on `cores` to its end and returns its output."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, preexec_fn=lambda: _prepare_child(cores)
        )
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"`{command[0]}` did not end within {timeout_s:.0f} s") from None
    if done.returncode != 0:
        raise BenchmarkError(f"`{' '.join(command)}` failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def version_of(command, pattern):
    """Returns the version that a program prints, on either stream and with any exit code."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
    found = re.search(pattern, done.stdout + done.stderr)
    return found[1] if found else "of unknown version"


def allow_descriptors(count):
    """Raises the limit for this process and its children."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count:
        raise BenchmarkError(f"{count} descriptors are needed and {hard} allowed; raise the limit with:\n    ulimit -Hn {count}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def core_busy_s(core):
    """Returns the busy seconds of a core since boot, including time taken by the hypervisor."""
    with open("/proc/stat") as file:
        for line in file:
            if line.startswith(f"cpu{core} "):
                user, nice, system, _idle, _wait, irq, softirq, steal = map(int, line.split()[1:9])
                return (user + nice + system + irq + softirq + steal) * TICK_S
    raise BenchmarkError(f"core {core} is not in /proc/stat")


def description(versions):
    """Returns a description of the machine as (name, value) pairs, followed by `versions`."""
    with open("/proc/cpuinfo") as file:
        models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    with open("/proc/loadavg") as file:
        load = " ".join(file.read().split()[:3])
    return [
        ("date", datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")),
        ("processor", f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"),
        ("kernel", f"{platform.system()} {platform.release()}"),
        *versions,
        ("load average at the start", load),
    ]
