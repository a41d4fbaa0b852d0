"""Out-of-line copies: prepared when a probe is registered, given back when it goes."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import Protocol

from emulated_kernel.arch.analysed import Symbol, Symbols
from emulated_kernel.arch.base import Arch
from emulated_kernel.errors import KernelError
from emulated_kernel.kprobes.garbage import TextGarbage
from emulated_kernel.kprobes.hit import HitHandling
from emulated_kernel.kprobes.kprobe import Kprobe, OutOfLine
from emulated_kernel.kprobes.profile import Profile
from emulated_kernel.kprobes.slots import InsnSlots, SlotText


class CopiedText(SlotText, Protocol):
    def original(self, va: int, size: int, /) -> bytes: ...

    def sync(self) -> None: ...


class CopiedImage(Protocol):
    @property
    def kallsyms(self) -> Symbols: ...

    @property
    def ex_table(self) -> Iterable[tuple[int, int]]: ...


class Copies:
    """Copies probed instructions into insn slots.

    Mirrors: arch/x86/kernel/kprobes/core.c:arch_prepare_kprobe, arch_remove_kprobe (v6.1).
    """

    def __init__(
        self,
        text: CopiedText,
        image: CopiedImage,
        arch: Arch,
        hits: HitHandling,
        profile: Profile,
        waste: TextGarbage,
    ) -> None:
        self._text = text
        self._image = image
        self._symbols = image.kallsyms
        self.read_tables()
        self._arch = arch
        self._hits = hits
        self._boosts = not profile.preemption
        self.slots = InsnSlots(text, arch.max_insn_size, arch.breakpoint, waste)

    def read_tables(self) -> None:
        """What is known of the text: which instructions may fault, and where functions' instructions start.

        Again when a module came or went.
        """
        self._boundaries: dict[int, frozenset[int]] = {}
        self._may_fault = frozenset(insn for insn, _ in self._image.ex_table)

    def prepare(self, kprobe: Kprobe) -> None:
        """Check the instruction boundary and make the copy.

        Raises: KernelError EILSEQ, ENOMEM, EINVAL or EOPNOTSUPP (can't be copied).
        """
        addr = kprobe.address
        where = self._symbols.lookup(addr)
        assert where is not None
        if addr not in self._boundaries_of(where.symbol):
            raise KernelError(errno.EILSEQ, f"{addr:#x} is not the start of an instruction")
        size = min(self._arch.max_insn_size, where.symbol.size - where.offset)
        code = self._text.original(addr, size)
        slot = self.slots.get()
        try:
            prepared = self._arch.prepare(code, addr, slot, may_fault=addr in self._may_fault)
        except KernelError:
            self.slots.put(slot)
            raise
        if prepared.emulate is not None:
            self.slots.put(slot)
            kprobe.insn = OutOfLine(prepared, None)
        else:
            self._text.poke(slot, prepared.slot_bytes)
            kprobe.insn = OutOfLine(prepared, slot)
        self.fit(kprobe)
        self._hits.install(kprobe)

    def _boundaries_of(self, symbol: Symbol) -> frozenset[int]:
        """Addresses of a function's instructions; its original text stays as it is."""
        start = symbol.address
        known = self._boundaries.get(start)
        if known is None:
            body = self._text.original(start, symbol.size)
            known = self._boundaries[start] = frozenset(self._arch.instruction_boundaries(body, start))
        return known

    def fit(self, head: Kprobe) -> None:
        """End the copy by a jump back where that can be, by the step's end where it can't.

        Linux: boosted once and for all, so that a post_handler added later never runs. Deviates: it does.
        """
        insn = head.insn
        if insn is None or insn.slot is None:
            return
        boosted = self._boosts and insn.prepared.boostable and head.post_handler is None
        if boosted == insn.boosted:
            return
        if self._hits.ctlblk.is_underway:
            # A CPU in the middle of a step needs its end.
            self._text.sync()
        end = insn.prepared.length
        tail = insn.prepared.slot_bytes[end:]
        if boosted:
            tail = self._arch.relative_jump(insn.slot + end, head.address + end)
        self._text.poke(insn.slot + end, tail)
        insn.boosted = boosted

    def release(self, kprobe: Kprobe) -> None:
        """Give the slot back and forget the ways into the probe."""
        self._hits.remove(kprobe)
        insn, kprobe.insn = kprobe.insn, None
        if insn is not None and insn.slot is not None:
            # A boosted copy is left without a trap; a stepped one by the end of a hit.
            dirty = insn.boosted or self._hits.ctlblk.is_underway
            self.slots.put(insn.slot, dirty=dirty, on_free=lambda: self._hits.remove_step_end(insn))
