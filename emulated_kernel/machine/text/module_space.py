"""ModuleSpace: memory for the guest's modules; text is written here alone, data by the guest."""

from __future__ import annotations

from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.loader import page_up
from emulated_kernel.machine.memory.memory import Memory
from emulated_kernel.machine.memory.pool import UnitPool
from emulated_kernel.machine.memory_layout import MODULE_SPACE_SIZE
from emulated_kernel.machine.text.text import Text
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.util.abi import PAGE_SIZE, Prot
from emulated_kernel.util.fast_dataclass import dataclass


@dataclass
class _Allocation:
    pa: int
    size: int
    is_text: bool
    is_placed: bool = False


class ModuleSpace:
    """Pages with an unmapped one behind each piece. Mirrors: module_alloc(), module_memfree() (v6.1).

    As in vmalloc space the lowest free address is taken.
    """

    def __init__(self, cpu: CpuModel, memory: Memory, text: Text) -> None:
        self._filler = cpu.filler
        self._memory = memory
        self._text = text
        self._pool = UnitPool(cpu.layout.module_space, MODULE_SPACE_SIZE, PAGE_SIZE, first_fit=True)
        self._pieces: dict[int, _Allocation] = {}

    def alloc(self, size: int, *, is_text: bool) -> int:
        """Address of `size` bytes: breakpoints that can be executed, or zeros that can be written.

        Raises: HardwareError (none left).
        """
        pages = page_up(size)
        va = self._pool.alloc(pages + PAGE_SIZE)
        try:
            pa = self._memory.host_pages.alloc(pages)
        except HardwareError:
            self._pool.free(va)
            raise
        self._memory.ram[pa : pa + pages] = (
            self._filler * (pages // len(self._filler)) if is_text else bytes(pages)
        )
        self._memory.map(va, pa, pages, Prot.READ | (Prot.EXEC if is_text else Prot.WRITE))
        self._pieces[va] = _Allocation(pa, size, is_text)
        return va

    def size(self, va: int) -> int:
        """Bytes asked for at `va`. Raises: KeyError."""
        return self._pieces[va].size

    def place(self, va: int, code: bytes) -> None:
        """Write text, once: it is the original that the ledger compares with.

        Raises: KeyError (no text of that size was allocated there, or it stands there already).
        """
        piece = self._pieces[va]
        if not piece.is_text or piece.is_placed or len(code) != piece.size:
            raise KeyError(va)
        self._text.poke(va, code)
        self._text.adopt(va, code)
        piece.is_placed = True

    def free(self, va: int) -> None:
        """Unmap it. Raises: KeyError (what isn't allocated)."""
        piece = self._pieces.pop(va)
        if piece.is_placed:
            self._text.disown(va)
        if piece.is_text:
            # What was translated from it must not run for the next module that comes here.
            self._text.poke(va, self._filler * (page_up(piece.size) // len(self._filler)))
        self._memory.unmap(va, page_up(piece.size))
        self._memory.host_pages.free(piece.pa)
        self._pool.free(va)
