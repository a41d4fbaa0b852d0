"""A flat RISC-V machine: Unicorn without page tables, for a few pages of code."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import unicorn
from unicorn import riscv_const as const

from emulated_kernel.arch.riscv.encoder import C_EBREAK, EBREAK
from emulated_kernel.arch.riscv.insn import REGISTER_NAMES
from tests.arch import engines

PAGE = 0x1000
NAMES = REGISTER_NAMES[1:]
"""Names of the registers x1 to x31."""
_IDS = {name: getattr(const, f"UC_RISCV_REG_{name.upper()}") for name in NAMES}

OnBreak = Callable[["Flat", int], int | None]
"""Function (machine, address of the breakpoint) -> address to continue at, or None to stop."""


class Flat:
    """A CPU that runs code between breakpoints; the caller handles the breakpoints."""

    def __init__(self, areas: Mapping[int, bytes], registers: Mapping[str, int]) -> None:
        """Map `areas` (address -> contents), which are whole pages, and set the registers."""
        self.uc = engines.take(unicorn.UC_ARCH_RISCV, unicorn.UC_MODE_RISCV64)
        weakref.finalize(self, engines.give_back, self.uc)
        for start, data in areas.items():
            self.uc.mem_map(start, -(-len(data) // PAGE) * PAGE)
            self.uc.mem_write(start, data)
        for name, value in registers.items():
            if name in _IDS:
                self.set(name, value)
        # Unicorn: without page tables, the program counter is not that of the faulting instruction.
        self._last = last = [0]

        def note(_uc: unicorn.Uc, address: int, _size: int, _data: object) -> None:
            last[0] = address

        self.uc.hook_add(unicorn.UC_HOOK_CODE, note)
        self.faults: Mapping[int, int] = {}
        """Address of an instruction that may fault -> address to continue at after a fault."""
        self.nr_faults = 0

    @property
    def at(self) -> int:
        """Return the address of the last executed instruction."""
        return self._last[0]

    def get(self, name: str) -> int:
        return int(self.uc.reg_read(_IDS[name]))

    def set(self, name: str, value: int) -> None:
        self.uc.reg_write(_IDS[name], value & (1 << 64) - 1)

    def registers(self) -> dict[str, int]:
        return {name: self.get(name) for name in NAMES}

    def run(self, ip: int, end: int, on_break: OnBreak | None = None) -> int:
        """Run until `end`, or until a breakpoint that `on_break` does not handle; return the address."""
        while True:
            try:
                self.uc.emu_start(ip, end)
                return end
            except unicorn.UcError:
                code = bytes(self.uc.mem_read(self.at, 4))
            if code == EBREAK or code[:2] == C_EBREAK:
                target = None if on_break is None else on_break(self, self.at)
                if target is None:
                    return self.at
                ip = target
            else:
                self.nr_faults += 1
                ip = self.faults[self.at]

    def run_to_fault(self, ip: int) -> int:
        """Run until the first fault, which may be a breakpoint; return Unicorn's error code."""
        try:
            self.uc.emu_start(ip, 0)
        except unicorn.UcError as error:
            return int(error.errno)
        raise AssertionError("the code ended without a fault")

    def step(self, ip: int) -> int:
        """Execute one instruction, and return the next address, which may be unmapped."""
        try:
            self.uc.emu_start(ip, 0, count=1)
        except unicorn.UcError as error:
            if error.errno != unicorn.UC_ERR_FETCH_UNMAPPED:
                raise
        return int(self.uc.reg_read(const.UC_RISCV_REG_PC))
