"""Handlers as guest code: made at a probe's first hit, replaced when what they do changes.

Until then, and where a handler can't be guest code, the trap into Python takes the hits. No other guest code
runs while a handler in Python does, so that code here never meets a hit within a hit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from emulated_kernel.arch.base import Arch, Detour, Live
from emulated_kernel.arch.program import HandlerCode
from emulated_kernel.arch.program_builder import HitWay, HostAction, ProgramBuilder
from emulated_kernel.errors import KernelError
from emulated_kernel.kprobes.garbage import TextGarbage
from emulated_kernel.kprobes.kprobe import AggregatorProbe, Kprobe
from emulated_kernel.kprobes.slots import SlotText
from emulated_kernel.machine.traps import HardwareError


class CompiledText(SlotText, Protocol):
    def original(self, va: int, size: int, /) -> bytes: ...


@dataclass(eq=False)
class CompiledCode:
    """Guest code of a probe's handler, with what follows it: a stub or a detour; addresses and bytes."""

    address: int
    size: int
    entry: int
    """Where a hit enters it."""
    traps: tuple[int, ...]
    """Breakpoints where it calls the host."""
    accesses: tuple[int, ...]
    """Instructions with a fixup."""
    target: int | None = field(default=None, init=False)
    """Of a stub for breakpoints: where it goes on, None if at the host."""
    tail: int = field(default=0, init=False)
    """Of such a stub: the breakpoint at its end."""
    retired: bool = field(default=False, init=False)

    def contains(self, address: int) -> bool:
        return self.address <= address < self.address + self.size


