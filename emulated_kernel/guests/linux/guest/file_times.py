"""FileTimes: shows the times of the guest's files as times of the host's clock."""

from __future__ import annotations

from struct import pack_into, unpack_from

from emulated_kernel.guests.common.wall_time import WallTime
from emulated_kernel.guests.linux.kernel_offsets import COARSE_CLOCKS, TIME_READ, TIMEKEEPER, KernelOffsets
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.machine.traps.trap import MemoryFault

_SECOND = 10**9
_WORD = (1 << 64) - 1
_READ = "clocksource.read"


class FileTimes:
    """Maps timestamps of the guest's files to times of the host's clock.

    The guest's time advances only while the guest runs, and a changed file gets the time of the latest tick.
    A tick is as long as thousands of requests. Therefore the host advances the time that files get, so that
    each change has a different guest time. The mount shows the host's time of each change.
    """

    def __init__(self, machine: LinuxMachine, facts: KernelOffsets) -> None:
        """Find the guest's timekeeper, from which changed files get their times.

        If the kernel's clock is unknown or not the TSC, files show the guest's own time.
        """
        self._memory = machine.memory
        self._root = machine.cpu.root
        self._ram = machine.memory.ram
        self._words = machine.memory.words
        self._pc = machine.pc
        self._walls: WallTime | None = None
        symbols = facts.symbols
        offset = facts.offsets
        clocks = [symbols[name] for name in COARSE_CLOCKS if name in symbols]
        if not clocks or not {TIMEKEEPER, TIME_READ} <= symbols.keys() or TIMEKEEPER not in offset:
            return
        timekeeper = symbols[TIMEKEEPER] + offset[TIMEKEEPER]

        def physical(name: str) -> int:
            return self._memory.translate(self._root, timekeeper + offset[f"timekeeper.{name}"])

        def place(name: str) -> int:
            """Return the index, among the 8-byte words of RAM, of the timekeeper's member `name`."""
            return physical(name) >> 3

        self._tsc_read = symbols[TIME_READ]
        self._read = offset[_READ]
        self._clock = place("tkr_mono.clock")
        self._see_clock()
        if not self._is_tsc:
            return
        self._mask = place("tkr_mono.mask")
        self._factor = physical("tkr_mono.mult")
        self._shift = physical("tkr_mono.shift")
        self._last = place("tkr_mono.cycle_last")
        self._fraction = place("tkr_mono.xtime_nsec")
        self._seconds = place("xtime_sec")
        self._bases = place("tkr_mono.base"), place("tkr_mono.base_real")
        self._coarse = physical("coarse_nsec") if "timekeeper.coarse_nsec" in offset else None
        self._walls = WallTime(self._go_on)
        for address in clocks:
            machine.call_at(address, self._walls.remember)

    def _see_clock(self) -> None:
        """Record which clock source the kernel uses now, and whether that clock source is the TSC."""
        self._known_clock = self._words[self._clock]
        try:
            read = self._memory.read_word(self._root, self._known_clock + self._read)
        except MemoryFault:
            read = 0
        self._is_tsc = read == self._tsc_read

    def _go_on(self) -> int:
        """Advance the kernel's timekeeper, from which changed files get their times, to the present time.

        Return this time in nanoseconds.

        If the clock source is not the TSC, change nothing, and return the time of the latest tick. The kernel
        computes the same time again at its next tick. The values that other clocks of the kernel return do
        not change.
        Mirrors: kernel/time/timekeeping.c:timekeeping_forward_now (v6.1).
        """
        words = self._words
        if words[self._clock] != self._known_clock:
            self._see_clock()
        (shift,), fraction = unpack_from("<I", self._ram, self._shift), words[self._fraction]
        # Values of a hostile kernel wrap around, as they do in the kernel itself.
        shift &= 63
        if self._is_tsc:
            (factor,) = unpack_from("<I", self._ram, self._factor)
            passed = max(self._pc.tsc - words[self._last], 0) & words[self._mask]
            words[self._last] += passed
            fraction = fraction + passed * factor & _WORD
            second = _SECOND << shift & _WORD
            if fraction >= second > 0:
                seconds, fraction = divmod(fraction, second)
                words[self._seconds] = words[self._seconds] + seconds & _WORD
                for base in self._bases:
                    words[base] = words[base] + seconds * _SECOND & _WORD
            words[self._fraction] = fraction
            if self._coarse is not None:
                pack_into("<I", self._ram, self._coarse, fraction >> shift & 0xFFFFFFFF)
        return int(words[self._seconds] * _SECOND + (fraction >> shift))

    def shown(self, time_ns: int) -> int:
        """Return the host time to show for `time_ns`, a file's time in the guest.

        Both are in nanoseconds since the epoch.
        """
        return time_ns if self._walls is None else self._walls.to_wall(time_ns)

    def kept(self, time_ns: int) -> int:
        """Return the guest time to store for a time that a process sets; both are in nanoseconds."""
        return time_ns if self._walls is None else self._walls.to_guest(time_ns)
