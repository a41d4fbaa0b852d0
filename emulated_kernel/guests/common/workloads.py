"""Workloads: background workloads of a kernel, each in a thread that holds the control lock in slices.

The kinds are the same for all kernels; `WorkloadHost` makes the guest tasks of one kernel.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Collection, Iterable
from enum import Enum
from functools import partial
from time import monotonic
from typing import Protocol

from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass, field, replace
from emulated_kernel.util.threads import start_thread

MAX_RATE = 10_000
"""Maximum rate of a workload, in rounds per second."""
MAX_DURATION = 86_400.0
"""Maximum duration of a workload, in seconds."""
DEFAULT_RATE = 10
DEFAULT_DURATION = 10.0
SLICE = 0.002
"""Duration of a slice, in seconds, after which the workload finishes its round and releases the lock."""
MAX_FAILURES = 100
"""Maximum number of successive failed rounds, after which a workload stops."""
ALL = "all"


class WorkloadKind(Enum):
    """Kind of a workload: the calls that the workload's task makes in each round."""

    FORK = "fork"
    """Fork a child that executes a program and exits."""
    FILES = "files"
    """Create, write, read, rename and remove a file in scratch/."""
    PIPE = "pipe"
    """Send a message through a new pipe."""
    TCP = "tcp"
    """Open a connection over the loopback device and send a message each way."""
    LOSS = "loss"
    """Like TCP, but the guest loses the first copies of one message, and so sends it again."""
    UDP = "udp"
    """Send a message from a socket to the same socket, over the loopback device."""
    TIMERS = "timers"
    """Sleep for a millisecond."""


class Workload(Protocol):
    """A workload of one kind. One guest task and its children make the workload's system calls."""

    def round(self) -> None:
        """Make the calls of one round; if the task was killed, replace it first.

        Raises: KernelError (a call failed).
        """

    def end(self) -> None:
        """Remove the task and its files from the guest."""


class WorkloadHost(Protocol):
    """Interface of a kernel that runs workloads. Lock: held, for all methods."""

    @property
    def is_dead(self) -> bool:
        """Whether the guest can't run any more."""

    def kinds(self) -> Collection[WorkloadKind]:
        """Return the kinds of workloads whose system calls the kernel has."""

    def workload(self, kind: WorkloadKind, pid: int) -> Workload:
        """Return a workload of the kind `kind`. Its task gets the pid `pid`, which no host process has."""

    def slice_begins(self) -> None:
        """Prepare the guest for the calls of a slice, as at the beginning of a client's request."""

    def slice_ends(self) -> None:
        """Finish a slice, as at the end of a client's request."""


@dataclass(frozen=True)
class WorkloadOrder:
    """A user's order to run a workload."""

    kind: WorkloadKind
    rate: int = DEFAULT_RATE
    """Number of rounds per second that the workload tries to make."""
    duration: float = DEFAULT_DURATION
    """Duration of the workload in seconds."""


@dataclass(eq=False)
class RunningWorkload:
    """A workload that was started, and its progress; times are read from the host's monotonic clock."""

    order: WorkloadOrder
    started: float
    load: Workload | None = None
    rounds: int = 0
    failed: int = 0
    state: str = "running"
    """State of the workload: "running", or after its end "done", "stopped" or "failed"."""
    reason: str = ""
    """Error message of the latest failed round; "" if no round has failed."""
    ended: threading.Event = field(default_factory=threading.Event)
    in_succession: int = 0
    """Number of successive failed rounds."""

    @property
    def left(self) -> float:
        """Seconds until the ordered duration has passed; 0 afterwards."""
        return max(self.started + self.order.duration - monotonic(), 0.0)

    @property
    def is_begun(self) -> bool:
        """Whether the workload has executed a round."""
        return self.rounds + self.failed > 0

    @property
    def due(self) -> float:
        """Time at which the next round begins, in seconds of the host's monotonic clock."""
        return self.started + (self.rounds + self.failed) / self.order.rate

    def line(self) -> str:
        """Return a line of text about the workload, with a newline.

        It has the order, the state, the number of rounds that succeeded, the number that failed, and the
        latest error.
        """
        order = self.order
        left = f" left={self.left:.1f}" if self.state == "running" else ""
        reason = f" ({self.reason})" if self.reason else ""
        return (
            f"{order.kind.value} rate={order.rate} duration={order.duration:g} state={self.state}{left}"
            f" rounds={self.rounds} failed={self.failed}{reason}\n"
        )


