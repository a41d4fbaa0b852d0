"""Pc: the devices of a small PC that Linux drives: interrupt controller, timer, serial line and clock.

Ports without a device read as all ones.
Sources: data sheets of the 8259A, 8254, 16550 and MC146818.
"""

from __future__ import annotations

from typing import Any

from emulated_kernel.guests.linux.pc.board import Board

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


class Pc(Board):
    """Devices of the PC. The time of the board is the TSC, which rdtsc reads."""

    khz = TSC_KHZ
    STATE = (
        *Board.STATE, "_pic_mask", "_pic_base", "_pic_words", "_pit_mode", "_pit_count", "_pit_low",
        "_pit_reads", "_port_61", "_rtc_index", "_ier",
    )  # fmt: skip
    _NONE = (*Board._NONE, "_pit_low")

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._pic_mask = [0xFF, 0xFF]
        self._pic_base = [0, 0]
        self._pic_words = [0, 0]
        """[master, slave]: number of initialization words that each interrupt controller still expects."""
        self._pit_mode = 0
        self._pit_count = 0x10000
        self._pit_low: int | None = None
        self._pit_reads = 0
        self._port_61 = 0
        self._rtc_index = 0
        self._ier = 0

    def restore(self, state: dict[str, Any]) -> None:
        """Set the devices to a state that state() has returned.

        Raises: KeyError, TypeError, ValueError (state() cannot have returned `state`).
        """
        super().restore(state)
        if not self._pit_count:
            raise ValueError("_pit_count is 0")

    @property
    def timer_vector(self) -> int | None:
        """Vector of the timer's interrupt, or None if the timer is off or masked."""
        if self.due is None or self._pic_mask[0] & 1:
            return None
        return self._pic_base[0]

    # Ports

    def read_port(self, port: int, size: int) -> int:
        """Execute the instruction `in`: return the value of `port`, of `size` bytes."""
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
            # Mirrors: arch/x86/kernel/tsc.c:pit_expect_msb (v6.1).
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
            self.write_console(bytes((value & 0xFF,)))
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
        """Store `value` as the low byte of the timer's count, or at the second write as its high byte.

        The second write starts the timer.
        """
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
