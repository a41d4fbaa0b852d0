"""Compiler of handlers to guest code: it compiles at a probe's first hit, and again after changes.

Python handles the hits until then, and all hits if a handler can't be compiled. Compiling takes as long as
many hits in Python. Therefore at most MAX_HANDLERS handlers are compiled while the control lock is held once.

Guest code that runs during a hit can have hits of its own, which count as missed. At a breakpoint, Python
finds out that a hit is within another hit. At a jump or a call, the compiled code does, by CurrentKprobe.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from emulated_kernel.arch.analysis.detour_region import LiveRegisters, Region
from emulated_kernel.arch.arch_hooks import Arch, StubEnd
from emulated_kernel.arch.probe_checks import ProbeChecker
from emulated_kernel.arch.program.ir import HandlerCode
from emulated_kernel.arch.program.ir_builder import EntryKind, HostAction, ProgramBuilder
from emulated_kernel.kprobes.aggr_kprobe import MAX_HANDLERS, AggrKprobe
from emulated_kernel.kprobes.codegen.current_kprobe import CurrentKprobe
from emulated_kernel.kprobes.codegen.deferred_free import DeferredFree
from emulated_kernel.kprobes.codegen.guest_code import CompiledCode
from emulated_kernel.kprobes.profile import Profile, RegisterSaving
from emulated_kernel.machine.interrupts.trap_handlers import LinkedJump, LinkedRedirect, Redirect
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError

_log = logging.getLogger(__name__)

Rest = Callable[[int], bytes]
"""Function that takes an address, and returns the code to place there, after a handler.

Raises: KernelError (the code must jump to an address that is out of reach).
"""
EmitAll = Callable[[ProgramBuilder], object]
"""Function that adds to a program all handlers that the compiled code runs."""
SHORTAGES = (MemoryError, ImportError, OSError)
"""Exceptions that keep a handler from being compiled: the host lacks something, or a jump is too long.

