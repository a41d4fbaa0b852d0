"""Session of the fuzzer: a booted kernel, and invariants that must hold after every write."""

from __future__ import annotations

import errno
import os
import re
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.vfs.core.client import Client
from stress.fuzz.report import Violation, answered_in_time
from tests.ledger import ledger_mismatches

TRACING = "/tracing"
SETUP = (
    (
        "kprobe_events",
        b"p:base/one vfs_read fd=%di s=+0(+8($arg1)):string n=$arg3:u32\np:base/two vfs_open\n",
    ),
    # The first use of an event expands the buffer, even if the request is refused.
    ("buffer_size_kb", b"64"),
    ("synthetic_events", b"syn u64 lat; pid_t pid; char comm[16]\n"),
)
"""Names of files -> texts that define the events to which the rules for filters and triggers refer."""
STATE = (
    *("kprobe_events", "dynamic_events", "synthetic_events", "uprobe_events", "set_event", "set_event_pid"),
    *("set_graph_function", "set_graph_notrace", "stack_trace_filter"),
    *("set_event_notrace_pid", "set_ftrace_filter", "set_ftrace_notrace", "set_ftrace_pid", "trace_options"),
    *("trace_clock", "tracing_cpumask", "current_tracer", "available_events"),
    *("saved_cmdlines_size", "buffer_percent", "tracing_max_latency"),
)
"""Control files in tracing/ whose texts a refused write must not change."""
MAX_SECONDS = 20.0
"""Time limit of a request in seconds, which is long enough for a busy machine."""
READ_SIZE = 1 << 16
MAX_WRITE = 1 << 17
"""Maximum size of a write request of FUSE in bytes."""
_STATE = re.compile(r" \[(active|paused)\]$|:(unlimited|count=\d+)$")
_CLIENTS = (Client(500, 0, 0), Client(501, 0, 0), Client(502, 1000, 1000))


class Hang(Violation):
    """Exception for a request that takes longer than MAX_SECONDS."""


