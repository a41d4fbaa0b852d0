"""Pc: the devices of a small PC that Linux drives: interrupt controller, timer, serial line and clock.

Ports without a device read as all ones.
Sources: data sheets of the 8259A, 8254, 16550 and MC146818.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Protocol

from emulated_kernel.machine.native.tsc_words import (
    SHORTEST_STEP,
    STEP_ADDEND,
    STEP_FACTOR,
    STEP_SHIFT,
    TscWords,
)
from emulated_kernel.util.safe_read import is_word

TSC_KHZ = 2_600_000
PIT_HZ = 1_193_182
_PIC_COMMAND = (0x20, 0xA0)
_PIC_DATA = (0x21, 0xA1)
_ICW1 = 0x10
_PIT_CHANNEL0 = 0x40
_PIT_CHANNEL2 = 0x42
_PIT_CONTROL = 0x43
_PORT_61 = 0x61
_UART = range(0x3F8, 0x400)
_UART_DATA = 0x3F8
_UART_IER = 0x3F9
_UART_IIR = 0x3FA
_UART_LSR = 0x3FD
_UART_MSR = 0x3FE
_RTC_INDEX = 0x70
_RTC_DATA = 0x71
_RTC = {0: 0, 2: 0, 4: 0x12, 6: 1, 7: 1, 8: 1, 9: 0x24, 10: 0x26, 11: 2, 13: 0x80}
"""Register of the clock chip -> its value. The clock always shows Monday, 1 January 2024, noon.

