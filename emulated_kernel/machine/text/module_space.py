"""ModuleSpace: memory for the guest's modules; the host writes their text, the guest writes their data."""

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
    """Allocator of module memory, with an unmapped page after each allocation.

    Like vmalloc() it takes the lowest free address.
    Mirrors: arch/x86/kernel/module.c:module_alloc, kernel/module/main.c:module_memfree (v6.1).
    """

    def __init__(self, cpu: CpuModel, memory: Memory, text: Text) -> None:
        self._filler = cpu.filler
        self._memory = memory
        self._text = text
        self._pool = UnitPool(cpu.layout.module_space, MODULE_SPACE_SIZE, PAGE_SIZE, first_fit=True)
        self._pieces: dict[int, _Allocation] = {}

    def alloc(self, size: int, *, is_text: bool) -> int:
        """Allocate `size` bytes: executable and filled with breakpoints if `is_text`, else writable zeros.

        Return the address. Raises: HardwareError (no module memory is left).
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
        """Return the size that was requested for the allocation at `va`. Raises: KeyError (not allocated)."""
        return self._pieces[va].size

    def holds(self, va: int, size: int) -> bool:
        """Return True if an allocation begins at `va` and has at least `size` bytes."""
        piece = self._pieces.get(va)
        return piece is not None and size <= piece.size

    def place(self, va: int, code: bytes) -> None:
        """Write the text of a module to the allocation at `va`, which must not have text yet.

        The text counts as original text from now on: the ledger of Text records changes of it.
        Raises: KeyError (no text of that size was allocated at `va`, or the text was already written).
        """
        piece = self._pieces[va]
        if not piece.is_text or piece.is_placed or len(code) != piece.size:
            raise KeyError(va)
        self._text.poke(va, code)
        self._text.adopt(va, code)
        piece.is_placed = True

    def free(self, va: int) -> None:
        """Free the allocation at `va`. Raises: KeyError (not allocated)."""
        piece = self._pieces.pop(va)
        if piece.is_placed:
            self._text.disown(va)
        if piece.is_text:
            # Drops translated code, which must not run for the next module at this address.
            self._text.poke(va, self._filler * (page_up(piece.size) // len(self._filler)))
        self._memory.unmap(va, page_up(piece.size))
        self._memory.host_pages.free(piece.pa)
        self._pool.free(va)
