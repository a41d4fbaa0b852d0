"""Recursion of a guest function on each architecture: bsearch, whose comparison function calls
bsearch again.
"""

from __future__ import annotations

from emulated_kernel.arch.riscv import encoder as riscv
from emulated_kernel.kernel.api import Kernel

_A0, _A2, _A3, _A4, _T0, _T1, _RA, _SP = 10, 12, 13, 14, 5, 6, 1, 2
_BELOW_ZERO = riscv.BranchFunct3.LT


def _x86_64(stub: int, bsearch: int) -> bytes:
    call = bytes.fromhex("ba01000000 b901000000 49b8") + stub.to_bytes(8, "little")
    call += bytes.fromhex("48b8") + bsearch.to_bytes(8, "little") + bytes.fromhex("ffd0")
    return bytes.fromhex("48ff0f 78") + bytes([len(call)]) + call + bytes.fromhex("31c0 c3")


def _i386(stub: int, bsearch: int) -> bytes:
    call = bytes.fromhex("53 68") + stub.to_bytes(4, "little")
    call += bytes.fromhex("6a01 b901000000 bb") + bsearch.to_bytes(4, "little")
    call += bytes.fromhex("ffd3 83c408 5b")
    return bytes.fromhex("ff08 78") + bytes([len(call)]) + call + bytes.fromhex("31c0 c3")


def _riscv64(stub: int, bsearch: int) -> bytes:
    call = riscv.addi(_SP, _SP, -16) + riscv.store(_SP, 0, _RA, 8)
    call += riscv.set_register(_A2, 1) + riscv.set_register(_A3, 1)
    call += riscv.set_register(_A4, stub) + riscv.set_register(_T1, bsearch) + riscv.jalr(_RA, _T1, 0)
    call += riscv.load(_RA, _SP, 0, 8) + riscv.addi(_SP, _SP, 16)
    counted = riscv.load(_T0, _A0, 0, 8) + riscv.addi(_T0, _T0, -1) + riscv.store(_A0, 0, _T0, 8)
    counted += riscv.branch(_BELOW_ZERO, _T0, 0, 4 + len(call))
    return counted + call + riscv.set_register(_A0, 0) + riscv.jalr(0, _RA, 0)


_CODES = {"x86_64": _x86_64, "i386": _i386, "riscv64": _riscv64}


class Recursion:
    """Code in a kernel's memory that calls bsearch recursively."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        machine = kernel.machine
        self._stub = machine.text.alloc_text(128)
        bsearch = kernel.image.kallsyms.lookup_name("bsearch")
        assert bsearch is not None
        machine.text.poke(self._stub, _CODES[machine.config.arch](self._stub, bsearch))
        self._words = machine.alloc_pages(64)

    def run(self, depth: int) -> None:
        """Call bsearch `depth` + 1 times, so that each call is made inside the previous call."""
        memory = self._kernel.machine.memory
        memory.write_word(self._words, depth)
        self._kernel.call("bsearch", self._words, self._words, 1, 1, self._stub)
        assert memory.read_word(self._words) == (1 << 8 * memory.word_size) - 1
