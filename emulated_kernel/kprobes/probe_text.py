"""ProbeText: the text that a probe replaces, and disassembly of the code that its hits run instead."""

from __future__ import annotations

from collections.abc import Iterator

from emulated_kernel.arch.analysis.disassembly import AddressName, address_names, data_text
from emulated_kernel.arch.arch_hooks import Arch, CodePart
from emulated_kernel.kprobes.aggr_kprobe import AggrKprobe
from emulated_kernel.kprobes.codegen.guest_code import CompiledCode
from emulated_kernel.kprobes.hit.ftrace import FTRACE_TRAMPOLINE
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.machine.text.text import Text

GONE = "gone with its module"
"""Text that is shown for a probe whose module was unloaded."""
_RARE = "rare_cases"
"""Name that disassembly shows for the part of a compiled handler before its entry.

This part handles rare cases.
"""
_LANDING = {
    "jump": " (the jump leads here)",
    "call": " (the call leads here)",
    "breakpoint": " (a hit leads here)",
}
"""Instruction by which hits enter a code part -> text to append to the title of this part."""


class ProbeText:
    """Disassembles guest text for users; the control lock must be held.

    Operands are symbols instead of addresses if possible.
    """

    def __init__(self, kprobes: Kprobes, arch: Arch, text: Text) -> None:
        self._kprobes = kprobes
        self._arch = arch
        self._text = text
        self._symbol = address_names(kprobes.symbols.lookup)

    def replaced(self, kprobe: Kprobe) -> tuple[bytes, bytes]:
        """Return the original and the current bytes of the text that a registered probe may replace."""
        head = self._kprobes.table.valid(kprobe)
        detour = self._kprobes.detour(kprobe)
        if detour is not None:
            size = detour.length
        elif head is not None and head.insn is not None:
            size = head.insn.prepared.length
        else:
            size = self._arch.call_size
        return self._text.original(kprobe.address, size), self._text.current(kprobe.address, size)

    def replaced_text(self, kprobe: Kprobe) -> str:
        """Return a line with the original bytes that a probe may replace, and one with the current bytes.

        Each line also shows the instructions in the bytes. Bytes after a breakpoint, a jump or a call are not
        executed, so no instruction is shown for them.
        """
        if kprobe.is_gone:
            return GONE
        original, current = self.replaced(kprobe)
        head = self._kprobes.table.valid(kprobe)
        name = self._names(head)
        insns = self._insns(original, kprobe.address, name)
        if original == current:
            shown = insns
        elif head is not None and head.detour is not None and head.is_patched:
            shown = self._jump_insns(kprobe.address, current, len(head.detour.jump), name)
        elif head is None or head.is_ftrace:
            shown = self._jump_insns(kprobe.address, current, self._arch.call_size, name)
        else:
            shown = self._insns(current, kprobe.address, name)[:1]
        lines = (("original", original, insns), ("current ", current, shown))
        return "\n".join(f"{kind} {code.hex(' ')}  {'; '.join(texts)}" for kind, code, texts in lines)

    def _jump_insns(self, addr: int, current: bytes, size: int, name: AddressName) -> list[str]:
        """Return texts for the jump of `size` bytes at `addr`, and for the rest of its region after it.

        `current`: bytes of the region. `name`: function that names addresses.
        """
        insns = self._insns(self._text.current(addr, size), addr, name)
        rest = current[size:]
        return [*insns, data_text(rest)] if rest else insns

    def _insns(self, code: bytes, addr: int, name: AddressName) -> list[str]:
        return [text for _, _, text in self._arch.disassembler.insns(code, addr, name)]

    def out_of_line(self, kprobe: Kprobe) -> str:
        """Return the disassembly of the code that hits run out of line. Each part has a title line.

        If an instruction is emulated, it has no copy, and the original instruction is shown. If the probed
        code was freed, the result is GONE.
        """
        if kprobe.is_gone:
            return GONE
        head = self._kprobes.table.valid(kprobe)
        if head is not None and head.compiled is not None:
            return "\n".join(self._compiled(head, head.compiled))
        stub = None if head is None else head.entered_stub
        handler = () if stub is None else self._stub(head, stub)
        copy = () if stub is not None and stub.region is not None else self._copy(kprobe)
        return "\n".join((*handler, *copy))

    def _compiled(self, head: AggrKprobe, code: CompiledCode) -> Iterator[str]:
        """Yield the lines that show a compiled handler to which the jump or call in the text leads."""
        if head.is_ftrace or head.detour is None:
            way = "call"
            rest: tuple[CodePart, ...] = (CodePart("return", code.copied),)
        else:
            way = "jump"
            rest = self._arch.copied_parts(code.copied, code.address + code.size)
        yield from self._parts((*_handler(code, way), *rest), code.address + code.size, head)

    def _stub(self, head: AggrKprobe | None, code: CompiledCode) -> Iterator[str]:
        """Yield the lines that show a compiled handler to which the breakpoint leads.

        `head`: see _parts().
        """
        end = code.address + code.size
        rest: tuple[CodePart, ...] = (CodePart("go on", code.copied),)
        if code.region is not None:
            rest = (CodePart("relocated instruction", code.copied),)
        return self._parts((*_handler(code, "breakpoint"), *rest), end, head)

    def _copy(self, kprobe: Kprobe) -> Iterator[str]:
        """Yield the lines that show the code after the handlers: detour, trampoline, slot or emulation."""
        head = self._kprobes.table.valid(kprobe)
        insn = None if head is None else head.insn
        arch = self._arch
        if head is not None and head.detour is not None and head.is_optimized:
            detour = head.detour
            end = detour.address + detour.size
            first, *others = arch.detour_parts(detour.address, detour.trap, detour.copied, end)
            # Until the jump is written, hits by the breakpoint only run the copied instructions.
            landing = _LANDING["jump"] if head.is_patched else ""
            parts = (CodePart(first.name + landing, first.start), *others)
            yield from self._parts(parts, end, head)
        elif insn is None:
            trampoline = self._kprobes.trampoline
            if trampoline is not None:
                address, size = trampoline
                part = CodePart(f"ftrace trampoline{_LANDING['call']}", address)
                yield from self._parts((part,), address + size, head)
        elif insn.slot is None or insn.entry is None:
            original = self._text.original(kprobe.address, insn.prepared.length)
            yield "emulated, no slot"
            yield from arch.disassemble(original, kprobe.address, self._names(head))
        else:
            end = insn.slot + insn.prepared.length
            lead = [CodePart("set the trap flag", insn.entry)] if insn.entry < insn.slot else []
            last = CodePart("jump back" if insn.boosted else "end of the step", end)
            parts = (*lead, CodePart("copied instruction", insn.slot), last)
            size = arch.jump_size if insn.boosted else len(arch.breakpoint)
            yield from self._parts(parts, end + size, head)

    def disassembly(self, va: int, size: int) -> str:
        """Return a line for each instruction in `size` bytes of text at `va`: address, bytes, instruction."""
        return "\n".join(self._arch.disassemble(self._text.current(va, size), va, self._symbol))

    def _parts(self, parts: tuple[CodePart, ...], end: int, head: AggrKprobe | None) -> Iterator[str]:
        """Yield a title line for each part of generated code, and a line for each of its instructions.

        The line of an instruction has address, bytes, mnemonic and operands. `end`: address after the
        last part. `head`: the probe whose code is named in operands, such as `detour+0x10`, or None.
        """
        name = self._names(head)
        for part, following in zip(parts, (*[part.start for part in parts[1:]], end), strict=True):
            if following > part.start:
                yield f"{part.name}:"
                code = self._text.current(part.start, following - part.start)
                yield from self._arch.disassemble(code, part.start, name)

    def _names(self, head: AggrKprobe | None) -> AddressName:
        """Return a function that names addresses in symbols and in the generated code of the probe `head`."""
        trampoline = self._kprobes.trampoline
        spans = [(FTRACE_TRAMPOLINE, trampoline)] if trampoline is not None else []
        if head is not None:
            if head.detour is not None:
                spans.append(("detour", (head.detour.address, head.detour.size)))
            for code in (head.compiled, head.stub):
                if code is not None:
                    lead = code.entry - code.address
                    spans.append((_RARE, (code.address, lead)))
                    spans.append(("handler", (code.entry, code.size - lead)))

        def name(addr: int) -> str | None:
            for known, (start, size) in spans:
                if start <= addr < start + size:
                    return f"{known}+{addr - start:#x}" if addr > start else known
            return self._symbol(addr)

        return name


def _handler(code: CompiledCode, way: str) -> Iterator[CodePart]:
    """Yield the parts of a compiled handler. `way`: instruction by which hits enter it, a key of _LANDING."""
    if code.entry > code.address:
        yield CodePart(f"{_RARE} of the handler", code.address)
    yield CodePart(f"handler{_LANDING[way]}", code.entry)
