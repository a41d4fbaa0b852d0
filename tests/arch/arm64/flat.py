"""A flat arm64 machine: Unicorn without page tables, for a few pages of code."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import unicorn
from unicorn import arm64_const as const

from emulated_kernel.arch.arm64.insn import REGISTER_NAMES
from tests.arch import engines

PAGE = 0x1000
NAMES = (*REGISTER_NAMES, "sp")
FLAGS = 0xF << 28
"""Mask of the condition flags in the processor state."""
_IDS = {name: getattr(const, f"UC_ARM64_REG_{name.upper()}") for name in NAMES} | {
    "flags": const.UC_ARM64_REG_PSTATE
}
_BREAKPOINT = 7
"""Unicorn's number of the exception that brk causes."""

OnBreak = Callable[["Flat", int], int | None]
"""Function (machine, address of the breakpoint) -> address to continue at, or None to stop."""


class Flat:
    """A CPU that runs code between breakpoints; the caller handles the breakpoints."""

    def __init__(self, areas: Mapping[int, bytes], registers: Mapping[str, int]) -> None:
        """Map `areas` (address -> contents), which are whole pages, and set the registers."""
        self.uc = engines.take(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        weakref.finalize(self, engines.give_back, self.uc)
        for start, data in areas.items():
            self.uc.mem_map(start, -(-len(data) // PAGE) * PAGE)
            self.uc.mem_write(start, data)
        for name, value in registers.items():
            if name in NAMES:
                self.set(name, value)
        state = self.get("flags") & ~FLAGS | registers.get("flags", 0) & FLAGS
        self.uc.reg_write(_IDS["flags"], state)
        self._broken = broken = [False]

        def interrupt(uc: Any, number: int, _data: object) -> None:
            assert number == _BREAKPOINT
            broken[0] = True
            uc.emu_stop()

        self.uc.hook_add(unicorn.UC_HOOK_INTR, interrupt)
        # Unicorn: without page tables, the program counter is not that of the faulting instruction.
        self._last = last = [0]

        def note(_uc: Any, address: int, _size: int, _data: object) -> None:
            last[0] = address

        self.uc.hook_add(unicorn.UC_HOOK_CODE, note)
        self.faults: Mapping[int, int] = {}
        """Address of an instruction that may fault -> address to continue at after a fault."""
        self.nr_faults = 0

    def get(self, name: str) -> int:
        return int(self.uc.reg_read(_IDS[name]))

    def set(self, name: str, value: int) -> None:
        self.uc.reg_write(_IDS[name], value & (1 << 64) - 1)

    def registers(self) -> dict[str, int]:
        return {name: self.get(name) for name in NAMES} | {"flags": self.get("flags") & FLAGS}

    def run(self, ip: int, end: int, on_break: OnBreak | None = None) -> int:
        """Run until `end`, or until a breakpoint that `on_break` does not handle; return the address."""
        while True:
            self._broken[0] = False
            try:
                self.uc.emu_start(ip, end)
            except unicorn.UcError:
                self.nr_faults += 1
                ip = self.faults[self._last[0]]
                continue
            if not self._broken[0]:
                return end
            at = self._last[0]
            target = None if on_break is None else on_break(self, at)
            if target is None:
                return at
            ip = target