class Workloads:
    """The workloads of a kernel; at most one of each kind runs at a time."""

    def __init__(self, host: WorkloadHost, lock: ControlLock) -> None:
        self._host = host
        self._lock = lock
        self._loads: dict[WorkloadKind, RunningWorkload] = {}

    def text(self) -> Iterable[str]:
        """Return one line of text for each kind of workload that has ever run, about its latest workload."""
        return [running.line() for running in self._loads.values()]

    def orders(self) -> list[WorkloadOrder]:
        """Return orders by which another kernel continues the running workloads for their remaining time."""
        running = [load for load in self._loads.values() if load.state == "running"]
        return [replace(load.order, duration=load.left) for load in running if load.left]

    def parsed(self, line: str) -> Callable[[], None]:
        """Parse a command and return a function that executes it.

        A command is `KIND [rate=N] [duration=SECONDS]`, which starts a workload, or `stop [KIND]`. KIND may
        be `all`, for all kinds. `stop` alone stops all workloads.

        Raises: KernelError EINVAL (malformed), ERANGE (the rate or duration is out of range), EOPNOTSUPP (the
        kernel lacks the system calls). The returned function raises: KernelError EBUSY (a workload of that
        kind runs), ENOENT (the workload to stop does not run), and as `start`.
        """
        verb, *words = line.split()
        if verb == "stop":
            return partial(self._stop, [_kind(word) for word in words if word != ALL])
        return partial(self.start, *self._orders(verb, words))

    def start(self, *orders: WorkloadOrder) -> None:
        """Start workloads in the background.

        Raises: KernelError EBUSY (a workload of that kind runs; none was started), EIO (the guest is dead;
        none was started), ENOMEM (the host has no thread for an order; the orders before this one were
        started).
        """
        self._lock.assert_held()
        if self._host.is_dead:
            raise KernelError(errno.EIO, "the emulated kernel has stopped; see machine/dmesg")
        for order in orders:
            known = self._loads.get(order.kind)
            if known is not None and known.state == "running":
                raise KernelError(errno.EBUSY, f"{order.kind.value} runs already")
        for order in orders:
            running = RunningWorkload(order, monotonic())
            self._loads[order.kind] = running
            try:
                start_thread(f"load-{order.kind.value}", self._run, running)
            except KernelError:
                self._end(running, "failed")
                raise

    def stop(self, *kinds: WorkloadKind) -> None:
        """Stop the workloads of these kinds, or all workloads if no kind is given, and remove their tasks."""
        self._lock.assert_held()
        for running in self._loads.values():
            if running.state == "running" and (not kinds or running.order.kind in kinds):
                self._end(running, "stopped")

    def _stop(self, kinds: list[WorkloadKind]) -> None:
        for kind in kinds:
            if kind not in self._loads or self._loads[kind].state != "running":
                raise KernelError(errno.ENOENT, f"{kind.value} doesn't run")
        self.stop(*kinds)

    def _orders(self, verb: str, words: list[str]) -> list[WorkloadOrder]:
        rate = DEFAULT_RATE
        duration = DEFAULT_DURATION
        said: set[str] = set()
        for word in words:
            name, _, value = word.partition("=")
            if name in said:
                raise KernelError(errno.EINVAL, f"{word!r}: {name} twice")
            said.add(name)
            if name == "rate":
                rate = int(_number(word, value, MAX_RATE))
            elif name == "duration":
                duration = _number(word, value, MAX_DURATION)
            else:
                raise KernelError(errno.EINVAL, f"{word!r}: unknown option; use rate=N or duration=SECONDS")
        if rate < 1:
            raise KernelError(errno.ERANGE, "rate: less than 1; use an integer from 1")
        possible = self._host.kinds()
        kinds = possible if verb == ALL else [_kind(verb)]
        for kind in kinds:
            if kind not in possible:
                raise KernelError(errno.EOPNOTSUPP, f"this kernel has no system calls for {kind.value}")
        return [WorkloadOrder(kind, rate, duration) for kind in kinds]

    # The methods below run in the workload's thread.

    def _run(self, running: RunningWorkload) -> None:
        while not running.ended.wait(self._pause(running)):
            with self._lock:
                if running.state == "running":
                    self._slice(running)

    def _pause(self, running: RunningWorkload) -> float:
        """Return the seconds until the next round, at least SLICE, so that waiting requests get the lock."""
        return max(min(running.due - monotonic(), running.left), SLICE)

    def _slice(self, running: RunningWorkload) -> None:
        """Execute the rounds of a workload that are due; begin none after SLICE seconds.

        The first round is executed even if the thread has got no CPU until the duration has passed.
        End the workload if its duration has passed, the guest is dead, or MAX_FAILURES rounds in succession
        have failed with KernelError. Any other exception ends the workload at once.
        """
        if running.load is None:
            running.load = self._host.workload(running.order.kind, threading.get_native_id())
        state = "failed"
        try:
            self._host.slice_begins()
            until = monotonic() + SLICE
            if not running.is_begun:
                self._round(running, running.load)
            while running.due <= monotonic() < until and running.left:
                self._round(running, running.load)
            if running.left and running.in_succession < MAX_FAILURES and not self._host.is_dead:
                state = "running"
            elif not running.left:
                state = "done"
        finally:
            if state != "running":
                self._end(running, state)
            self._host.slice_ends()

    def _round(self, running: RunningWorkload, load: Workload) -> None:
        try:
            load.round()
        except KernelError as error:
            running.failed += 1
            running.in_succession += 1
            running.reason = str(error.strerror)
        else:
            running.rounds += 1
            running.in_succession = 0

    def _end(self, running: RunningWorkload, state: str) -> None:
        running.state = state
        running.ended.set()
        if running.load is not None:
            running.load.end()


def _kind(word: str) -> WorkloadKind:
    try:
        return WorkloadKind(word)
    except ValueError:
        names = ", ".join(kind.value for kind in WorkloadKind)
        raise KernelError(errno.EINVAL, f"{word!r} is no load: {names}, {ALL}, stop") from None


def _number(word: str, value: str, limit: float) -> float:
    try:
        number = float(value)
    except ValueError:
        raise KernelError(errno.EINVAL, f"{word!r}: not a number") from None
    if not 0 < number <= limit:
        raise KernelError(errno.ERANGE, f"{word!r}: more than 0, at most {limit:g}")
    return number
