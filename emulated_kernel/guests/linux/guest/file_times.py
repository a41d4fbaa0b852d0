"""FileTimes: when the guest's files changed, as the host's clock has it."""

from __future__ import annotations

from struct import pack_into, unpack_from

from emulated_kernel.guests.common.wall_time import WallTime
from emulated_kernel.guests.linux.kernel_offsets import COARSE_CLOCKS, TIME_READ, TIMEKEEPER, KernelOffsets
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine

_SECOND = 10**9
_WORD = (1 << 64) - 1
_READ = "clocksource.read"


class FileTimes:
    """The guest's time goes on with its own work alone, and its files take that of its latest tick.

    A tick is as long as thousands of requests: so each file gets the time of its change, which no other
    reading of the guest's sees, and is shown what the host's clock said then.
    """

    def __init__(self, machine: LinuxMachine, facts: KernelOffsets) -> None:
        """Of a kernel whose clock isn't known, or isn't the TSC, files have the guest's own time."""
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
            """Number of its word of RAM."""
            return physical(name) >> 3

        self._tsc_read, self._read = symbols[TIME_READ], offset[_READ]
        self._clock = place("tkr_mono.clock")
        self._see_clock()
        if not self._is_tsc:
            return
        self._mask = place("tkr_mono.mask")
        self._factor, self._shift = physical("tkr_mono.mult"), physical("tkr_mono.shift")
        self._last, self._fraction = place("tkr_mono.cycle_last"), place("tkr_mono.xtime_nsec")
        self._seconds = place("xtime_sec")
        self._bases = place("tkr_mono.base"), place("tkr_mono.base_real")
        self._coarse = physical("coarse_nsec") if "timekeeper.coarse_nsec" in offset else None
        self._walls = WallTime(self._go_on)
        for address in clocks:
            machine.call_at(address, self._walls.remember)

    def _see_clock(self) -> None:
        """Which clock the kernel has: it may change to another one, which reads the TSC or doesn't."""
        self._known_clock = self._words[self._clock]
        try:
            read = self._memory.read_word(self._root, self._known_clock + self._read)
        except KeyError:
            read = 0
        self._is_tsc = read == self._tsc_read

    def _go_on(self) -> int:
        """The time that files get, in nanoseconds, is the present one if it is the TSC's.

        The next tick makes it anew. Invariant: what the kernel's other clocks say stays the same, to the bit.
        Mirrors: kernel/time/timekeeping.c:timekeeping_forward_now (v6.1)
        """
        words = self._words
        if words[self._clock] != self._known_clock:
            self._see_clock()
        (shift,), fraction = unpack_from("<I", self._ram, self._shift), words[self._fraction]
        # What a hostile kernel has here and there wraps around, as it does in its own.
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
        """A file's time, in nanoseconds since the epoch."""
        return time_ns if self._walls is None else self._walls.to_wall(time_ns)

    def kept(self, time_ns: int) -> int:
        """What the guest is told of a time that a process sets."""
        return time_ns if self._walls is None else self._walls.to_guest(time_ns)
