"""Attacks on a mount. Each raises Violation if the mount misbehaves, and otherwise returns a summary.

`count`: maximum number of operations or kills, or number of rounds or readers; 0: the default of the attack.
`seconds`: maximum duration; 0: no limit. `slowest`: maximum seconds of a request. Each attack ignores the
parameters that it does not need.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

from kprobefs.common import daemon_registry
from stress.endurance.late import PROGRAM
from stress.endurance.looks import SLOWEST, WITHIN, lateness, look, read_each, soundly_serves, timed
from stress.endurance.starved import starved
from stress.endurance.state_kills import state_kills
from stress.fuzz.report import Violation
from tests.fuse.harness import REAL_PROGRAM, Daemon, daemon, environment, eventually, is_mounted
from tests.mounted.files import EVENTS, Files

CLIENTS = 3
PAIRS = 8
READERS = 1000


def operations(directory: Path, count: int, seconds: float, seed: int, slowest: float = SLOWEST) -> str:
    """Run random operations from three clients. Each operation must end in time with a result or an errno."""
    with daemon(directory, program=PROGRAM, is_shared=True) as running:
        clients = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "stress.endurance.client", str(directory), f"{seed}:{number}"),
                    *(str(count // CLIENTS), str(seconds), str(running.process.pid)),
                ],
                env=environment(),
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(CLIENTS)
        ]
        outputs = [client.communicate()[0] for client in clients]
        if any(client.returncode for client in clients):
            raise Violation(f"clients ended with {[client.returncode for client in clients]}")
        soundly_serves(running)
        stacks = running.log
    answers: Counter[str] = Counter()
    late, request = 0.0, ""
    reports: list[str] = []
    for output in outputs:
        report = json.loads(output)
        answers.update(report["answers"])
        reports += report["late"]
        late, request = max((late, request), tuple(report["slowest"]))
    if late > slowest:
        raise Violation("\n".join((f"{request} took {late:.2f} s", *reports, stacks)))
    kinds = {answer.rsplit(None, 1)[0] for answer in answers}
    return f"{answers.total()} operations of {len(kinds)} kinds, {late:.2f} s the slowest: {request}"


def kills(directory: Path, count: int, seconds: float, seed: int, _slowest: float = SLOWEST) -> str:
    """Kill the daemon at random moments while a client works. The next daemon must mount and answer."""
    random = Random(seed)
    until = time.monotonic() + seconds
    done = 0
    while (not count or done < count) and (not seconds or time.monotonic() < until):
        with daemon(directory, program=REAL_PROGRAM) as running:
            client = subprocess.Popen(
                [
                    *(sys.executable, "-m", "stress.endurance.client", str(directory), f"{seed}:{done}"),
                    "0",
                    "0",
                ],
                env=environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                time.sleep(random.uniform(0, 0.5))
                running.process.kill()
                running.process.wait()
            finally:
                # Requests of a mount without a daemon must end, so that the client is not stuck.
                client.terminate()
                if client.wait(WITHIN) is None:
                    raise Violation("a client is stuck")
        if is_mounted(directory):
            raise Violation("the mount of a killed daemon stays")
        done += 1
    with daemon(directory, program=REAL_PROGRAM) as running:
        soundly_serves(running)
    return f"{done} daemons killed"


_WRITER = """
import os, sys, time
end = time.monotonic() + float(sys.argv[2])
marker = os.open(sys.argv[1] + "/trace_marker", os.O_WRONLY)
number = 0
while time.monotonic() < end:
    os.write(marker, b"n=%d" % number)
    number += 1