The host can lack memory, file descriptors, or a package (ImportError). A jump is too long if its target is
out of reach (KernelError, which is an OSError). The exceptions may occur in the middle of a hit, which must
continue. Code that catches one of them calls Compiler.log_failure(), which logs it.
"""
_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


def _or_none(
    make: Callable[Concatenate[Compiler, _Given], _Made | None],
) -> Callable[Concatenate[Compiler, _Given], _Made | None]:
    """Wrap a method so that it returns None if it raises one of SHORTAGES; Python then handles the hits."""

    @wraps(make)
    def made(compiler: Compiler, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Made | None:
        try:
            return make(compiler, *args, **kwargs)
        except SHORTAGES as error:
            compiler.log_failure(error)
            return None

    return made


class Compiler:
    """Creates and frees the guest code of handlers."""

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
        self.current_kprobe = CurrentKprobe(machine.records)
        self._breakpoints = machine.breakpoints
        self._arch = arch
        self._verdict = verdict
        self._sampled = frozenset(arch.pt_regs).intersection(machine.regs.snapshot()._fields)
        self.saves_all = profile.saving is RegisterSaving.ALL
        """Whether handlers save all registers, instead of only the live ones that they change."""
        self.enabled = profile.compiled
        """Whether the compiler compiles new code. Existing code stays until it is dropped."""
        self.made = 0
        """Number of pieces of guest code that this compiler has compiled so far."""
        self.fixups: dict[int, int] = {}
        """Address of an instruction that may fault -> address at which the CPU continues after the fault."""
        self.relocated: dict[int, int] = {}
        """Address of the relocated form of an emulated instruction -> probed address of this instruction."""
        self.codes: dict[CompiledCode, None] = {}
        """All existing code in the order of its creation, including code that waits to be freed."""
        self.asm_thunks: dict[tuple[object, ...], CompiledCode] = {}
        """Key -> compiled handlers in assembly, which run at hits that Python handles.

        The key of code that asm_thunk() returned has the owners of the handlers, the HandlerPoint and
        `in_frame`. The key of code that post_code() returned is (owner, target address).
        """
        self._garbage = garbage
        self._lock = lock
        self._turn = 0
        self._left = MAX_HANDLERS
        """Number of handlers that may still be compiled until the control lock is released."""
        self._last_warning = ""

    def contains(self, address: int) -> bool:
        """Return True if `address` is in a compiled handler; a CPU there may have written half a record."""
        return self._text.is_generated(address) and any(code.contains(address) for code in self.codes)

    def keep_sample(self, head: AggrKprobe, regs: Any) -> None:
        """Store a hit's registers in `head.sample`. Benchmarks run the compiled handler with these values."""
        head.sample = {name: getattr(regs, name) for name in self._sampled}

    def log_failure(self, error: Exception) -> None:
        """Log that guest code can't be compiled because of `error`, one of SHORTAGES.

        A MemoryError is not logged. An error with the text of the last logged error is not logged either.
        Until compilation succeeds, Python handles the hits.
        """
        text = str(error)
        if isinstance(error, (ImportError, OSError)) and text != self._last_warning:
            # There may be no memory for logging either.
            with suppress(MemoryError):
                _log.warning("handlers stay with Python: no guest code can be made: %s", text)
                self._last_warning = text

    # Creation

    def load(self) -> bool:
        """Load the decoder that compiling needs; return False if the host lacks memory or a package for it.

        The first arming of a probe calls this method. If it fails, each compilation tries again.
        """
        try:
            self._arch.load_decoder()
        except SHORTAGES as error:
            self.log_failure(error)
            return False
        return True

    @property
    def may_compile(self) -> bool:
        """Whether compilation is enabled, and the decoder is loaded."""
        return self.enabled and self.load()

    def may_make(self, handlers: int = 1) -> bool:
        """Reserve the compilation of `handlers` handlers, and return True if so many may still be compiled.

        At most MAX_HANDLERS may be compiled while the control lock is held once. If there would be more,
        reserve nothing and return False: they must be compiled when the lock is held the next time.
        """
        if self._turn != self._lock.turn:
            self._turn = self._lock.turn
            self._left = MAX_HANDLERS
        if handlers > self._left:
            return False
        self._left -= handlers
        return True

    @_or_none
    def stub(self, head: AggrKprobe, target: int | None, region: Region | None = None) -> CompiledCode | None:
        """Compile a handler for breakpoint hits, or return None if Python must handle the hits.

        `target`: address at which the guest continues after the handler; None if the instruction is emulated.
        If no jump reaches the target, a breakpoint leads there.
        `region`: the emulated instruction, or None. If its relocated form can be compiled, the form follows
        the handler and emulates the instruction. Otherwise, and in cases that the form leaves to Python, the
        guest reaches a breakpoint at `CompiledCode.tail`. The caller sets the handler of this breakpoint,
        which emulates the instruction.
        """
        arch = self._arch
        ends: list[StubEnd] = []

        def rest(at: int) -> bytes:
            ends.append(self._stub_end(at, target, region))
            return ends[-1].code

        near = None if target is None else self._text.around(target)
        # The size of a relocated form does not depend on its address.
        size = max(
            arch.jump_size, len(arch.breakpoint), len(self._stub_end(head.address, target, region).code)
        )
        code = self._make(head, EntryKind.BREAKPOINT, size, rest, near)
        if code is None:
            return None
        end = ends[-1]
        code.target = target
        code.leads = tuple(end.leads)
        code.tail = end.by_python or 0
        if target is None and code.tail != code.copied:
            code.region = region
            self.relocated[code.copied] = head.address
        for at, leads_to in end.leads.items():
            self._breakpoints[at] = _redirect(leads_to)
        return code

    def _stub_end(self, at: int, target: int | None, region: Region | None) -> StubEnd:
        """Return the code to place after a stub's handlers, at the address `at`.

        `target` and `region` are as in stub().
        """
        arch = self._arch
        if target is None:
            if region is not None:
                with suppress(KernelError):
                    return arch.stub_end(region, at)
            return StubEnd(arch.breakpoint, by_python=at)
        try:
            return StubEnd(arch.relative_jump(at, target))
        except KernelError:
            return StubEnd(arch.breakpoint, {at: target})

    @_or_none
    def asm_thunk(self, owners: tuple[object, ...], emit: EmitAll, *, in_frame: bool) -> CompiledCode | None:
        """Compile handlers in assembly for hits that Python handles; None if there is no room for the code.

        `owners`: the objects that have the handlers, followed by the HandlerPoint. `emit` adds the handlers
        to a program. The code ends in a breakpoint at `CompiledCode.tail`, whose handler the caller sets.
        `in_frame`: True if the registers are already saved in a struct pt_regs at sp; False if the code must
        save them.
        """
        breakpoint_ = self._arch.breakpoint
        key = (*owners, in_frame)
        code = self._thunk(key, emit, len(breakpoint_), lambda _at: breakpoint_, in_frame=in_frame)
        if code is not None:
            code.tail = code.address + code.size - len(breakpoint_)
        return code

    @_or_none
    def post_code(self, owner: AggrKprobe, emit: EmitAll, target: int) -> CompiledCode | None:
        """Compile the post_code of an address's probes; return None if there is no room for the code.

        `owner` has the probes. `emit` adds their post_code to a program. The code continues at `target`. If
        no jump reaches `target`, the code ends in a breakpoint that leads there.
        """
        arch = self._arch
        ends: list[int] = []

        def rest(at: int) -> bytes:
            try:
                return arch.relative_jump(at, target)
            except KernelError:
                ends.append(at)
                return arch.breakpoint

        size = max(arch.jump_size, len(arch.breakpoint))
        code = self._thunk((owner, target), emit, size, rest)
        if code is not None and ends:
            code.tail = ends[0]
            self._breakpoints[code.tail] = _redirect(target)
        return code

    def existing_post_code(self, owner: AggrKprobe, target: int) -> CompiledCode | None:
        """Return the code that post_code() compiled for `owner` and `target`, or None if there is none."""
        return self.asm_thunks.get((owner, target))

    def _thunk(
        self, key: tuple[object, ...], emit: EmitAll, behind: int, rest: Rest, *, in_frame: bool = False
    ) -> CompiledCode | None:
        """Return the code that is cached under `key`; if there is none, compile it.

        `emit` adds the handlers to a program. `rest` returns the code to place after the handlers, which has
        at most `behind` bytes. `in_frame`: see asm_thunk(). Return None if there is no room for the code.
        """
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

    def call(self, head: AggrKprobe, ret: int) -> CompiledCode | None:
        """Compile the handler that an fentry site calls; return None if Python must handle the calls.

        `ret` is the address of a return instruction, at which the handler continues.
        """
        return self._make(head, EntryKind.CALL, self._arch.jump_size, self._going_on_at(ret))

    @_or_none
    def entries(self, builder: ProgramBuilder, ret: int) -> CompiledCode | None:
        """Compile a program that the fentry sites of many functions call; it continues at `ret`.

        `ret` is the address of a return instruction. The code restores the general registers that it changes,
        because each of the functions may read any of them. Return None if there is no room for the code.
        """
        handler = self._arch.called_code(builder.program(), 0, self._live_in_callers)
        return self._write(builder, handler, self._arch.jump_size, self._going_on_at(ret))

    @_or_none
    def routine(self, builder: ProgramBuilder) -> CompiledCode | None:
        """Compile a program that other compiled code calls by ir.CallPerCpu.

        Return None if there is no room for the code.
        """
        handler = self._arch.handler_code(builder.program(), 0, self._live_in_callers)
        ret = self._arch.routine_return
        return self._write(builder, handler, len(ret), lambda _at: ret)

    @property
    def _live_in_callers(self) -> LiveRegisters | None:
        """Registers to preserve in code with many callers, each of which may read any: all but ip, sp, flags.

        None: the code saves all registers anyway.
        """
        if self.saves_all:
            return None
        return LiveRegisters(self._arch.general_registers - {"ip", "sp", "flags"}, flags=False)

    @_or_none
    def jump(self, target: int) -> CompiledCode | None:
        """Create a jump instruction to `target`; return None if there is no room for the code.

        Many sites can call the instruction. lead_to() changes the target for all of them.
        """
        try:
            buffer = self._text.alloc_text(self._arch.jump_size)
        except HardwareError:
            return None
        code = CompiledCode(buffer, self._arch.jump_size, buffer, (), ())
        if not self.lead_to(code, target):
            self._text.free_text(buffer)
            return None
        self.codes[code] = None
        return code

    def lead_to(self, jump: CompiledCode, target: int) -> bool:
        """Redirect `jump`, which the method jump() created, to `target`.

        Return False, without a change, if `target` is out of reach; otherwise True.
        """
        if jump.target != target:
            try:
                insn = self._arch.relative_jump(jump.address, target)
            except KernelError:
                return False
            self._text.poke(jump.address, insn)
            jump.target = target
        return True

    @_or_none
    def as_handler(self, builder: ProgramBuilder, address: int, target: int) -> CompiledCode | None:
        """Compile a program as if it were a handler of a probe at `address`.

        The code continues at `target`. Return None if there is no room for the code.
        """
        handler = self._handler(builder, address)
        return self._write(builder, handler, self._arch.jump_size, self._going_on_at(target))

    def detour(self, head: AggrKprobe) -> CompiledCode | None:
        """Compile a detour buffer that contains the handler; None if Python must handle the hits."""
        assert head.detour is not None
        rest = partial(self._arch.relocated, head.detour.region)
        starts = self._arch.detour_starts(head.detour.region)
        return self._make(head, EntryKind.JUMP, self._arch.max_copied, rest, starts)

    # Returns

    @_or_none
    def trampoline(self, builder: ProgramBuilder, own: int | None) -> tuple[CompiledCode, int | None] | None:
        """Compile a return trampoline that looks for compiled handlers, and traps to Python if it finds none.

        Return the code, and the address to which each compiled handler jumps at its end. This address is None
        if each handler itself returns to the caller of the hooked function. Return None if there is no room
        for the code.
        `own`: address that hooked functions return to; None: they return to the new trampoline itself.
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
        except SHORTAGES:
            self._text.free_text(buffer)
            raise
        self._text.poke(buffer, made.code)
        code = CompiledCode(buffer, size, buffer + made.entry, (buffer + made.trap,), ())
        self.codes[code] = None
        return code, None if made.finish is None else buffer + made.finish

    @_or_none
    def returning(self, builder: ProgramBuilder, finish: int | None) -> CompiledCode | None:
        """Compile a return handler to which a trampoline jumps; return None if there is no room for the code.

        `finish`: address at which the guest continues after the handler; None: the handler itself returns
        to the caller of the hooked function.
        """
        returns = self._arch.returns
        assert returns is not None, "it goes with such a trampoline"
        handler = returns.handler(builder.program(), saves_all=self.saves_all)
        rest = (lambda _at: b"") if finish is None else self._going_on_at(finish)
        return self._write(builder, handler, self._arch.jump_size, rest)

    # Writing

    @_or_none
    def _make(
        self, head: AggrKprobe, way: EntryKind, behind: int, rest: Rest, entries: range | None = None
    ) -> CompiledCode | None:
        """Compile a probe's handlers for hits of kind `way`; return None if Python must handle the hits.

        `rest` returns the code to place after the handlers, which has at most `behind` bytes. `entries`:
        possible addresses of the code's entry, or None for any address.
        """
        builder = ProgramBuilder()
        if not self.may_compile or not self._emit(builder, head, way):
            return None
        # A post_handler may read registers that the function doesn't read any more.
        live = self._verdict.all_live if head.has_post_handler else None
        handler = self._handler(builder, head.address, live, by_call=way is EntryKind.CALL)
        return self._write(builder, handler, behind, rest, entries)

    def _emit(self, builder: ProgramBuilder, head: AggrKprobe, way: EntryKind) -> bool:
        """Emit the probes' handlers for hits of kind `way`, and the check for hits within another hit.

        Return False if Python must handle the hits.
        Mirrors: arch/x86/kernel/kprobes/opt.c:optimized_callback,
        arch/x86/kernel/kprobes/ftrace.c:kprobe_ftrace_handler (v6.1).
        """
        if way is EntryKind.BREAKPOINT or not self.current_kprobe.is_checked:
            return head.emit(builder, way)
        done = builder.label()
        if not self.current_kprobe.emit_check(builder, head.miss, done) or not head.emit(builder, way):
            return False
        builder.place(done)
        return True

    def _handler(
        self,
        builder: ProgramBuilder,
        address: int,
        live: LiveRegisters | None = None,
        *,
        by_call: bool = False,
    ) -> HandlerCode:
        """Generate the program's machine code, which saves the live registers that it changes.

        If the attribute `saves_all` is set, the code saves all registers instead. `live`: the live registers;
        None: those that are live at `address` in the probed function. `by_call`: True if an fentry site calls
        the code; False if it is entered in another way.
        """
        needed = None if self.saves_all else live or self._verdict.live_at(address)
        compile_program = self._arch.called_code if by_call else self._arch.handler_code
        return compile_program(builder.program(), address, needed)

    def _going_on_at(self, target: int) -> Rest:
        return lambda at: self._arch.relative_jump(at, target)

    def _write(
        self,
        builder: ProgramBuilder,
        handler: HandlerCode,
        behind: int,
        rest: Rest,
        entries: range | None = None,
    ) -> CompiledCode | None:
        starts = entries and range(entries.start - handler.entry, entries.stop - handler.entry)
        try:
            buffer = self._text.alloc_text(len(handler.code) + behind, starts)
        except HardwareError:
            return None
        try:
            whole = handler.code + rest(buffer + len(handler.code))
        except SHORTAGES as error:
            self._text.free_text(buffer)
            self.log_failure(error)
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

    def drop_asm_thunks(self, owner: object) -> bool:
        """Drop an owner's compiled assembly, because its handlers changed; return True if there was any."""
        dropped = [key for key in self.asm_thunks if any(each is owner for each in key)]
        for key in dropped:
            self.retire(self.asm_thunks.pop(key))
        return bool(dropped)

    def retire(self, code: CompiledCode) -> None:
        """Free code to which nothing jumps any more, once no CPU is in it.

        Until then, free no other code either: CPUs in the code may still jump to slots, detours and
        trampolines.
        """
        code.retired = True
        span = code.address, code.address + code.size
        self._garbage.add(span, partial(self._free, code), leads_on=True)

    def _free(self, code: CompiledCode) -> None:
        del self.codes[code]
        for trap in (*code.traps, *code.leads):
            del self._breakpoints[trap]
        self._breakpoints.pop(code.tail, None)
        self.relocated.pop(code.copied, None)
        for access in code.accesses:
            del self.fixups[access]
        self._text.free_text(code.address)


def _redirect(target: int | LinkedJump) -> Redirect:
    """Return the handler of a breakpoint that makes the guest continue at `target`.

    If `target` is a LinkedJump, the handler emulates this instruction: it also sets the link register.
    """
    return LinkedRedirect(target) if isinstance(target, LinkedJump) else Redirect(target, _go_to, target)


def _go_to(address: int, regs: Any) -> None:
    regs.ip = address


def _host_call(action: HostAction, behind: int, label: int) -> Callable[[Any], None]:
    def call(regs: Any) -> None:
        regs.ip = behind if action() else label

    return call
