"""Handlers as guest code: made at a probe's first hit, replaced when what they do changes.

Until then, and where a handler can't be guest code, the trap into Python takes the hits. No other guest code
runs while a handler in Python does, so that code here never meets a hit within a hit. Making code takes as
long as many a hit by Python: no request waits for more of that than MOST_HANDLERS take.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from emulated_kernel.arch.analysis.detour_region import LiveRegisters
from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.probe_checks import ProbeChecker
from emulated_kernel.arch.program.ir import HandlerCode
from emulated_kernel.arch.program.ir_builder import EntryKind, HostAction, ProgramBuilder
from emulated_kernel.kprobes.codegen.deferred_free import DeferredFree
from emulated_kernel.kprobes.codegen.guest_code import CompiledCode
from emulated_kernel.kprobes.kprobe import MOST_HANDLERS, AggrKprobe, Kprobe
from emulated_kernel.kprobes.profile import Profile, RegisterSaving
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError

_log = logging.getLogger(__name__)

Rest = Callable[[int], bytes]
"""What stands behind a handler, for its address. Raises: KernelError (out of reach)."""
EmitAll = Callable[[ProgramBuilder], object]
"""Adds all that is to run to a program."""
NO_MEMORY = (MemoryError, ImportError)
"""What the host raises that has none, for a library of its own too. In the middle of a hit, which goes on.

