"""PassingTime: advances guest time at clients' requests, and runs the guest's own work.

On a real machine, timers, delayed work and RCU callbacks run while no process makes a system call. In the
emulator, the guest runs only during requests. So each request counts as one tick, and some requests give the
guest a turn, a run for this work.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns

from emulated_kernel.guests.linux.guest.tasks import LinuxTasks
from emulated_kernel.guests.linux.kernel_offsets import (
    JIFFIES,
    PUNCTUAL,
    RUN_QUEUES,
    TICK_NSEC,
    TICK_TIMES,
    TIMER_BASES,
)

_TURN = 20_000
"""Maximum length of a turn, in which the guest does its own work, in microseconds of guest time."""
_MAX_REQUESTS = 250
"""Number of requests after which the guest gets a turn even if no timer has expired.

The requests take a second of guest time. RCU callbacks and high-resolution timers wait for the turn. A turn
costs as much as three to ten requests.
"""
_LONGEST_PAUSE = 1_000_000_000
"""Maximum nanoseconds of real time that pass in the guest at one request."""
_USUAL_TICK = 4_000_000
"""Length of a tick in nanoseconds if the kernel's is unknown; distributions use 250 Hz."""
_TICKS = range(900_000, 11_000_000)
"""Plausible lengths of a tick in nanoseconds, at 1,000 to 100 Hz and adjusted by NTP."""
_SECOND = 10**9
_MILLION = 10**6
_HALF = 1 << 63
_WORD = (1 << 64) - 1


class PassingTime:
    """Advances the guest's time by a tick at each request, and gives the guest turns for its delayed work.

    The timer's interrupt waits until the guest's next turn, because it would cost more than a request. The
    host itself advances the kernel's count of ticks, so that timers which the kernel arms before the
    interrupt expire in time.
    """

    def __init__(self, tasks: LinuxTasks) -> None:
        """Find the guest's tick counters and timer expiries.

        If one of these is unknown, turns depend only on the number of requests.
        """
        self._tasks = tasks
        self._pc = tasks.machine.pc
        self._words = tasks.machine.memory.words
        self._requests = 0
        """Number of requests since the last turn."""
        self._counters: list[tuple[int, int]] = []
        """Pairs: index of a kernel counter among the 8-byte words of RAM, and what a tick adds to it.

        The first counter is the number of ticks.
        """
        self._expiries: list[int] = []
        """Indexes, among the 8-byte words of RAM, of the tick counts at which the next timers expire."""
        self._runnable = 0
        """Physical address of the run queue's number of runnable tasks."""
        tick = self._find_counters()
        self._tick = tick * self._pc.khz // _MILLION

    def _find_counters(self) -> int:
        """Find the kernel's tick counters and timer expiries; return the length of a tick in nanoseconds.

        If the kernel lacks a needed symbol, or its tick has an implausible length, find nothing and return
        _USUAL_TICK.
        """
        tasks = self._tasks
        symbols = tasks.facts.symbols
        offsets = tasks.facts.offsets
        per_cpu = tasks.facts.per_cpu
        needed = {JIFFIES, TICK_NSEC, *TICK_TIMES, TIMER_BASES}
        if not needed <= symbols.keys() | per_cpu.keys() or PUNCTUAL not in offsets:
            return _USUAL_TICK

        def physical(va: int) -> int:
            return tasks.machine.memory.translate(tasks.root, va)

        adjusted = self._words[physical(symbols[TICK_NSEC]) >> 3]
        if adjusted not in _TICKS:
            return _USUAL_TICK
        # NTP adjusts the length of a tick a little.
        hz = round(_SECOND / adjusted)
        tick = (_SECOND + hz // 2) // hz
        steps = {JIFFIES: 1, **dict.fromkeys(TICK_TIMES, tick)}
        self._counters = [(physical(symbols[name]) >> 3, step) for name, step in steps.items()]
        wheel = tasks.per_cpu + per_cpu[TIMER_BASES] + offsets["timer_base.next_expiry"]
        wheels = range(wheel, wheel + offsets[PUNCTUAL] * offsets[TIMER_BASES], offsets[TIMER_BASES])
        self._expiries = [physical(each) >> 3 for each in wheels]
        self._runnable = physical(tasks.per_cpu + per_cpu[RUN_QUEUES] + offsets["rq.nr_running"])
        return tick

    def request_begins(self) -> None:
        """Advance the time by a tick. Give the guest a turn if a timer has expired, or after many requests.

        Lock: held. Raises: GuestFault (the guest has died).
        Mirrors: kernel/time/tick-sched.c:tick_do_update_jiffies64 (v6.1).
        """
        pc = self._pc
        words = self._words
        pc.pass_time(self._tick)
        if pc.due is not None:
            pc.due += self._tick
        for place, step in self._counters:
            words[place] = words[place] + step & _WORD
        self._requests += 1
        if self._requests >= _MAX_REQUESTS or self._expires_in(0):
            self.take_turn()

    def _expires_in(self, ticks: int) -> bool:
        """Return True if a timer has expired or expires within `ticks` ticks.

        Mirrors: kernel/time/timer.c:run_local_timers (v6.1).
        """
        words = self._words
        for expiry in self._expiries:
            if words[self._counters[0][0]] + ticks - words[expiry] & _WORD < _HALF:
                return True
        return False

    def take_turn(self) -> None:
        """Deliver the timer's interrupt, which the requests since the last turn have put off.

        Then, if other tasks can run now or soon, run the guest until it is idle or _TURN microseconds have
        passed.
        """
        self._requests = 0
        pc = self._pc
        if pc.due is not None:
            pc.due = min(pc.due, pc.tsc)
        tasks = self._tasks
        tasks.take_interrupts()
        # To put the task to sleep and to wake it again would cost more than the interrupt.
        if tasks.current is None or self._is_busy():
            tasks.work(_TURN)

    def _is_busy(self) -> bool:
        """Return True if a task other than the one at its stub can run now or soon, or if this is unknown."""
        if not self._expiries:
            return True
        others = self._words[self._runnable >> 3] >> 8 * (self._runnable & 4) & 0xFFFFFFFF
        return others > 1 or self._expires_in(_TURN * self._pc.khz // 1000 // self._tick)


class RealTime:
    """Makes the guest's clock follow the host's clock: real time between two requests passes in the guest."""

    def __init__(self, tasks: LinuxTasks, wall: Callable[[], int] = monotonic_ns) -> None:
        """Make the guest's time advance with the real time, from the guest's current time on.

        `wall`: function that returns the real time in nanoseconds.
        """
        self._tasks = tasks
        self._pc = tasks.machine.pc
        self._pc.follow_wall(wall)

    def request_begins(self) -> None:
        """Advance the guest's time by the real time that has passed, at most _LONGEST_PAUSE nanoseconds.

        If this is a tick or more, also run the guest's own work.
        Lock: held. Raises: GuestFault (the guest has died).
        """
        behind = self._pc.behind()
        if behind > _LONGEST_PAUSE:
            self._pc.skip(behind - _LONGEST_PAUSE)
            behind = _LONGEST_PAUSE
        if behind >= _USUAL_TICK:
            self._tasks.idle(behind // 1000)
        elif behind > 0:
            self._pc.pass_time(behind * self._pc.khz // _MILLION)