print(number)
"""


def traffic(directory: Path, count: int, seconds: float, seed: int, _slowest: float = SLOWEST) -> str:
    """Run eight writers, each in its own trace array, and read every record exactly once and in order."""
    del count, seed
    numbers = 0
    with daemon(directory, program=REAL_PROGRAM, is_shared=True) as running:
        arrays = [directory / "tracing" / "instances" / f"a{number}" for number in range(PAIRS)]
        for array in arrays:
            array.mkdir()
            (array / "buffer_size_kb").write_text("4096")
        pipes = {os.open(array / "trace_pipe", os.O_RDONLY | os.O_NONBLOCK): array for array in arrays}
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", _WRITER, str(array), str(seconds)], stdout=subprocess.PIPE, text=True
            )
            for array in arrays
        ]
        read = dict.fromkeys(arrays, b"")
        while any(writer.poll() is None for writer in writers):
            for pipe in select.select(list(pipes), [], [], 0.1)[0]:
                read[pipes[pipe]] += _drain(pipe)
        for pipe, array in pipes.items():
            read[array] += _drain(pipe)
            os.close(pipe)
        for writer, array in zip(writers, arrays, strict=True):
            written = int(writer.communicate()[0])
            found = [int(number) for number in re.findall(rb"n=(\d+)", read[array])]
            if found != list(range(written)):
                raise Violation(f"{array.name}: {written} written, {len(found)} read")
            numbers += written
        soundly_serves(running)
    return f"{numbers} records of {PAIRS} writers read once and in order by {PAIRS} readers"


def _drain(pipe: int) -> bytes:
    data = b""
    try:
        while part := os.read(pipe, 1 << 16):
            data += part
    except BlockingIOError:
        pass
    return data


def full_disk(directory: Path, count: int, seconds: float, seed: int, _slowest: float = SLOWEST) -> str:
    """Serve a mount whose log is /dev/full: the mount must work although the log cannot be written."""
    del seconds, seed
    rounds = count or 1
    for _ in range(rounds):
        with open("/dev/full", "wb") as full:
            process = subprocess.Popen(
                [*REAL_PROGRAM, "mount", "-f", str(directory)],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=full,
                stderr=full,
            )
        try:
            running = Daemon(process, directory, Path(os.devnull))
            until = time.monotonic() + 30
            while not is_mounted(directory) and process.poll() is None and time.monotonic() < until:
                time.sleep(0.02)
            soundly_serves(running)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    return f"{rounds} mounts without a place for a log"


def readers(directory: Path, count: int, seconds: float, seed: int, slowest: float = SLOWEST) -> str:
    """Start many sleeping reads, and check that other requests do not wait for them.

    A fifth of the reads use separate pipes, and the others share one pipe.
    """
    del seconds, seed
    count = count or READERS
    with daemon(directory, program=REAL_PROGRAM) as running:
        files = Files(directory)
        names = ["tracing/per_cpu/cpu0/trace_pipe_raw"] * (count - count // 5)
        for number in range(count // 5):
            files.path(f"tracing/instances/a{number}").mkdir()
            names.append(f"tracing/instances/a{number}/trace_pipe")
        answers = read_each([files.path(name) for name in names])
        tasks = Path(f"/proc/{running.process.pid}/task")
        eventually(lambda: len(list(tasks.iterdir())) > count, "a read has no thread", WITHIN)
        late = max(
            timed("a definition", lambda: files.write("kprobe_events", "p:meanwhile vfs_mkdir\n")),
            timed("enabling", lambda: files.write(f"{EVENTS}/meanwhile/enable", "1")),
            look(files, "meanwhile"),
        )
        if answers:
            raise Violation(f"reads of nothing ended: {answers}")
        # One of the readers that share a pipe gets the record.
        files.write("tracing/trace_marker", "here")
        eventually(lambda: answers, "nobody reads", WITHIN)
        late = max(late, look(files, "meanwhile"))
        end = subprocess.run([*REAL_PROGRAM, "umount", str(directory)], env=environment(), check=False)
        eventually(lambda: len(answers) == count, "a reader is stuck", WITHIN)
    if end.returncode or Counter(answers) != {"EIO": count - 1, "": 1}:
        raise Violation(f"umount ended with {end.returncode}, reads with {Counter(answers)}")
    return f"{count} readers, {lateness(late, slowest)}"


def leap(directory: Path, count: int, seconds: float, seed: int, _slowest: float = SLOWEST) -> str:
    """Run daemons under faketime: with wall clocks of other decades, and with a clock that runs too fast."""
    del count, seconds, seed
    if shutil.which("faketime") is None:
        return "not run: faketime is not installed"
    specs = ("1971-01-01 00:00:00", "2099-12-31 23:59:59", "+0 x100")
    for spec in specs:
        _forget_killed_wrappers()
        with daemon(directory, program=["faketime", "-f", spec, *REAL_PROGRAM]) as running:
            soundly_serves(running)
        # faketime passes no signal on, so the daemon ends some time after the unmount.
        eventually(lambda: daemon_registry.running(str(directory)) is None, "the daemon does not end")
    _forget_killed_wrappers()
    return f"{len(specs)} clocks"


def _forget_killed_wrappers() -> None:
    """Remove what killed faketime programs have left in /dev/shm.

    A program that gets the pid of one of them would fail, because the names contain the pid.
    """
    for path in Path("/dev/shm").glob("*faketime_s*_*"):
        if not Path("/proc", path.name.rpartition("_")[2]).exists():
            path.unlink(missing_ok=True)


Attack = Callable[[Path, int, float, int, float], str]
ATTACKS: dict[str, Attack] = {
    "operations": operations,
    "kills": kills,
    "state-kills": lambda directory, *more: state_kills(directory.parent, *more),
    "traffic": traffic,
    "full-disk": full_disk,
    "readers": readers,
    "starved": starved,
    "faketime": leap,
}
