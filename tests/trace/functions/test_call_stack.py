"""Call chains from stacks that are none of a task's."""

from __future__ import annotations

import struct
from types import SimpleNamespace

from emulated_kernel.arch.x86.arch import X86_64
from emulated_kernel.machine.traps import MemoryFault
from emulated_kernel.trace.ports import SymbolLocation
from emulated_kernel.wiring.call_stack import CallStack

_PAGE, _INNER, _OUTER = 0x5000, 0x100000, 0x200000
_CALL_SITE = _OUTER + 0x20


class _Machine:
    """A page of stack that nothing follows, and code at two functions: the outer one calls the inner."""

    def __init__(self) -> None:
        call = b"\xe8" + struct.pack("<i", _INNER - _CALL_SITE)
        self.memory = {
            _PAGE: struct.pack("<3Q", 1, _CALL_SITE, 2).rjust(4096, b"\0"),
            _CALL_SITE - 7: b"\x90\x90" + call,
        }

    def read(self, va: int, size: int) -> bytes:
        for start, data in self.memory.items():
            if start <= va and va + size <= start + len(data):
                return data[va - start : va - start + size]
        raise MemoryFault(va)

    def lookup(self, address: int) -> SymbolLocation | None:
        for name, start in (("inner", _INNER), ("outer", _OUTER)):
            if start <= address < start + 0x100:
                return SymbolLocation(name, start, 0x100, address - start, None)
        return None


def test_the_chain_ends_with_the_memory() -> None:
    machine = _Machine()
    stack = CallStack(machine, machine, X86_64(), 1 << 14)  # type: ignore[arg-type]
    assert stack.callers(SimpleNamespace(ip=_INNER, sp=_PAGE + 4096 - 24)) == [_INNER, _CALL_SITE]
    assert stack.callers(SimpleNamespace(ip=_INNER, sp=0x123)) == [_INNER]
