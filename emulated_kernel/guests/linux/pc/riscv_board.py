"""SbiBoard: the time of a RISC-V machine, and the firmware that answers the kernel's SBI calls.

The machine has one hart, RAM and a timer. Its console belongs to the firmware.
Source: RISC-V Supervisor Binary Interface Specification 2.0.
"""

from __future__ import annotations

from typing import Final

from emulated_kernel.guests.linux.pc.board import Board

TIMER_INTERRUPT: Final = 5
"""Number of the supervisor's timer interrupt."""
SOFTWARE_INTERRUPT: Final = 1
"""Number of the supervisor's software interrupt."""
_BASE = 0x10
_TIME = 0x54494D45
_IPI = 0x735049
_FENCE = 0x52464E43
_HART = 0x48534D
_RESET = 0x53525354
_CONSOLE = 0x4442434E
_EXTENSIONS = frozenset((_BASE, _TIME, _IPI, _FENCE, _HART, _RESET, _CONSOLE))
_SPECIFICATION = 2 << 24
_GET_VERSION = 0
_PROBE_EXTENSION = 3
_HART_STATUS = 2
_CONSOLE_WRITE = 0
_CONSOLE_READ = 1
_NEVER = (1 << 64) - 1
NOT_SUPPORTED: Final = -2
INVALID_PARAMETER: Final = -3
_LONGEST_WRITE = 1 << 16


class SbiBoard(Board):
    """The time and the firmware of a RISC-V machine. The time is the counter that rdtime reads."""

    khz = 1_000_000

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.is_reset = False
        """Whether the kernel has ended or restarted the machine."""
        self.pending = 0
        """Mask of the interrupts that the kernel's last SBI call has made pending.

        Bit N is interrupt number N.
        """
        self.cleared = 0
        """Mask of the interrupts that the kernel's last SBI call has made not pending.

        Bit N is interrupt number N.
        """

    @property
    def timer_vector(self) -> int | None:
        """Number of the timer's interrupt, or None if the timer is off; see Board."""
        return None if self.due is None else TIMER_INTERRUPT

    def call(
        self, extension: int, function: int, arguments: tuple[int, int], ram: memoryview
    ) -> tuple[int, int]:
        """Execute the SBI call `function` of `extension`; return (error, value).

        The error is 0 or one of SBI's negative error numbers. `arguments`: the first two arguments. `ram`:
        RAM, to which pointer arguments refer.
        """
        self.pending = 0
        self.cleared = 0
        first, second = arguments
        if extension == _TIME:
            self.due = None if first == _NEVER else first
            self.cleared = 1 << TIMER_INTERRUPT
        elif extension == _BASE:
            return 0, self._base(function, first)
        elif extension == _IPI:
            self.pending = 1 << SOFTWARE_INTERRUPT
        elif extension == _HART:
            return (0, 0) if function == _HART_STATUS else (NOT_SUPPORTED, 0)
        elif extension == _RESET:
            self.is_reset = True
        elif extension == _CONSOLE:
            return self._console(function, first, second, ram)
        elif extension != _FENCE:
            # The only hart flushes its own translations.
            return NOT_SUPPORTED, 0
        return 0, 0

    def _base(self, function: int, argument: int) -> int:
        if function == _GET_VERSION:
            return _SPECIFICATION
        return int(argument in _EXTENSIONS) if function == _PROBE_EXTENSION else 0

    def _console(self, function: int, first: int, address: int, ram: memoryview) -> tuple[int, int]:
        if function == _CONSOLE_READ:
            return 0, 0
        if function != _CONSOLE_WRITE:
            self.write_console(bytes((first & 0xFF,)))
            return 0, 0
        size = min(first, _LONGEST_WRITE)
        if address + size > len(ram):
            return INVALID_PARAMETER, 0
        self.write_console(bytes(ram[address : address + size]))
        return 0, size