A boot must not depend on the date.
"""
_LOG_LIMIT = 1 << 16
_MASK = (1 << 64) - 1
_MILLION = 10**6
_TSC = TscWords.tsc.offset // 8
_STEPS = TscWords.steps.offset // 8


class TimeFollower(Protocol):
    """Interface that shows the time to guest code, which also advances the time."""

    def go_on(self, tsc: int, cycles: int) -> int:
        """Advance the time, show the new time to guest code and return it.

        The new time is the old time `tsc`, plus the cycles that guest code has used since, plus `cycles`.
        """

    def show(self, cycles: int) -> None:
        """Show the TSC value `cycles` to guest code as the current time."""


class Pc:
    """Devices and time of the PC. The time is the TSC; each rdtsc advances it by a seeded random step."""

    def __init__(self, seed: int) -> None:
        self._follower: TimeFollower | None = None
        self.words = TscWords(tsc=10**9, steps=seed)
        """The TSC and the generator of its random steps; the host's routine for rdtsc uses both."""
        self._cells = memoryview(self.words).cast("B").cast("Q")
        self._wall: Callable[[], int] | None = None
        """Function that returns the host's time in nanoseconds; None if the time does not follow it."""
        self._wall_base = 0
        """Host's time in nanoseconds at which the TSC was 0."""
        self.due: int | None = None
        """TSC value of the timer's next interrupt; None if the timer is off."""
        self.period = 0
        """Period of the timer in cycles; 0 if it interrupts once."""
        self.console = bytearray()
        """The latest output of the kernel on its serial line, at most _LOG_LIMIT bytes."""
        self._pic_mask = [0xFF, 0xFF]
        self._pic_base = [0, 0]
        self._pic_words = [0, 0]
        """Number of initialization words that each interrupt controller still expects."""
        self._pit_mode = 0
        self._pit_count = 0x10000
        self._pit_low: int | None = None
        self._pit_reads = 0
        self._port_61 = 0
        self._rtc_index = 0
        self._ier = 0

    STATE = (
        "tsc", "random", "due", "period", "_pic_mask", "_pic_base", "_pic_words", "_pit_mode", "_pit_count",
        "_pit_low", "_pit_reads", "_port_61", "_rtc_index", "_ier",
    )  # fmt: skip
    """Names of the attributes that a snapshot keeps."""
    _NONE = "due", "_pit_low"

    def state(self) -> dict[str, Any]:
        """Return the state of the devices, for a snapshot."""
        return {name: getattr(self, name) for name in self.STATE}

    def restore(self, state: dict[str, Any]) -> None:
        """Set the devices to a state that state() has returned.

        Raises: KeyError, TypeError, ValueError (state() cannot have returned `state`).
        """
        for name in self.STATE:
            kept = state[name]
            if isinstance(getattr(self, name), list):
                words = kept
                (_, _) = words
            else:
                words = [0 if kept is None and name in self._NONE else kept]
            if not all(map(is_word, words)):
                raise ValueError(f"{name} is {kept}")
            setattr(self, name, kept)
        if not self._pit_count:
            raise ValueError("_pit_count is 0")

    # Time

    @property
    def follower(self) -> TimeFollower | None:
        """The object that shows the time to guest code, if any; with it, Python executes rdtsc."""
        return self._follower

    @follower.setter
    def follower(self, follower: TimeFollower) -> None:
        self._follower = follower
        self.words.followed = 1

    @property
    def random(self) -> int:
        """State of the random generator that computes the steps of rdtsc."""
        return self._cells[_STEPS]

    @random.setter
    def random(self, state: int) -> None:
        self._cells[_STEPS] = state

    @property
    def tsc(self) -> int:
        """Cycles since power-on, modulo 2**64."""
        if self._follower is not None:
            self._cells[_TSC] = self._follower.go_on(self._cells[_TSC], 0) & _MASK
        return self._cells[_TSC]

    @tsc.setter
    def tsc(self, cycles: int) -> None:
        self._cells[_TSC] = cycles & _MASK
        if self._follower is not None:
            self._follower.show(cycles)

    @property
    def is_real(self) -> bool:
        """Whether the PC's time follows the host's time."""
        return self._wall is not None

    def follow_wall(self, wall: Callable[[], int] = monotonic_ns) -> None:
        """Make each rdtsc advance the time to the host's. `wall` returns the host's time in nanoseconds."""
        self._wall = wall
        self._wall_base = wall() - self.tsc * _MILLION // TSC_KHZ
        # The host's routine for rdtsc does not know the host's time.
        self.words.followed = 1

    def behind(self) -> int:
        """Return the host's time minus this time, in nanoseconds; it is negative if this time is ahead."""
        assert self._wall is not None
        return self._wall() - self._wall_base - self.tsc * _MILLION // TSC_KHZ

    def skip(self, nanoseconds: int) -> None:
        """Leave out a part of the host's time, which then never passes in the guest."""
        self._wall_base += nanoseconds

    def pass_time(self, cycles: int) -> None:
        """Advance the time by `cycles` and by the cycles that guest code has used."""
        before = self._cells[_TSC]
        follower = self._follower
        after = before + cycles if follower is None else follower.go_on(before, cycles)
        self._cells[_TSC] = after & _MASK

    def read_tsc(self) -> int:
        """Advance the time by a random step and return it, as the result of rdtsc.

        The step varies, because some code waits until it has read two different values. If the
        guest's time follows the host's and lags by more than the step, it advances to the host's time.
        """
        state = (self._cells[_STEPS] * STEP_FACTOR + STEP_ADDEND) & _MASK
        self._cells[_STEPS] = state
        step = SHORTEST_STEP + (state >> STEP_SHIFT)
        if self._wall is not None:
            step = max(step, self.behind() * TSC_KHZ // _MILLION)
        self.pass_time(step)
        return self._cells[_TSC]

    @property
    def timer_vector(self) -> int | None:
        """Vector of the timer's interrupt, or None if the timer is off or masked."""
        if self.due is None or self._pic_mask[0] & 1:
            return None
        return self._pic_base[0]

    @property
    def is_due(self) -> bool:
        """Whether the timer's interrupt is due, by the time that was read or set last."""
        return self.due is not None and self._cells[_TSC] >= self.due and self.timer_vector is not None

    def timer_fires(self) -> None:
        """Advance the time to the timer's interrupt and start the next period."""
        assert self.due is not None
        self.tsc = max(self.tsc, self.due)
        self.due = self.tsc + self.period if self.period else None

    # Ports

    def read_port(self, port: int, size: int) -> int:
        """Execute the instruction `in`: return the value of a port, which has `size` bytes."""
        if port in _PIC_DATA:
            return self._pic_mask[_PIC_DATA.index(port)]
        if port in _UART:
            return self._read_uart(port)
        if port == _PIT_CHANNEL0:
            self._pit_reads ^= 1
            left = self._pit_count - self.tsc * PIT_HZ // (TSC_KHZ * 1000) % self._pit_count
            return left & 0xFF if self._pit_reads else left >> 8 & 0xFF
        if port == _PIT_CHANNEL2:
            # The channel never counts. If it were 0xff, the calibration of the TSC at boot would read it
            # 100,000 times before it fails.
            # Mirrors: arch/x86/kernel/tsc.c:pit_expect_msb (v6.1)
            return 0
        if port == _PORT_61:
            # Toggle the output of channel 2 and the refresh bit, because code waits for a change of either.
            self._port_61 ^= 0x30
            return self._port_61
        if port == _RTC_DATA:
            return _RTC.get(self._rtc_index, 0)
        return (1 << 8 * size) - 1

    def write_port(self, port: int, value: int) -> None:
        """Execute the instruction `out`: write a value to a port."""
        if port in _PIC_COMMAND:
            if value & _ICW1:
                self._pic_words[_PIC_COMMAND.index(port)] = 3
        elif port in _PIC_DATA:
            self._write_pic(_PIC_DATA.index(port), value)
        elif port == _UART_DATA:
            self.console.append(value & 0xFF)
            del self.console[:-_LOG_LIMIT]
        elif port == _UART_IER:
            self._ier = value & 0xF
        elif port == _RTC_INDEX:
            self._rtc_index = value & 0x7F
        elif port == _PIT_CONTROL and not value >> 6:
            self._pit_mode = value >> 1 & 7
            self._pit_low = None
        elif port == _PIT_CHANNEL0:
            self._write_pit(value)

    def _write_pic(self, chip: int, value: int) -> None:
        left = self._pic_words[chip]
        if not left:
            self._pic_mask[chip] = value
            return
        if left == 3:
            self._pic_base[chip] = value
        self._pic_words[chip] = left - 1

    def _write_pit(self, value: int) -> None:
        """Write the low byte of the timer's count, then the high byte, which starts the timer."""
        if self._pit_low is None:
            self._pit_low = value
            return
        self._pit_count = (self._pit_low | value << 8) or 0x10000
        self._pit_low = None
        cycles = self._pit_count * TSC_KHZ * 1000 // PIT_HZ
        self.due = self.tsc + cycles
        self.period = cycles if self._pit_mode in (2, 3, 6, 7) else 0

    def _read_uart(self, port: int) -> int:
        if port == _UART_IER:
            return self._ier
        if port == _UART_IIR:
            return 2 if self._ier & 2 else 1
        return {_UART_LSR: 0x60, _UART_MSR: 0xB0}.get(port, 0)
