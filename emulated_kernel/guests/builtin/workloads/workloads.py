"""Background loads: a thread each, which holds the control lock for a slice at a time, and for so long."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable
from dataclasses import field, replace
from functools import partial
from time import monotonic

from emulated_kernel.guests.builtin.guest import Guest
from emulated_kernel.guests.builtin.workloads.workload import BackgroundWorkload, WorkloadKind, kinds_of
from emulated_kernel.guests.common.request_clock import RequestObserver
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.threads import start_thread

MAX_RATE = 10_000
"""Rounds a second."""
MAX_DURATION = 86_400.0
"""Seconds."""
DEFAULT_RATE = 10
DEFAULT_DURATION = 10.0
SLICE = 0.002
"""Seconds that rounds may hold the control lock at a time; a round that was begun is ended."""
MAX_FAILURES = 100
"""Rounds in succession that fail until a load gives up."""
ALL = "all"


@dataclass(frozen=True)
class WorkloadOrder:
    """What was asked for."""

    kind: WorkloadKind
    rate: int = DEFAULT_RATE
    """Rounds a second that it tries to make."""
    duration: float = DEFAULT_DURATION
    """Seconds."""


@dataclass(eq=False)
class RunningWorkload:
    """A load, and what became of it; times by the host's monotonic clock."""

    order: WorkloadOrder
    started: float
    load: BackgroundWorkload | None = None
    rounds: int = 0
    failed: int = 0
    state: str = "running"
    """Then "done", "stopped" or "failed"."""
    reason: str = ""
    """Why the last round failed that did."""
    ended: threading.Event = field(default_factory=threading.Event)
    in_succession: int = 0

    @property
    def left(self) -> float:
        """Seconds until its time is up."""
        return max(self.started + self.order.duration - monotonic(), 0.0)

    @property
    def due(self) -> float:
        """When the next round is."""
        return self.started + (self.rounds + self.failed) / self.order.rate

    def line(self) -> str:
        """The order, then state, counts and the latest failure."""
        order = self.order
        left = f" left={self.left:.1f}" if self.state == "running" else ""
        reason = f" ({self.reason})" if self.reason else ""
        return (
            f"{order.kind.value} rate={order.rate} duration={order.duration:g} state={self.state}{left}"
            f" rounds={self.rounds} failed={self.failed}{reason}\n"
        )


class Workloads:
    """The loads of a kernel: at most one of a kind at a time."""

    def __init__(self, guest: Guest, lock: ControlLock, requests: RequestObserver) -> None:
        self._guest = guest
        self._lock = lock
        self._requests = requests
        self._loads: dict[WorkloadKind, RunningWorkload] = {}

    def text(self) -> Iterable[str]:
        """A line for each kind that ever ran, with what it did the last time."""
        return [running.line() for running in self._loads.values()]

    def orders(self) -> list[WorkloadOrder]:
        """What is left of those that run, for another kernel to go on with."""
        running = [each for each in self._loads.values() if each.state == "running"]
        return [replace(each.order, duration=each.left) for each in running if each.left]

    def parsed(self, line: str) -> Callable[[], None]:
        """What does it: `KIND [rate=N] [duration=SECONDS]`, KIND `all` for each; `stop [KIND]`.

        Raises: KernelError EINVAL (malformed), ERANGE (too much), EOPNOTSUPP (the kernel lacks the system
        calls). What is returned: EBUSY (one of that kind runs), ENOENT (nothing to stop), and as `start`.
        """
        verb, *words = line.split()
        if verb == "stop":
            return partial(self._stop, [_kind(word) for word in words if word != ALL])
        return partial(self.start, *self._orders(verb, words))

    def start(self, *orders: WorkloadOrder) -> None:
        """Start loads in the background. Raises: KernelError EBUSY, EIO (the guest is dead, none started),
        ENOMEM (no thread, those before it started)."""
        self._lock.assert_held()
        if self._guest.is_dead:
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
        """End loads, all where no kind is given; their tasks are gone then."""
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
                raise KernelError(errno.EINVAL, f"{word!r}: a load has rate=N and duration=SECONDS")
        if rate < 1:
            raise KernelError(errno.ERANGE, "rate is at least 1")
        possible = kinds_of(self._guest)
        kinds = possible if verb == ALL else [_kind(verb)]
        for kind in kinds:
            if kind not in possible:
                raise KernelError(errno.EOPNOTSUPP, f"this kernel has no system calls for {kind.value}")
        return [WorkloadOrder(kind, rate, duration) for kind in kinds]

    # In the load's thread

    def _run(self, running: RunningWorkload) -> None:
        while not running.ended.wait(self._pause(running)):
            with self._lock:
                if running.state == "running":
                    self._slice(running)

    def _pause(self, running: RunningWorkload) -> float:
        """Seconds until the next round; long enough for a waiting request to take the lock."""
        return max(min(running.due - monotonic(), running.left), SLICE)

    def _slice(self, running: RunningWorkload) -> None:
        """Rounds that are due. Whatever goes wrong that isn't a round's failure ends the load."""
        if running.load is None:
            running.load = BackgroundWorkload(self._guest, running.order.kind, threading.get_native_id())
        state = "failed"
        try:
            self._requests.request_begins()
            until = monotonic() + SLICE
            while running.due <= monotonic() < until and running.left:
                self._round(running, running.load)
            if running.left and running.in_succession < MAX_FAILURES and not self._guest.is_dead:
                state = "running"
            elif not running.left:
                state = "done"
        finally:
            if state != "running":
                self._end(running, state)

    def _round(self, running: RunningWorkload, load: BackgroundWorkload) -> None:
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
        raise KernelError(errno.EINVAL, f"{word!r} has no number") from None
    if not 0 < number <= limit:
        raise KernelError(errno.ERANGE, f"{word!r}: more than 0, at most {limit:g}")
    return number