Whoever catches it calls Compiler.tell: a package that can't be imported looks the same.
"""
_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


def _or_none(
    make: Callable[Concatenate[Compiler, _Given], _Made | None],
) -> Callable[Concatenate[Compiler, _Given], _Made | None]:
    """None too where the host has no memory: Python has the hits."""

    @wraps(make)
    def made(compiler: Compiler, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Made | None:
        try:
            return make(compiler, *args, **kwargs)
        except NO_MEMORY as error:
            compiler.tell(error)
            return None

    return made


class Compiler:
    """Makes and frees the guest code of handlers."""

    def __init__(
        self,
        machine: ProbedMachine,
        arch: Arch,
        profile: Profile,
        verdict: ProbeChecker[Any],
        garbage: DeferredFree,
        lock: ControlLock,
    ) -> None:
        self._text = machine.text
        self._breakpoints = machine.breakpoints
        self._arch = arch
        self._verdict = verdict
        self._sampled = frozenset(arch.pt_regs).intersection(machine.regs.snapshot()._fields)
        self.saves_all = profile.saving is RegisterSaving.ALL
        """Whether every register is saved for a handler."""
        self.enabled = profile.compiled
        """Whether new code is made; what there is already stays until it is dropped."""
        self.made = 0
        """Handlers compiled so far."""
        self.fixups: dict[int, int] = {}
        """Address of an access that may fault to where the CPU goes on then."""
        self.codes: dict[CompiledCode, None] = {}
        """All that there is, what waits to be freed too, in the order of its making."""
        self.asm_thunks: dict[tuple[object, ...], CompiledCode] = {}
        """What guest code runs of hits that Python handles, by what it belongs to."""
        self._garbage = garbage
        self._lock = lock
        self._turn = 0
        self._left = MOST_HANDLERS
        """Handlers that may still be made in that turn of the lock."""
        self._told = ""

    def contains(self, address: int) -> bool:
        """Whether an address lies in a handler: records may be half written there."""
        return any(code.contains(address) for code in self.codes)

    def keep_sample(self, kprobe: Kprobe, regs: Any) -> None:
        """Keep the registers of a hit, which the handler is measured with when it is guest code."""
        kprobe.sample = {name: getattr(regs, name) for name in self._sampled}

    def tell(self, error: Exception) -> None:
        """Log, once, what couldn't be imported to make guest code: hits are Python's until it can be."""
        text = str(error)
        if isinstance(error, ImportError) and text != self._told:
            # There may be no memory to say so either.
            with suppress(MemoryError):
                _log.warning("handlers stay with Python: no guest code can be made: %s", text)
                self._told = text

    # Making

    def may_make(self, handlers: int = 1) -> bool:
        """Take so many off what may still be made in this request; False: at a later one's hit."""
        if self._turn != self._lock.turn:
            self._turn = self._lock.turn
            self._left = MOST_HANDLERS
        if handlers > self._left:
            return False
        self._left -= handlers
        return True

    def stub(self, head: Kprobe, target: int | None) -> CompiledCode | None:
        """The handler for hits by a breakpoint, which goes on at `target`; None where it is Python's.

        Without a target it ends in a breakpoint, `CompiledCode.tail`, which is the caller's.
        """
        arch = self._arch
        breakpoint_ = self._arch.breakpoint

        def rest(at: int) -> bytes:
            return arch.relative_jump(at, at + arch.jump_size if target is None else target) + breakpoint_

        code = self._make(head, EntryKind.BREAKPOINT, arch.jump_size + len(breakpoint_), rest)
        if code is not None:
            code.target = target
            code.tail = code.address + code.size - len(breakpoint_)
        return code

    @_or_none
    def asm_thunk(self, owners: tuple[object, ...], emit: EmitAll, *, in_frame: bool) -> CompiledCode | None:
        """Handlers in assembly alone, for hits that Python handles; None where there is no room for them.

        It ends in a breakpoint, `CompiledCode.tail`, which is the caller's. `in_frame`: registers are saved
        in a struct pt_regs already, which sp is at.
        """
        breakpoint_ = self._arch.breakpoint
        key = (*owners, in_frame)
        code = self._kept_aside(key, emit, len(breakpoint_), lambda _at: breakpoint_, in_frame=in_frame)
        if code is not None:
            code.tail = code.address + code.size - len(breakpoint_)
        return code

    @_or_none
    def behind(self, owner: Kprobe, emit: EmitAll, target: int) -> CompiledCode | None:
        """Handlers in assembly that go on at `target`; None where there is no room for them."""
        return self._kept_aside((owner, target), emit, self._arch.jump_size, self._going_on_at(target))

    def _kept_aside(
        self, key: tuple[object, ...], emit: EmitAll, behind: int, rest: Rest, *, in_frame: bool = False
    ) -> CompiledCode | None:
        """What is kept by that key, made if it isn't there."""
        made = self.asm_thunks.get(key)
        if made is not None:
            return made
        builder = ProgramBuilder()
        emit(builder)
        if in_frame:
            assert self._arch.returns is not None
            handler = self._arch.returns.handler(builder.program(), saves_all=True)
        else:
            handler = self._handler(builder, 0, self._verdict.all_live)
        code = self._write(builder, handler, behind, rest)
        if code is not None:
            self.asm_thunks[key] = code
        return code

    def call(self, head: Kprobe, ret: int) -> CompiledCode | None:
        """The handler that an fentry site calls; it goes on at `ret`, a return instruction."""
        return self._make(head, EntryKind.CALL, self._arch.jump_size, self._going_on_at(ret))

    @_or_none
    def entries(self, builder: ProgramBuilder, ret: int) -> CompiledCode | None:
        """A program that the fentry sites of many functions call; it goes on at `ret`, a return instruction.

        Any of them may read any register. None where there is no room for it.
        """
        arch = self._arch
        live = (
            None
            if self.saves_all
            else LiveRegisters(arch.general_registers - {"ip", "sp", "flags"}, flags=False)
        )
        handler = arch.handler_code(builder.program(), 0, live)
        return self._write(builder, handler, arch.jump_size, self._going_on_at(ret))

    @_or_none
    def as_handler(self, builder: ProgramBuilder, address: int, target: int) -> CompiledCode | None:
        """A program as if it were a handler of the probe at `address`, which goes on at `target`.

        None where there is no room for it.
        """
        handler = self._handler(builder, address)
        return self._write(builder, handler, self._arch.jump_size, self._going_on_at(target))

    def detour(self, head: AggrKprobe) -> CompiledCode | None:
        """The detour buffer with the handler in it; None where it is Python's."""
        assert head.detour is not None
        rest = partial(self._arch.relocated, head.detour.region)
        return self._make(head, EntryKind.JUMP, self._arch.max_copied, rest)

    # Returns

    @_or_none
    def trampoline(self, builder: ProgramBuilder, own: int | None) -> tuple[CompiledCode, int | None] | None:
        """A return trampoline that looks for handlers; its one trap is where Python handles returns.

        Functions return to `own`, or right to it. With it comes where handlers in its frame go on. None where
        there is no room for it.
        """
        program = builder.program()
        saves_all = self.saves_all
        returns = self._arch.returns
        assert returns is not None, "there is a trampoline for Python alone"
        size = len(returns.dispatch(program, 0, own, saves_all=saves_all).code)
        try:
            buffer = self._text.alloc_text(size)
        except HardwareError:
            return None
        try:
            made = returns.dispatch(program, buffer, own, saves_all=saves_all)
        except NO_MEMORY:
            self._text.free_text(buffer)
            raise
        self._text.poke(buffer, made.code)
        code = CompiledCode(buffer, size, buffer + made.entry, (buffer + made.trap,), ())
        self.codes[code] = None
        return code, None if made.finish is None else buffer + made.finish

    @_or_none
    def returning(self, builder: ProgramBuilder, finish: int | None) -> CompiledCode | None:
        """A handler that a trampoline goes to; None where there is no room for it."""
        returns = self._arch.returns
        assert returns is not None, "it goes with such a trampoline"
        handler = returns.handler(builder.program(), saves_all=self.saves_all)
        rest = (lambda _at: b"") if finish is None else self._going_on_at(finish)
        return self._write(builder, handler, self._arch.jump_size, rest)

    # Writing it

    @_or_none
    def _make(self, head: Kprobe, way: EntryKind, behind: int, rest: Rest) -> CompiledCode | None:
        """What a probe does at a hit, with `behind` bytes at most that `rest` adds."""
        builder = ProgramBuilder()
        if not self.enabled or not head.emit(builder, way):
            return None
        # A post_handler sees registers too that the function doesn't read any more.
        live = self._verdict.all_live if head.post_handler is not None else None
        return self._write(builder, self._handler(builder, head.address, live), behind, rest)

    def _handler(
        self, builder: ProgramBuilder, address: int, live: LiveRegisters | None = None
    ) -> HandlerCode:
        """It saves what may be read behind the probe at `address`, if nothing else is said."""
        if self.saves_all:
            return self._arch.handler_code(builder.program(), address, None)
        return self._arch.handler_code(builder.program(), address, live or self._verdict.live_at(address))

    def _going_on_at(self, target: int) -> Rest:
        return lambda at: self._arch.relative_jump(at, target)

    def _write(
        self, builder: ProgramBuilder, handler: HandlerCode, behind: int, rest: Rest
    ) -> CompiledCode | None:
        try:
            buffer = self._text.alloc_text(len(handler.code) + behind)
        except HardwareError:
            return None
        try:
            whole = handler.code + rest(buffer + len(handler.code))
        except (KernelError, *NO_MEMORY) as error:
            self._text.free_text(buffer)
            self.tell(error)
            return None
        self._text.poke(buffer, whole)
        self.made += 1
        for call in handler.host_calls:
            trap = buffer + call.trap
            self._breakpoints[trap] = _host_call(
                builder.actions[call.number], trap + len(self._arch.breakpoint), buffer + call.label
            )
        for fixup in handler.fixups:
            self.fixups[buffer + fixup.access] = buffer + fixup.target
        code = CompiledCode(
            address=buffer,
            size=len(whole),
            entry=buffer + handler.entry,
            traps=tuple(buffer + call.trap for call in handler.host_calls),
            accesses=tuple(buffer + fixup.access for fixup in handler.fixups),
            copied=buffer + len(handler.code),
        )
        self.codes[code] = None
        return code

    # Freeing

    def drop_asm_thunks(self, owner: object) -> None:
        """What its handlers in assembly are has changed."""
        for key in [key for key in self.asm_thunks if any(each is owner for each in key)]:
            self.retire(self.asm_thunks.pop(key))

    def retire(self, code: CompiledCode) -> None:
        """Nothing jumps to it any more; CPUs in it still go on to slots, detours and trampolines."""
        code.retired = True
        span = code.address, code.address + code.size
        self._garbage.add(span, partial(self._free, code), leads_on=True)

    def _free(self, code: CompiledCode) -> None:
        del self.codes[code]
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
