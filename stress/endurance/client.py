"""Client process that runs random file operations on a mount.

Each operation must end with a result or an errno.
"""

from __future__ import annotations

import errno
import json
import os
import select
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from fcntl import F_GETFL, F_SETFL, LOCK_EX, LOCK_NB, LOCK_UN, fcntl, flock
from random import Random

from stress.endurance.late import LateRequests
from stress.fuzz.fuzzer import kind_of
from stress.fuzz.grammar import Mutator
from stress.fuzz.rules import GRAMMAR, RULES, TOKENS

CONTROL = (
    *("kprobe_events", "kprobes/enabled", "tracing/set_event", "tracing/trace", "tracing/trace_marker"),
    *("tracing/current_tracer", "tracing/tracing_on", "tracing/trace_clock", "tracing/dynamic_events"),
    *("tracing/synthetic_events", "tracing/buffer_size_kb", "tracing/trace_options", "tracing/events/enable"),
    *("tracing/set_ftrace_filter", "tracing/error_log", "machine/call", "machine/clock", "kprobes/list"),
    *("tracing/kprobe_profile", "machine/dmesg", "tracing/events/sched/enable", "machine/tasks"),
)
NAMES = [f"scratch/{name}" for name in ("a", "b", "c", "d/a", "d/b", "d", "né", "x" * 255, "x" * 256)]
MAX_OPEN = 20


class Client:
    """Runs random operations, chosen by a seed, on a mount at `root`."""

    def __init__(self, root: str, seed: str) -> None:
        self.random = Random(seed)
        self.mutator = Mutator(TOKENS)
        self.descriptors: list[int] = []
        self.root = root
        self.answers: Counter[str] = Counter()
        self.slowest = (0.0, "")
        """(seconds, description) of the slowest request; an operation may consist of several requests."""
        self.began = 0.0
        """Value of time.monotonic() at which the current request began."""
        self.kind = ""
        self.opened = ""
        """The path that was opened last."""

    def run(self, count: int, seconds: float) -> None:
        """Run at most `count` random operations, for at most `seconds` seconds; 0 means no limit.

        Raises: every exception except OSError.
        """
        os.chdir(self.root)
        until = time.monotonic() + seconds
        done = 0
        while (not count or done < count) and (not seconds or time.monotonic() < until):
            kind = self.kind = self.random.choice(list(KINDS))
            self.began = time.monotonic()
            try:
                KINDS[kind](self)
                self.answers[f"{kind} ok"] += 1
            except OSError as error:
                self.answers[f"{kind} {errno.errorcode.get(error.errno or 0, error.errno)}"] += 1
            self.answered()
            done += 1
        for descriptor in self.descriptors:
            os.close(descriptor)

    def answered(self) -> None:
        """Record the duration of the request that has just ended. The next request begins now."""
        now = time.monotonic()
        self.slowest = max(self.slowest, (now - self.began, f"{self.kind} (last opened: {self.opened})"))
        self.began = now

    def name(self) -> str:
        return self.random.choice(NAMES)

    def path(self) -> str:
        """Return a random path; most of the paths exist."""
        return self.random.choice(
            [self.name(), self.random.choice(CONTROL), "tracing/events/kprobes", "none"]
        )

    def some(self) -> int:
        """Return a random open descriptor. Raises: OSError if none is open."""
        if not self.descriptors:
            raise OSError(errno.EBADF, "none is open")
        return self.random.choice(self.descriptors)

    def open(self, path: str, flags: int, mode: int = 0o644) -> int:
        if len(self.descriptors) >= MAX_OPEN:
            os.close(self.descriptors.pop(self.random.randrange(MAX_OPEN)))
        self.opened = path
        self.descriptors.append(os.open(path, flags | os.O_NONBLOCK, mode))
        return self.descriptors[-1]

    def data(self) -> bytes:
        return self.random.randbytes(self.random.choice((0, 1, 100, 4096, 70_000)))


def _read_control(client: Client) -> None:
    descriptor = client.open(client.random.choice(CONTROL), os.O_RDONLY)
    client.answered()
    while os.read(descriptor, client.random.choice((1 << 12, 1 << 16))):
        client.answered()


def _write_control(client: Client) -> None:
    path = client.random.choice(CONTROL)
    text = GRAMMAR.text(client.random, RULES.get(kind_of(path), "anything")).encode()
    if client.random.random() < 0.3:
        text = client.mutator.damage(client.random, text)
    # A call of a random function may kill the guest, which would end the test of most files.
    if path == "machine/call":
        text = b'strlen "text"'
    # The time that the client needs to make a long text does not count.
    client.began = time.monotonic()
    os.write(
        client.open(path, os.O_WRONLY | client.random.choice((os.O_APPEND, os.O_APPEND, os.O_TRUNC))), text
    )


def _walk(client: Client) -> None:
    for entry in os.scandir(client.random.choice(("tracing/events", "kprobes", "tracing", ".", "scratch"))):
        client.answered()
        entry.stat(follow_symlinks=False)


