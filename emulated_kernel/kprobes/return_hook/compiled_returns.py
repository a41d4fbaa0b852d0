"""NativeReturns: emits guest code that hooks calls and handles their returns without the host.

A call whose hook has a handler in guest code returns to the native trampoline. A call that Python has hooked
returns to the trampoline for Python, which saves all registers. Two hooks share a stack slot if a hooked
function jumps to another one. Then their calls return to the native trampoline one after the other. If their
handlers would not find the right return address that way, both calls return to the trampoline for Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.program.ir import (
    AddToAbsolute,
    Branch,
    BranchImmediate,
    Condition,
    GetRegister,
    Jump,
    JumpTo,
    Label,
    Load,
    LoadAbsolute,
    SetImmediate,
    SetRegister,
    Store,
    StoreImmediate,
)
from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.kprobes.codegen.asm_handlers import HandlerPoint
from emulated_kernel.kprobes.codegen.call_site import get_called, get_return_address
from emulated_kernel.kprobes.codegen.compiler import Compiler
from emulated_kernel.kprobes.codegen.guest_code import CompiledCode
from emulated_kernel.kprobes.return_hook.ret_stack import RetStackCode
from emulated_kernel.kprobes.return_hook.return_hook import ReturnHook
from emulated_kernel.kprobes.return_hook.shadow_stack import (
    HANDLER,
    MISSED,
    RETURNED,
    ShadowStack,
    counter_at,
)
from emulated_kernel.kprobes.return_hook.stack_code import (
    FIRST,
    NODE,
    RET,
    SECOND,
    SLOT,
    StackCode,
    set_to,
    unless,
)
from emulated_kernel.kprobes.return_hook.trampoline import Trampoline

Keep = Callable[[Label], object]
"""Function that emits code to fill in the data of the call that is being hooked.