class Session:
    """One kernel with its mount. Requests may raise KernelError; every other exception is a finding."""

    def __init__(self, config: MachineConfig | None = None) -> None:
        self.kernel = Kernel(config or MachineConfig(run_budget=0.2))
        self.mount = self.kernel.mount()
        self.client = _CLIENTS[0]
        self._setup()

    def close(self) -> None:
        """Free the kernel."""
        self.kernel.close()

    @property
    def is_spent(self) -> bool:
        """Whether the guest is dead. A call of a function with random arguments may kill it."""
        return self.kernel.guest.is_dead

    def _setup(self) -> None:
        for name, data in SETUP:
            self.write(f"{TRACING}/{name}", data)
        self.mount.mkdir(self.client, f"{TRACING}/instances/base", 0o755)

    @contextmanager
    def _opened(self, path: str, flags: int) -> Iterator[int]:
        # A call of a guest function is limited only by the run budget of the guest.
        with nullcontext() if path == "/machine/call" else answered_in_time(path):
            handle = self.mount.open(self.client, path, flags)
            try:
                yield handle
            finally:
                self.mount.release(handle)

    def write(self, path: str, *parts: bytes, flags: int = os.O_WRONLY) -> None:
        """Open a file, write each part, and close the file. Raises: KernelError."""
        with self._opened(path, flags) as handle:
            offset = 0
            for request in (request for part in parts for request in _as_fuse_splits(part)):
                try:
                    taken = self.mount.write(self.client, handle, request, offset)
                except WouldBlock:
                    self.mount.give_up(self.client, handle, errno.EAGAIN)
                    continue
                if not 0 <= taken <= len(request):
                    raise Violation(f"{taken} bytes of {len(request)} were taken")
                offset += taken

    def read(self, path: str) -> bytes:
        """Return the contents of a file. Raises: KernelError."""
        with self._opened(path, os.O_RDONLY | os.O_NONBLOCK) as handle:
            data = b""
            with suppress(WouldBlock):
                while chunk := self.mount.read(self.client, handle, READ_SIZE, len(data)):
                    data += chunk
            return data

    def _names(self, directory: str) -> list[str]:
        return [entry.name for entry in self.mount.readdir(directory)][2:]

    def as_client(self, number: int) -> None:
        """Select the client that makes the requests from now on: `number` modulo the number of clients."""
        self.client = _CLIENTS[number % len(_CLIENTS)]

    def state(self) -> dict[str, object]:
        """Return the texts of the control files, and the names of the instances."""
        texts: dict[str, object] = {}
        for name in STATE:
            with suppress(KernelError):
                texts[name] = self.read(f"{TRACING}/{name}")
        texts["instances"] = self._names(f"{TRACING}/instances")
        texts["enabled"] = self.read("/kprobes/enabled")
        return texts

    def check(self) -> None:
        """Check that the mount answers, and that the text is as the ledger records. Raises: Violation."""
        with self.kernel.lock:
            wrong = ledger_mismatches(self.kernel.machine.text)
        if wrong:
            raise Violation(f"text at {[hex(address) for address in wrong[:8]]} is not what the ledger says")
        if not self.read("/machine/version"):
            raise Violation("machine/version is empty")

    def use(self) -> None:
        """Run guest code that hits the probes, and read the files that show their hits."""
        path = "/scratch/used"
        handle = self.mount.create(self.client, path, 0o644, os.O_RDWR)
        self.mount.write(self.client, handle, b"text", 0)
        self.mount.read(self.client, handle, 4, 0)
        self.mount.release(handle)
        for name in ("trace", "kprobe_profile", "error_log"):
            self.read(f"{TRACING}/{name}")

    def writable(self, directory: str = "/") -> Iterator[str]:
        """Yield the paths of all writable files, except those in scratch/ and dev/."""
        for name in self._names(directory):
            path = f"{directory.rstrip('/')}/{name}"
            # An event may have been removed since the directory was read.
            with suppress(KernelError):
                mode = self.mount.getattr(path).mode
                if stat.S_ISDIR(mode) and path not in ("/scratch", "/dev"):
                    yield from self.writable(path)
                elif stat.S_ISREG(mode) and mode & 0o222:
                    yield path

    def reset(self) -> None:
        """Remove everything that was created, and define the initial events again.

        Raises: Violation if an event remains, or if text is still patched without a probe.
        """
        self.as_client(0)
        for name in self._names(f"{TRACING}/instances"):
            instance = f"{TRACING}/instances/{name}"
            # Histograms that use the variables of others must be removed first.
            for _ in range(3):
                self._drop_triggers(instance)
            self.mount.rmdir(self.client, instance)
        self.write(f"{TRACING}/current_tracer", b"nop")
        # A trigger pins its event and the events that it names. Triggers that name others must go first.
        for _ in range(3):
            self._drop_triggers()
        self.write(f"{TRACING}/events/enable", b"0")
        self.write("/sysctl/kernel/stack_tracer_enabled", b"0")
        self.write("/sysctl/kernel/ftrace_enabled", b"1")
        for name in (
            *("set_ftrace_filter", "set_ftrace_notrace", "set_event_pid", "set_event_notrace_pid"),
            *("set_graph_function", "set_graph_notrace", "stack_trace_filter"),
        ):
            self.write(f"{TRACING}/{name}", flags=os.O_WRONLY | os.O_TRUNC)
        self._remove_event_probes()
        for name in ("synthetic_events", "kprobe_events", "uprobe_events", "dynamic_events"):
            self.write(f"{TRACING}/{name}", flags=os.O_WRONLY | os.O_TRUNC)
        self._unload_modules()
        self._check_clean()
        self._setup()

    def _drop_triggers(self, array: str = TRACING) -> None:
        """Remove all triggers, and all commands on functions, by writing "!" and each of their lines.

        The trigger's state, which the end of a line shows, is left out.
        """
        triggers = [path for path in self.writable(f"{array}/events") if path.endswith("/trigger")]
        for path in (f"{array}/set_ftrace_filter", *triggers):
            for line in self.read(path).decode("latin-1").splitlines():
                command = _STATE.sub("", line)
                if not line.startswith("#") and (":" in line or path.endswith("/trigger")):
                    with suppress(KernelError):
                        self.write(path, f"!{command}".encode("latin-1"))

    def _remove_event_probes(self) -> None:
        """Remove event probes, the newest first: each pins its event, which may be another event probe."""
        path = f"{TRACING}/dynamic_events"
        for line in reversed(self.read(path).splitlines()):
            if line.startswith(b"e:"):
                self.write(path, b"-" + line.split()[0][1:])

    def _unload_modules(self) -> None:
        for _ in range(3):
            for line in self.read("/machine/modules").decode().splitlines():
                with suppress(KernelError):
                    self.write("/machine/modules", f"unload {line.split()[0]}\n".encode())

    def _check_clean(self) -> None:
        for name in ("kprobe_events", "dynamic_events", "synthetic_events", "uprobe_events"):
            if left := self.read(f"{TRACING}/{name}"):
                raise Violation(f"{name} still has {left[:200]!r}")
        self.check()


def _as_fuse_splits(data: bytes) -> Iterator[bytes]:
    """Yield the data of the FUSE requests of one write(2); an empty write is one request."""
    for start in range(0, len(data) or 1, MAX_WRITE):
        yield data[start : start + MAX_WRITE]


@contextmanager
def time_limit(seconds: float = MAX_SECONDS) -> Iterator[None]:
    """Limit the time of the `with` block. Raises: Hang in the main thread if the time is exceeded."""

    def expired(_signal: int, _frame: FrameType | None) -> None:
        raise Hang(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
