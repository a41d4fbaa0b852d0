"""GicBoard: the time, the interrupt controller and the console of an arm64 machine.

The machine has one CPU, a GICv2 with only the private interrupts of this CPU, the virtual timer, and a PL011
as console.
Source: ARM Generic Interrupt Controller Architecture Specification 2.0 (IHI 0048), PL011 (DDI 0183).
"""

from __future__ import annotations

from typing import ClassVar, Final

from emulated_kernel.guests.linux.pc.board import Board

DISTRIBUTOR: Final = 0x40000000
CPU_INTERFACE: Final = 0x40010000
CONSOLE: Final = 0x40020000
"""Physical address of the console, a PL011. The addresses of all devices are above RAM."""
TIMER_INTERRUPT: Final = 27
"""Number of the virtual timer's interrupt."""
TIMER_ON: Final = 1
TIMER_MASKED: Final = 2
TIMER_FIRED: Final = 4
"""Bit ISTATUS of cntv_ctl_el0: the timer has fired. TIMER_ON is ENABLE, and TIMER_MASKED is IMASK."""
_NONE = 1023
"""Interrupt number that the GIC's CPU interface returns if no interrupt is pending."""
_MASK = (1 << 64) - 1
_LOW = 0xFFFFFFFF
_ID = 8
_SET_ENABLED = 0x100
_CLEAR_ENABLED = 0x180
_TARGETS = range(0x800, 0x820)
_ALL_ON_THIS_CPU = 0x01010101
_SOFTWARE = 0xF00
_ACKNOWLEDGE = 0xC
_CPU_ID = 0xFC
_GICV2 = 0x43B
_VERSION_2 = 2 << 16
_UART_FLAGS = 0x18
_UART_EMPTY = 0x90
"""Value of the PL011's flag register: the buffers for receiving and for sending are empty."""
_UART_ID: Final = {
    0xFE0: 0x11, 0xFE4: 0x10, 0xFE8: 0x14, 0xFF0: 0x0D, 0xFF4: 0xF0, 0xFF8: 0x05, 0xFFC: 0xB1,
}  # fmt: skip


class GicBoard(Board):
    """The time and the devices of an arm64 machine. The time is the counter cntvct_el0."""

    khz = 1_000_000
    STATE: ClassVar[tuple[str, ...]] = (*Board.STATE, "pending", "enabled", "control", "compare")

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.pending = 0
        """Mask of the pending interrupts; bit N is interrupt number N."""
        self.enabled = 0
        """Mask of the interrupts that the interrupt controller has enabled; bit N is interrupt number N."""
        self.control = 0
        """Value of the timer's control register cntv_ctl_el0, without the bit TIMER_FIRED."""
        self.compare = 0
        """Value of cntv_cval_el0: the value of the counter at which the timer fires."""

    @property
    def timer_vector(self) -> int | None:
        """Number of the timer's interrupt, or None if the timer is off or masked; see Board."""
        return None if self.due is None else TIMER_INTERRUPT

    @property
    def has_interrupt(self) -> bool:
        """Whether an enabled interrupt is pending."""
        return bool(self.pending & self.enabled)

    def timer_fires(self) -> None:
        """Advance the time to the timer's interrupt, and make this interrupt pending; see Board."""
        super().timer_fires()
        self.pending |= 1 << TIMER_INTERRUPT

    def set_timer(self, control: int, compare: int) -> None:
        """Set the virtual timer's registers cntv_ctl_el0 and cntv_cval_el0.

        Clear the timer's pending interrupt.
        """
        self.control = control & (TIMER_ON | TIMER_MASKED)
        self.compare = compare & _MASK
        self.due = self.compare if self.control == TIMER_ON else None
        self.pending &= ~(1 << TIMER_INTERRUPT)

    @property
    def timer_status(self) -> int:
        """Value of cntv_ctl_el0, with TIMER_FIRED if the counter has reached `compare`."""
        return self.control | (TIMER_FIRED if self.tsc >= self.compare else 0)

    def read_distributor(self, offset: int) -> int:
        """Return the value of the register at `offset` of the interrupt controller's distributor."""
        if offset in (_SET_ENABLED, _CLEAR_ENABLED):
            return self.enabled
        if offset in _TARGETS:
            return _ALL_ON_THIS_CPU
        # Value of the type register: 32 interrupts and one CPU. The guest only writes the other registers.
        return _GICV2 if offset == _ID else 0

    def write_distributor(self, offset: int, value: int) -> None:
        """Set the register at `offset` of the interrupt controller's distributor."""
        if offset == _SET_ENABLED:
            self.enabled |= value
        elif offset == _CLEAR_ENABLED:
            self.enabled &= ~value & _LOW
        elif offset == _SOFTWARE:
            self.pending |= 1 << (value & 15)

    def read_interface(self, offset: int) -> int:
        """Return the value of the register at `offset` of the interrupt controller's CPU interface.

        A read of the acknowledge register returns the number of a pending, enabled interrupt, and ends its
        pending state. If there is none, the number is _NONE.
        """
        if offset == _ACKNOWLEDGE:
            waiting = self.pending & self.enabled
            if not waiting:
                return _NONE
            number = (waiting & -waiting).bit_length() - 1
            self.pending &= ~(1 << number)
            return number
        return _GICV2 | _VERSION_2 if offset == _CPU_ID else 0

    def read_console(self, offset: int) -> int:
        """Return the value of the register at `offset` of the console, a PL011."""
        return _UART_EMPTY if offset == _UART_FLAGS else _UART_ID.get(offset, 0)

    def write_console_register(self, offset: int, value: int) -> None:
        """Print the character `value` if `offset` is 0; ignore writes of the console's other registers."""
        if offset == 0:
            self.write_console(bytes((value & 0xFF,)))