The function's argument is a label. The emitted code jumps to it to leave the call unhooked.
"""


class NativeReturns:
    """Emits guest code that hooks calls and handles their returns, for the hooks on one shadow stack."""

    def __init__(
        self,
        stack: ShadowStack,
        code: StackCode[Any],
        trampoline: Trampoline,
        compiler: Compiler,
        arch: Arch,
        *,
        returns_in_turn: bool,
    ) -> None:
        """Create an emitter of code for the hooks on the shadow stack `stack`.

        `returns_in_turn`: if True, calls that share a stack slot may return to the native trampoline one
        after the other. Then only the handler of the oldest call finds the real return address. If False, a
        call whose slot already has a trampoline's address returns to the trampoline for Python.
        """
        self._stack = stack
        self._code = code
        self._word = code.word
        self._trampoline = trampoline
        self._compiler = compiler
        self._sp = arch.registers.sp
        self._link = arch.registers.link
        self._arch = arch
        self._returns_in_turn = returns_in_turn
        assert arch.returns is not None, "the caller checks it"
        self._kept = arch.returns.live.registers
        self._preserves_all = compiler.saves_all or arch.returns.preserves_all
        """Whether handlers in guest code preserve all registers on which a caller may rely.

        If False, only hooks with `follows_convention` get a handler in guest code.
        """
        self._dispatch: CompiledCode | None = None
        self._finish: int | None = None

    # Entries

    def emit_entry(
        self, builder: ProgramBuilder, way: EntryKind, hook: ReturnHook, *, keeps_called: bool = False
    ) -> bool:
        """Emit code for the entry of a function; the code hooks the call, or counts it as missed.

        `way`: how the function's entry reaches the code. The code fills the call's data with zeros. If
        `keeps_called` is True, it stores the function's address in the data; then `way` must be
        EntryKind.CALL. If there is no trampoline yet, emit nothing and return False; otherwise return True.
        """
        if not self._trampoline.address:
            return False
        done = self._enter(builder, way, hook)
        self._replace(builder, hook)
        if keeps_called:
            get_called(builder, self._arch, FIRST)
            builder.emit(self._code.store_data(FIRST))
        elif hook.data_size:
            words = range(self._data_words(hook))
            builder.emit(SetImmediate(FIRST, 0), *(self._code.store_data(FIRST, word) for word in words))
        builder.place(done)
        return True

    def emit_graph_entry(self, builder: ProgramBuilder, hook: ReturnHook, keep: Keep) -> None:
        """Emit code for fentry sites; the code hooks the calls of functions, for the function graph.

        `keep` emits the part that fills in the data of a call; this part may leave the call unhooked.
        """
        code = self.graph_code
        words = self._data_words(hook)
        done = self._enter(builder, EntryKind.CALL, hook)
        with builder.out_of_line() as unwanted:
            code.put_back(builder, hook.address, words)
            builder.emit(Jump(done))
        keep(unwanted)
        get_return_address(builder, self._arch, EntryKind.CALL, RET, SLOT)
        self._replace(builder, hook)
        builder.place(done)

    @property
    def graph_code(self) -> RetStackCode:
        """Emitter of code for the tasks' return stacks; it exists only if the shadow stack is a RetStack."""
        assert isinstance(self._code, RetStackCode), "the function graph has its own shadow stack"
        return self._code

    def _enter(self, builder: ProgramBuilder, way: EntryKind, hook: ReturnHook) -> Label:
        """Emit code that takes a node of `hook` for the call, and sets register NODE to the node's address.

        Return the label to which the code jumps if no node is free.
        """
        self._prepare_handler(hook)
        done = builder.label()
        with builder.out_of_line() as missed:
            counter = counter_at(hook.address, MISSED, self._word)
            builder.emit(AddToAbsolute(counter, 1))
            if hook.missed_at:
                show = LoadAbsolute(FIRST, counter, 4), SetImmediate(SECOND, hook.missed_at)
                builder.emit(*show, Store(SECOND, 0, FIRST, 4))
            builder.emit(Jump(done))
        get_return_address(builder, self._arch, way, RET, SLOT)
        self._code.enter(builder, hook.address, missed, self._data_words(hook))
        return done

    def _data_words(self, hook: ReturnHook) -> int:
        return -(-hook.data_size // self._word)

    def _replace(self, builder: ProgramBuilder, hook: ReturnHook) -> None:
        """Emit code that replaces the call's return address by a trampoline's; RET holds the old address."""
        trampoline = self._trampoline
        if hook.code is None:
            self._return_to(builder, trampoline.address)
            return
        replaced = builder.label()
        with builder.out_of_line() as hooked_before:
            self._return_to(builder, trampoline.address)
            builder.emit(Jump(replaced))
        by_native = replaced if self._returns_in_turn else hooked_before
        for address, label in ((trampoline.native, by_native), (trampoline.address, hooked_before)):
            builder.emit(BranchImmediate(Condition.EQ, RET, _signed(address), label))
        self._return_to(builder, trampoline.native)
        builder.place(replaced)

    def _return_to(self, builder: ProgramBuilder, address: int) -> None:
        if self._link is None:
            builder.emit(StoreImmediate(SLOT, 0, address, self._word))
        else:
            builder.emit(set_to(FIRST, address), SetRegister(self._link, FIRST))

    # Returns

    def _prepare_handler(self, hook: ReturnHook) -> None:
        """Compile the handler of a hook, unless it is compiled already or only Python can run it."""
        if hook.code is not None or hook.program is None:
            return
        if not (hook.follows_convention or self._preserves_all) or not self._has_trampoline():
            return
        builder = ProgramBuilder()
        builder.emit(GetRegister(SLOT, self._sp))
        self._code.leave(builder, hook.address, self._data_words(hook))
        builder.emit(AddToAbsolute(counter_at(hook.address, RETURNED, self._word), 1))
        if not hook.program(builder, EntryKind.RETURN) or not self._emit_assembly(builder, hook):
            return
        hook.code = self._compiler.returning(builder, self._finish)
        if hook.code is not None:
            self._stack.words[hook.address + HANDLER * self._word] = hook.code.entry

    def _emit_assembly(self, builder: ProgramBuilder, hook: ReturnHook) -> bool:
        """Emit the assembly handlers of a hook, if it has any, and return True.

        If the handlers read registers that are not saved, emit nothing and return False.
        """
        assembled = hook.assembled
        if assembled is not None:
            if not (self._compiler.saves_all or self._kept.issuperset(assembled.reads(HandlerPoint.RETURN))):
                return False
            assembled.emit(builder, HandlerPoint.RETURN)
        return True

    def drop_handler(self, hook: ReturnHook) -> None:
        """Drop the guest code of a hook whose handler has changed.

        Python handles the hook's returns until emit_entry() or emit_graph_entry() compiles the handler again.
        """
        if hook.code is not None:
            self._stack.words[hook.address + HANDLER * self._word] = 0
            self._compiler.retire(hook.code)
            hook.code = None

    def _has_trampoline(self) -> bool:
        """Return True if the native trampoline exists; if it does not, first try to make it."""
        if self._dispatch is None:
            builder = ProgramBuilder()
            self._emit_dispatch(builder)
            made = self._compiler.trampoline(builder, self._trampoline.native_return_address)
            if made is None:
                return False
            self._dispatch, self._finish = made
            self._trampoline.adopt_native(self._dispatch)
        return True

    def _emit_dispatch(self, builder: ProgramBuilder) -> None:
        """Emit code that jumps to the handler of the running task's newest call.

        If this call is not the one that returns, or has no handler in guest code, the code goes to the part
        that calls Python.
        """
        python = builder.label()
        self._code.find(builder, python)
        builder.emit(
            GetRegister(NODE, self._sp),
            Branch(Condition.NE, SECOND, NODE, python),
            Load(FIRST, FIRST, HANDLER * self._word, self._word),
            unless(FIRST, python),
            JumpTo(FIRST),
        )
        builder.place(python)

    def close(self) -> None:
        """Drop the trampoline. Precondition: calls are no longer hooked."""
        if self._dispatch is not None:
            self._trampoline.adopt_native(None)
            self._compiler.retire(self._dispatch)
            self._dispatch = None


def _signed(address: int) -> int:
    """Return the low 32 bits of an address as a signed number.

    Precondition: sign extension of this number gives the address.
    """
    return (address & 0xFFFFFFFF ^ 1 << 31) - (1 << 31)