def _poll(client: Client) -> None:
    poll = select.poll()
    poll.register(client.some(), select.POLLIN | select.POLLOUT)
    poll.poll(0)


def _rename(client: Client) -> None:
    os.rename(client.path(), client.name())


def _toggle_blocking(client: Client) -> None:
    descriptor = client.some()
    fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) ^ os.O_APPEND)


def _lock(client: Client) -> None:
    flock(client.some(), LOCK_EX | LOCK_NB)
    flock(client.some(), LOCK_UN)


def _instance(client: Client, action: Callable[[str], None]) -> None:
    action(f"tracing/instances/{client.random.choice(('one', 'two', 'thrée', 'x' * 255))}")


def _fork(client: Client) -> None:
    if (pid := os.fork()) == 0:
        with suppress(OSError):
            os.stat(client.name())
        os._exit(0)
    os.waitpid(pid, 0)


def _dup(client: Client) -> None:
    os.close(os.dup(client.some()))


def _pipe(client: Client) -> None:
    os.read(client.open("tracing/trace_pipe", os.O_RDONLY), 4096)


KINDS: dict[str, Callable[[Client], object]] = {
    "open": lambda it: it.open(it.path(), it.random.choice((os.O_RDONLY, os.O_RDWR, os.O_WRONLY))),
    "create": lambda it: it.open(it.name(), os.O_RDWR | os.O_CREAT, it.random.choice((0o644, 0o4755, 0))),
    "exclusive": lambda it: it.open(it.name(), os.O_RDWR | os.O_CREAT | os.O_EXCL),
    "truncating": lambda it: it.open(it.name(), os.O_RDWR | os.O_TRUNC),
    "directory": lambda it: it.open(it.path(), os.O_RDONLY | os.O_DIRECTORY),
    "read": lambda it: os.read(it.some(), it.random.choice((0, 1, 4096, 1 << 20))),
    "pread": lambda it: os.pread(it.some(), 4096, it.random.choice((0, 1, 1 << 20, 1 << 40))),
    "write": lambda it: os.write(it.some(), it.data()),
    "pwrite": lambda it: os.pwrite(it.some(), it.data(), it.random.choice((0, 100, 1 << 16))),
    "lseek": lambda it: os.lseek(it.some(), it.random.choice((0, 10, 1 << 40)), it.random.randrange(3)),
    "close": lambda it: os.close(it.descriptors.pop()) if it.descriptors else None,
    "dup": _dup,
    "fstat": lambda it: os.fstat(it.some()),
    "fsync": lambda it: os.fsync(it.some()),
    "ftruncate": lambda it: os.ftruncate(it.some(), it.random.choice((0, 1, 100_000))),
    "flock": _lock,
    "fcntl": _toggle_blocking,
    "poll": _poll,
    "stat": lambda it: os.stat(it.path()),
    "statvfs": lambda it: os.statvfs(it.path()),
    "access": lambda it: os.access(it.path(), it.random.randrange(8)),
    "truncate": lambda it: os.truncate(it.path(), it.random.choice((0, 1, 5000))),
    "chmod": lambda it: os.chmod(it.path(), it.random.choice((0o600, 0o644, 0o777, 0o7777))),
    "chown": lambda it: os.lchown(it.path(), it.random.choice((-1, 0, 1000)), -1),
    "utime": lambda it: os.utime(it.path(), (it.random.randrange(1 << 40), 0)),
    "unlink": lambda it: os.unlink(it.path()),
    "rename": _rename,
    "symlink": lambda it: os.symlink(it.path(), it.name()),
    "readlink": lambda it: os.readlink(it.path()),
    "link": lambda it: os.link(it.path(), it.name()),
    "mknod": lambda it: os.mknod(it.name(), it.random.choice((0o100644, 0o010644, 0o140644))),
    "xattr": lambda it: os.listxattr(it.path()),
    "mkdir": lambda it: os.mkdir(it.path()),
    "rmdir": lambda it: os.rmdir(it.path()),
    "list": _walk,
    "read control": _read_control,
    "write control": _write_control,
    "new instance": lambda it: _instance(it, os.mkdir),
    "end instance": lambda it: _instance(it, os.rmdir),
    "trace_pipe": _pipe,
    "fork": _fork,
}


def main() -> None:
    """Run the client with the arguments ROOT SEED COUNT SECONDS [DAEMON].

    The output is a line of JSON with the numbers of answers, the slowest request, and reports of late
    requests.
    """
    root, seed, count, seconds, *daemon = sys.argv[1:]
    client = Client(root, seed)
    client.began = time.monotonic()
    late: list[str] = []
    for pid in daemon:
        watchdog = LateRequests(int(pid), lambda: client.began)
        watchdog.start()
        late = watchdog.reports
    client.run(int(count), float(seconds))
    print(json.dumps({"answers": client.answers, "slowest": client.slowest, "late": late}))


if __name__ == "__main__":
    main()
