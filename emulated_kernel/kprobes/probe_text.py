"""ProbeText: the text that a probe replaces, and disassembly of the code that its hits run instead."""

from __future__ import annotations

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.machine.text.text import Text

GONE = "gone with its module"
"""Text that is shown for a probe whose module was unloaded."""


class ProbeText:
    """Disassembles guest text for users; the control lock must be held."""

    def __init__(self, kprobes: Kprobes, arch: Arch, text: Text) -> None:
        self._kprobes = kprobes
        self._arch = arch
        self._text = text

    def replaced(self, kprobe: Kprobe) -> tuple[bytes, bytes]:
        """Return the original and the current bytes of the text that a registered probe may replace."""
        head = self._kprobes.table.valid(kprobe)
        if head is not None and head.detour is not None:
            size = head.detour.length
        elif head is not None and head.insn is not None:
            size = head.insn.prepared.length
        else:
            size = self._arch.call_size
        return self._text.original(kprobe.address, size), self._text.current(kprobe.address, size)

    def out_of_line(self, kprobe: Kprobe) -> str:
        """Return the disassembly of the code that hits run out of line: handlers and copied instructions.

        If an instruction is emulated, it has no copy, and the original instruction is shown.
        """
        if kprobe.is_gone:
            return GONE
        head = self._kprobes.table.valid(kprobe)
        if head is not None and head.compiled is not None:
            return self.disassembly(head.compiled.address, head.compiled.size)
        stub = None if head is None else head.stub
        handler = "" if stub is None else self.disassembly(stub.address, stub.size) + "\n"
        return handler + self._copy(kprobe)

    def _copy(self, kprobe: Kprobe) -> str:
        """Return the disassembly of the code after the handlers: detour, trampoline, slot or emulation."""
        head = self._kprobes.table.valid(kprobe)
        insn = None if head is None else head.insn
        arch = self._arch
        if head is not None and head.detour is not None and head.is_optimized:
            return self.disassembly(head.detour.address, head.detour.size)
        if insn is None:
            trampoline = self._kprobes.trampoline
            return "" if trampoline is None else self.disassembly(*trampoline)
        entry = insn.entry
        if insn.slot is None or entry is None:
            original = self._text.original(kprobe.address, insn.prepared.length)
            return "\n".join(("emulated, no slot", *arch.disassemble(original, kprobe.address)))
        end = arch.jump_size if insn.boosted else len(arch.breakpoint)
        return self.disassembly(entry, insn.slot - entry + insn.prepared.length + end)

    def disassembly(self, va: int, size: int) -> str:
        """Return one line for each instruction of the current text: address, bytes, mnemonic, operands."""
        return "\n".join(self._arch.disassemble(self._text.current(va, size), va))
