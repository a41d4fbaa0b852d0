"""Comparison of emulated x86 instructions with the processor, which executes the original instruction as a
single step in ring 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace

import unicorn
from unicorn import x86_const as const

from emulated_kernel.arch.x86.arch import X86
from tests.arch import engines

CODE, STACK, SIZE = 0x10_0000, 0x20_0000, 0x1000
SP = STACK + SIZE // 2
STATUS = 0x8D5 | 0x200 | 0x400
"""Flags that the tests vary: CF PF AF ZF SF OF, IF, DF."""


class StackMemory:
    """The guest stack as Python bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)

    def read(self, va: int, size: int) -> bytes:
        return bytes(self.data[va - STACK : va - STACK + size])

    def write(self, va: int, data: bytes) -> None:
        self.data[va - STACK : va - STACK + len(data)] = data


@dataclass(frozen=True)
class Processor:
    """A processor with one word size; a test sets the initial values of its registers."""

    arch: X86
    names: tuple[str, ...]

    def check(self, code: bytes, values: dict[str, int], flags: int, stack_top: bytes) -> None:
        """Check that the emulation leaves the same registers, flags and stack as the processor.

        `values`, `flags`: registers that are not 0, and flags, before the instruction. `stack_top`: bytes at
        the stack pointer.
        """
        stack = bytearray(SIZE)
        stack[SIZE // 2 : SIZE // 2 + len(stack_top)] = stack_top
        before = {**dict.fromkeys(self.names, 0), "sp": SP, **values, "flags": flags | 2, "ip": CODE}
        regs, memory = SimpleNamespace(**before, cs=0x10), StackMemory(stack)
        prepared = self.arch.prepare(code + bytes(15), CODE, CODE + 0x800)
        assert prepared.emulate is not None
        assert prepared.length == len(code)
        prepared.emulate.run(regs, memory)
        expected, expected_stack = self._step(code, before, bytes(stack))
        assert {name: getattr(regs, name) for name in before} == expected
        assert bytes(memory.data) == expected_stack

    @cached_property
    def _ids(self) -> dict[str, int]:
        prefix = "R" if self.arch.bits == 64 else "E"
        ids = {
            name: getattr(const, f"UC_X86_REG_{name if name[1:].isdigit() else prefix + name}".upper())
            for name in (*self.names, "sp", "ip")
        }
        return ids | {"flags": const.UC_X86_REG_EFLAGS}

    def _step(self, code: bytes, values: dict[str, int], stack: bytes) -> tuple[dict[str, int], bytes]:
        mode = unicorn.UC_MODE_64 if self.arch.bits == 64 else unicorn.UC_MODE_32
        with engines.lent(unicorn.UC_ARCH_X86, mode) as uc:
            # Memory is mapped from 0 on, where a jump with a 16-bit target leads.
            uc.mem_map(0, CODE + SIZE)
            uc.mem_map(STACK, SIZE)
            uc.mem_write(CODE - SIZE, b"\xf4" * 2 * SIZE)
            uc.mem_write(CODE, code)
            uc.mem_write(STACK, stack)
            for name, number in self._ids.items():
                uc.reg_write(number, values[name])
            uc.emu_start(CODE, 0, count=1)
            registers = {name: uc.reg_read(number) for name, number in self._ids.items()}
            return registers, bytes(uc.mem_read(STACK, SIZE))