class Compiler:
    """Makes and frees the guest code of handlers. Callers hold the kernel's control lock."""

    def __init__(
        self,
        text: CompiledText,
        arch: Arch,
        breakpoints: dict[int, Callable[[Any], None]],
        live_at: Callable[[int], Live] | None,
        waste: TextGarbage,
    ) -> None:
        """Without `live_at` every register is saved."""
        self._text = text
        self._arch = arch
        self._breakpoints = breakpoints
        self._live_at = live_at
        self.enabled = True
        """Whether new code is made; what there is already stays until it is dropped."""
        self.made = 0
        """Handlers compiled so far."""
        self.fixups: dict[int, int] = {}
        """Address of an access that may fault to where the CPU goes on then."""
        self._codes: dict[CompiledCode, None] = {}
        self._waste = waste

    @property
    def codes(self) -> Sequence[CompiledCode]:
        """All that there is, what waits to be freed too."""
        return tuple(self._codes)

    def contains(self, address: int) -> bool:
        """Whether an address lies in a handler: records may be half written there."""
        return any(code.contains(address) for code in self._codes)

    # Making

    def stub(self, head: Kprobe, target: int | None) -> CompiledCode | None:
        """The handler for hits by a breakpoint, which goes on at `target`; None where it is Python's.

        Without a target it ends in a breakpoint, `CompiledCode.tail`, which is the caller's.
        """
        arch, breakpoint_ = self._arch, self._arch.breakpoint

        def place(handler: HandlerCode, buffer: int) -> Detour:
            tail = buffer + len(handler.code) + arch.jump_size
            made = arch.handler_stub(handler, buffer, tail if target is None else target)
            return replace(made, code=made.code + breakpoint_)

        code = self._make(head, HitWay.BREAKPOINT, arch.jump_size + len(breakpoint_), place)
        if code is not None:
            code.target = target
            code.tail = code.address + code.size - len(breakpoint_)
        return code

    def call(self, head: Kprobe, ret: int) -> CompiledCode | None:
        """The handler that an fentry site calls; it goes on at `ret`, a return instruction."""
        arch = self._arch

        def place(handler: HandlerCode, buffer: int) -> Detour:
            return arch.handler_stub(handler, buffer, ret)

        return self._make(head, HitWay.CALL, arch.jump_size, place)

    def entries(self, builder: ProgramBuilder, ret: int) -> CompiledCode | None:
        """A program that the fentry sites of many functions call; it goes on at `ret`, a return instruction.

        Any of them may read any register. None where there is no room for it.
        """
        arch = self._arch
        live = None if self.saves_all else Live(arch.general_registers - {"ip", "sp", "flags"}, flags=False)
        handler = arch.handler_code(builder.program(), 0, live)

        def place(handler: HandlerCode, buffer: int) -> Detour:
            return arch.handler_stub(handler, buffer, ret)

        return self._put(builder, handler, arch.jump_size, place)

    def detour(self, head: AggregatorProbe) -> CompiledCode | None:
        """The detour buffer with the handler in it; None where it is Python's."""
        arch, text = self._arch, self._text
        assert head.detour is not None
        addr, length, scratch = head.address, head.detour.length, head.detour.scratch

        def place(handler: HandlerCode, buffer: int) -> Detour:
            return arch.detour(text.original(addr, length), addr, length, buffer, handler, scratch)

        return self._make(head, HitWay.JUMP, arch.max_copied, place)

    # Returns

    @property
    def saves_all(self) -> bool:
        """Whether every register is saved for a handler."""
        return self._live_at is None

    def trampoline(self, builder: ProgramBuilder, own: int | None) -> tuple[CompiledCode, int | None] | None:
        """A return trampoline that looks for handlers; its one trap is where Python handles returns.

        Functions return to `own`, or right to it. With it comes where handlers in its frame go on. None where
        there is no room for it.
        """
        program, saves_all = builder.program(), self.saves_all
        size = len(self._arch.return_dispatch(program, 0, own, saves_all=saves_all).code)
        try:
            buffer = self._text.alloc_text(size)
        except HardwareError:
            return None
        made = self._arch.return_dispatch(program, buffer, own, saves_all=saves_all)
        self._text.poke(buffer, made.code)
        code = CompiledCode(buffer, size, buffer + made.entry, (buffer + made.trap,), ())
        self._codes[code] = None
        return code, None if made.finish is None else buffer + made.finish

    def returning(self, builder: ProgramBuilder, finish: int | None) -> CompiledCode | None:
        """A handler that a trampoline goes to; None where there is no room for it."""
        arch = self._arch
        handler = arch.return_handler(builder.program(), saves_all=self.saves_all)

        def place(handler: HandlerCode, buffer: int) -> Detour:
            return arch.placed_return_handler(handler, buffer, finish)

        return self._put(builder, handler, arch.jump_size, place)

    def _make(
        self, head: Kprobe, way: HitWay, behind: int, place: Callable[[HandlerCode, int], Detour]
    ) -> CompiledCode | None:
        builder = ProgramBuilder()
        if not self.enabled or not head.emit(builder, way):
            return None
        return self._build(builder, head.address, behind, place)

    def place(self, builder: ProgramBuilder, address: int, target: int) -> CompiledCode | None:
        """A program as if it were a handler of the probe at `address`, which goes on at `target`.

        None where there is no room for it.
        """

        def place(handler: HandlerCode, buffer: int) -> Detour:
            return self._arch.handler_stub(handler, buffer, target)

        return self._build(builder, address, self._arch.jump_size, place)

    def _build(
        self,
        builder: ProgramBuilder,
        address: int,
        behind: int,
        place: Callable[[HandlerCode, int], Detour],
    ) -> CompiledCode | None:
        live = None if self._live_at is None else self._live_at(address)
        handler = self._arch.handler_code(builder.program(), address, live)
        return self._put(builder, handler, behind, place)

    def _put(
        self,
        builder: ProgramBuilder,
        handler: HandlerCode,
        behind: int,
        place: Callable[[HandlerCode, int], Detour],
    ) -> CompiledCode | None:
        try:
            buffer = self._text.alloc_text(len(handler.code) + behind)
        except HardwareError:
            return None
        try:
            made = place(handler, buffer)
        except KernelError:
            self._text.free_text(buffer)
            return None
        self._text.poke(buffer, made.code)
        self.made += 1
        return self._adopt(made, buffer, builder.actions)

    def _adopt(self, made: Detour, buffer: int, actions: Sequence[HostAction]) -> CompiledCode:
        for call in made.host_calls:
            self._breakpoints[buffer + call.trap] = _host_call(
                actions[call.number], buffer + call.behind, buffer + call.label
            )
        for fixup in made.fixups:
            self.fixups[buffer + fixup.access] = buffer + fixup.target
        code = CompiledCode(
            address=buffer,
            size=len(made.code),
            entry=buffer + made.entry,
            traps=tuple(buffer + call.trap for call in made.host_calls),
            accesses=tuple(buffer + fixup.access for fixup in made.fixups),
        )
        self._codes[code] = None
        return code

    # Freeing

    def retire(self, code: CompiledCode) -> None:
        """Nothing leads into it any more; CPUs in it still go on to slots, detours and trampolines."""
        code.retired = True
        span = code.address, code.address + code.size
        self._waste.put(span, partial(self._free, code), leads_on=True)

    def _free(self, code: CompiledCode) -> None:
        del self._codes[code]
        for trap in code.traps:
            del self._breakpoints[trap]
        self._breakpoints.pop(code.tail, None)
        for access in code.accesses:
            del self.fixups[access]
        self._text.free_text(code.address)


def _host_call(action: HostAction, behind: int, label: int) -> Callable[[Any], None]:
    def call(regs: Any) -> None:
        regs.ip = behind if action() else label

    return call
