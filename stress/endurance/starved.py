"""Attack on a daemon whose host has no memory or threads left: reads and disabling must still work."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from stress.endurance.looks import SLOWEST, WITHIN, errno_of, lateness, look, read_each, soundly_serves, timed
from stress.fuzz.report import Violation
from tests.fuse.harness import REAL_PROGRAM, Daemon, daemon, environment, eventually, is_mounted
from tests.mounted.files import EVENTS, Files

NOTICED = 0.1
"""Time in seconds until the daemon notices that it has no memory."""
CGROUPS = Path("/sys/fs/cgroup")
SLEEPERS = 40
HELD = 300
"""Number of long files that are partly read and kept open, so that the daemon must keep their text."""
IDLE = 0.1
"""Maximum share of a CPU that a daemon may use while there are no requests."""


@contextmanager
def no_memory(process: int) -> Iterator[None]:
    """Limit the address space of a process to its current size, during the `with` block."""
    before = resource.prlimit(process, resource.RLIMIT_AS)
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[0])
    resource.prlimit(process, resource.RLIMIT_AS, (pages * resource.getpagesize(), before[1]))
    time.sleep(NOTICED)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(process, resource.RLIMIT_AS, before)


@contextmanager
def no_threads(process: int) -> Iterator[None]:
    """Limit a process to its current number of threads by a control group, during the `with` block."""
    base = _pids_controller()
    assert base is not None
    own, group = _own_group(process, base), base / f"kprobefs-{process}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(process))
        (group / "pids.max").write_text((group / "pids.current").read_text())
        yield
    finally:
        with suppress(OSError):
            (own / "cgroup.procs").write_text(str(process))
        eventually(lambda: _is_removed(group), "a control group stays")


def _own_group(process: int, base: Path) -> Path:
    """Return the directory, below `base`, of the control group that `process` is in."""
    controller = "pids" if base.name == "pids" else ""
    lines = Path(f"/proc/{process}/cgroup").read_text().splitlines()
    groups = {
        name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")
    }
    return base / groups[controller].lstrip("/")


def _is_removed(group: Path) -> bool:
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


def _pids_controller() -> Path | None:
    """Return a directory in which control groups that limit threads can be created, or None."""
    for place in (CGROUPS / "pids", CGROUPS):
        with suppress(OSError):
            controllers = "pids" if place.name == "pids" else (place / "cgroup.subtree_control").read_text()
            if "pids" in controllers.split() and os.access(place / "cgroup.procs", os.W_OK):
                return place
    return None


Shortage = Callable[[int], AbstractContextManager[None]]


def starved(directory: Path, count: int, seconds: float, seed: int, slowest: float = SLOWEST) -> str:
    """Run rounds without memory, and then without threads. After each round the daemon must work normally.

    At the end, SIGTERM during the shortage must end the daemon. `count`: rounds of each shortage; 0: one
    round. `seconds`: time for random requests in all rounds together. Return a summary that names the slowest
    request. Raises: Violation, also if a request took more than `slowest` seconds.
    """
    rounds, results = count or 1, []
    for name, shortage in (("memory", no_memory), ("threads", no_threads)):
        if shortage is no_threads and _pids_controller() is None:
            results.append("no threads: not run, because no control group can limit threads")
            continue
        with daemon(directory, program=REAL_PROGRAM, is_shared=True) as running:
            late = max(
                _round(running, shortage, f"{seed}:{number}", seconds / rounds / 2)
                for number in range(rounds)
            )
            with shortage(running.process.pid):
                _look_on(running)
                if running.stop(signal.SIGTERM) or is_mounted(directory):
                    raise Violation(f"the daemon does not end without {name}")
        results.append(f"no {name}: {lateness(late, slowest)}")
    return f"{rounds} rounds, {'; '.join(results)}"


def _round(running: Daemon, shortage: Shortage, seed: str, seconds: float) -> tuple[float, str]:
    files = Files(running.directory)
    # The first hit of the probe comes without memory or threads for compiling its handler.
    files.write("kprobe_events", "p:starved vfs_mkdir\n")
    files.write(f"{EVENTS}/starved/enable", "1")
    with shortage(running.process.pid):
        late = max(look(files, "starved"), _make(files, shortage))
        late = max(late, _hold(files), _sleep(files, shortage), _fuzz(running.directory, seed, seconds))
        late = max(late, _look_on(running))
        if (share := _idle_share(running)) > IDLE:
            raise Violation(f"the idle daemon uses {share:.2f} of a CPU")
    for name in ("kprobes/list", "machine/tasks", "machine/kallsyms"):
        files.read(name)
    files.write("tracing/events/enable", "0")
    files.write("kprobe_events", "", os.O_TRUNC)
    soundly_serves(running)
    return late


def _look_on(running: Daemon) -> tuple[float, str]:
    """Read lists and the log, and disarm all probes.

    Return the duration in seconds and the name of the slowest request.
    """
    files = Files(running.directory)
    return max(
        timed("kprobes/list", lambda: files.read("kprobes/list")),
        timed("kprobe_events", lambda: files.read("kprobe_events")),
        timed("machine/dmesg", lambda: files.read("machine/dmesg")),
        timed("kprobes/enabled", lambda: files.write("kprobes/enabled", "0")),
    )


def _make(files: Files, shortage: Shortage) -> tuple[float, str]:
    """Make requests that need memory or threads.

    Return the duration in seconds and the name of the slowest request. A request must fail with ENOMEM and
    without a partial effect if it needs the missing resource.
    """
    late = (0.0, "")
    before = files.read("kprobe_events")
    definitions = "".join(f"p:many{number} vfs_read n=$comm\n" for number in range(300))
    for name, request in (
        ("300 definitions", lambda: files.write("kprobe_events", definitions)),
        ("mkdir", lambda: files.path("scratch/starved").mkdir()),
        ("a load", lambda: files.write("machine/load", "fork\n")),
    ):
        start = time.monotonic()
        answer = errno_of(request)
        late = max(late, (time.monotonic() - start, name))
        expected = "ENOMEM" if shortage is no_memory or name == "a load" else ""
        if answer != expected:
            raise Violation(f"{name} ended with {answer!r}")
    if shortage is no_memory and files.read("kprobe_events") != before:
        raise Violation("definitions that failed are there")
    with suppress(OSError):
        files.path("scratch/starved").rmdir()
    return late


def _hold(files: Files) -> tuple[float, str]:
    """Keep many long files open.

    Return the duration in seconds and the name of the slowest open or read.
    """
    late = (0.0, "")
    with ExitStack() as held:
        for _ in range(HELD):
            start = time.monotonic()
            try:
                descriptor = os.open(files.path("machine/kallsyms"), os.O_RDONLY)
                held.callback(os.close, descriptor)
                os.read(descriptor, 100)
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
            late = max(late, (time.monotonic() - start, "machine/kallsyms"))
    return late


def _sleep(files: Files, shortage: Shortage) -> tuple[float, str]:
    """Start more sleeping reads than there are threads.

    Return the duration in seconds and the name of the slowest request. The excess reads must fail with
    ENOMEM, and other requests must not wait.
    """
    answers = read_each([files.path("tracing/per_cpu/cpu0/trace_pipe_raw")] * SLEEPERS)
    eventually(lambda: "ENOMEM" in answers, "so many reads have had threads", WITHIN)
    late = look(files, None)
    if set(answers) != {"ENOMEM"}:
        raise Violation(f"reads of nothing ended with {sorted(set(answers))}")
    # Each sleeping read needs one record to end.
    until = time.monotonic() + WITHIN
    while len(answers) < SLEEPERS:
        if time.monotonic() > until:
            raise Violation(f"{SLEEPERS - len(answers)} reads are stuck")
        with suppress(OSError):
            files.write("tracing/trace_marker", "0" if shortage is no_memory else "here")
        time.sleep(0.01)
    return late


def _fuzz(directory: Path, seed: str, seconds: float) -> tuple[float, str]:
    done = subprocess.run(
        [sys.executable, "-m", "stress.endurance.client", str(directory), seed, "0", str(max(seconds, 0.1))],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    report = json.loads(done.stdout)
    if not report["answers"]:
        raise Violation("no operation was answered")
    return report["slowest"][0], report["slowest"][1]


def _idle_share(running: Daemon) -> float:
    time.sleep(0.1)
    before, seconds = running.cpu_seconds, 0.5
    time.sleep(seconds)
    return (running.cpu_seconds - before) / seconds
