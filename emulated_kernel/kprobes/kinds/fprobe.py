"""Fprobe: a probe on the entries and exits of a set of functions.

The fprobe uses the functions' fentry sites, and one return hook for all functions.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum, auto
from fnmatch import fnmatchcase
from typing import Any, Generic, Protocol, TypeAlias

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.program.ir import Move
from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.kprobes.codegen.asm_handlers import (
    AssembledHandlers,
    AssemblyOwner,
    FailureCount,
    HandlerPoint,
    PerCpuVars,
    handler_texts,
)
from emulated_kernel.kprobes.codegen.call_site import get_called
from emulated_kernel.kprobes.codegen.compiler import SHORTAGES
from emulated_kernel.kprobes.codegen.guest_code import CompiledCode
from emulated_kernel.kprobes.hit.ftrace_ops import Called, CodesOf, FtraceOps, no_code, one_code
from emulated_kernel.kprobes.kprobe import CompileHandler, RegsT
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.kprobes.return_hook.return_hook import RethookNode, ReturnHook
from emulated_kernel.kprobes.return_hook.return_hooks import ReturnHooks
from emulated_kernel.kprobes.return_hook.stack_code import SLOT
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import ADDRESS, dataclass, field
from emulated_kernel.util.lazy_pattern import lazy_pattern

_WILDCARDS = lazy_pattern(r"[*?[]")


class FprobeRegs(Enum):
    """Sets of registers that handlers of an fprobe get. Access to other registers raises AttributeError."""

    PT_REGS = auto()
    """All registers."""
    FTRACE_REGS = auto()
    """On entry mainly the registers that pass arguments; on exit those that return results.

    Mirrors: struct ftrace_regs, struct fgraph_ret_regs (v6.5).
    """


CALLED = 3
"""Number of the virtual register with the function's address when an entry or exit program starts."""
FprobeHandler: TypeAlias = Callable[["Fprobe[RegsT]", int, RegsT, memoryview], object]
"""Function that takes the fprobe, the address of the function, the registers and the call's own data.

If an entry_handler returns a true value, the exit of the call is ignored.
"""


@dataclass(eq=False)
class Fprobe(FailureCount, Generic[RegsT]):
    """A probe on the entry and exit of all functions that match `filter` but not `notfilter`; both are globs.

    `entry_handler(fprobe, address, regs, data)` runs when a function is entered, `exit_handler` with the same
    arguments when it returns. `address` is the function's address. `data` are `entry_data_size` bytes that
    belong to the call. If `entry_handler` returns a true value, the exit of this call is ignored (Linux:
    since 6.4).

    `entry_registers` and `exit_registers` are names of registers that the handlers read. Registration fails
    if `registers` does not include them.

    Mirrors: include/linux/fprobe.h:struct fprobe (v6.1).
    """

    filter: str
    """Glob of the names of the functions to probe."""
    notfilter: str | None = None
    """Glob of the names of functions to leave out; None: leave out none."""
    entry_handler: FprobeHandler[RegsT] | None = None
    """Called when a function is entered."""
    exit_handler: FprobeHandler[RegsT] | None = None
    """Called when a function returns."""
    nr_maxactive: int = 0
    """Maximum number of pending calls. 0 selects two for each function and CPU."""
    entry_data_size: int = 0
    """Size in bytes of the data that belong to each call."""
    registers: FprobeRegs = FprobeRegs.PT_REGS
    """The set of registers that the handlers get."""
    entry_registers: Sequence[str] = ()
    """Names of the registers that the entry_handler reads."""
    exit_registers: Sequence[str] = ()
    """Names of the registers that the exit_handler reads."""
    entry_program: CompileHandler | None = None
    """Function that emits guest code in place of `entry_handler`; None: there is no such code.

    It is called with EntryKind.CALL. When the code starts, the virtual register CALLED has the function's
    address; ip is unknown.

    After a change of the emitted code, call Fprobes.handler_changed().
    """
    exit_program: CompileHandler | None = None
    """Function that emits guest code in place of `exit_handler`; None: there is no such code.

    It is called with EntryKind.RETURN. When the code starts, the virtual register CALLED has the function's
    address; ip is unknown.

    After a change of the emitted code, call Fprobes.handler_changed().
    """
    code: str | None = None
    """A handler in assembly for entries, which runs before the other handlers, or None; see Kprobe.code."""
    return_code: str | None = None
    """A handler in assembly for exits, or None. It shares `cells` with `code`."""
    is_disabled: bool = False
    """Whether the fprobe is disabled: its handlers are not called; see Kernel.disable_fprobe()."""
    is_over_fgraph: bool = False
    """Whether the fprobe looks in enabled_functions as in Linux 7.2, where fprobes use the function graph.

    If it is False, the fprobe looks as in Linux 6.1.
    """
    cells: PerCpuVars = field(default_factory=PerCpuVars, init=False, repr=False)
    """Name of a variable of `code` and `return_code` -> its value, the sum of the numbers of all CPUs.

    Each CPU has an unsigned 64-bit number for each variable. The sum is modulo 2**64.
    """
    _assembled: AssembledHandlers | None = field(default=None, init=False, repr=False)
    """The assembled handlers of a registered fprobe. They also count the calls at which they faulted."""
    hook: ReturnHook | None = field(default=None, init=False, repr=False)
    _missed: int = field(default=0, init=False, repr=False)
    """Number of missed calls since registration, without those that the current return hook has counted."""
    raised: int = field(default=0, init=False)
    """Number of calls whose handler in Python raised an exception.

    After unregistration it also contains the calls whose handler in assembly faulted.
"""
    functions: tuple[int, ...] = field(default=(), init=False, metadata=ADDRESS)
    """Addresses of the fentry sites that a registered fprobe hooks, one for each function."""

    @property
    def nmissed(self) -> int:
        """Number of calls missed since registration, because no rethook_node or no room for code was left."""
        return self._missed + (0 if self.hook is None else self.hook.missed)


class PartialRegs:
    """View of the registers that were saved at a hit. Access to other registers raises AttributeError."""

    __slots__ = ("_names", "_regs")

    _names: frozenset[str]
    _regs: Any

    def __init__(self, regs: Any, names: frozenset[str]) -> None:
        object.__setattr__(self, "_regs", regs)
        object.__setattr__(self, "_names", names)

    def __getattr__(self, name: str) -> int:
        if name not in self._names:
            raise AttributeError(f"{name} isn't saved")
        return int(getattr(self._regs, name))

    def __setattr__(self, name: str, value: int) -> None:
        if name not in self._names:
            raise AttributeError(f"{name} isn't saved")
        setattr(self._regs, name, value)


@dataclass(eq=False)
class _FprobeOps(AssemblyOwner):
    """The FtraceOps and the guest code of a registered fprobe."""

    fp: Fprobe[Any]
    ops: FtraceOps
    code: CompiledCode | None = None
    """Guest code that the functions' sites call; None: Python handles their calls."""
    is_python: bool = False
    """Whether Python handles all calls, because the handlers cannot be compiled to guest code."""

    def emit_assembly(self, builder: ProgramBuilder, point: HandlerPoint) -> None:
        if self.fp._assembled is not None:
            self.fp._assembled.emit(builder, point)

    def miss_assembly(self, point: HandlerPoint) -> None:
        if self.fp._assembled is not None and point in self.fp._assembled:
            self.fp._missed += 1


class TraceableNames(Protocol):
    """The traceable functions of a kernel and of its loaded modules, by name."""

    def sites_by_name(self, name: str | None) -> Iterable[tuple[str, int]]:
        """Return (name, fentry site) of each function called `name`, or of all if `name` is None."""


class Fprobes:
    """All fprobes of one kernel.

    Mirrors: kernel/trace/fprobe.c (v6.1).
    """

    def __init__(
        self,
        kprobes: Kprobes,
        hooks: ReturnHooks,
        arch: Arch,
        *,
        cpus: int,
    ) -> None:
        """Create the registry without fprobes.

        `hooks`: the return hooks for exits. `cpus`: number of CPUs.
        """
        self._kprobes = kprobes
        self._hooks = hooks
        self._arch = arch
        self._cpus = cpus
        self._registered: dict[Fprobe, _FprobeOps] = {}
        self.functions: TraceableNames
        """The functions that filters can match. The builder of the kernel's tracing sets it."""

    def register_fprobe(self, fp: Fprobe[Any]) -> None:
        """Register an fprobe, and hook all functions that match its filters.

        The filter matches functions of loaded modules, too. If several functions have the same name, all are
        hooked. When a module is unloaded, the fprobe is removed from the module's functions.

        Raises: KernelError EINVAL (no function matches, registered already, code that cannot be assembled),
        EOPNOTSUPP (no fentry sites, or a register that is not saved), ENOMEM.
        Mirrors: kernel/trace/fprobe.c:register_fprobe (v6.1).
        """
        self._kprobes.lock.assert_held()
        sites = self._kprobes.sites
        if sites is None:
            raise KernelError(errno.EOPNOTSUPP, "this kernel has no fentry sites")
        if fp in self._registered:
            raise KernelError(errno.EINVAL, "the fprobe is registered already")
        self._check_registers(fp)
        fp.functions = self.matching(fp)
        texts = handler_texts(fp)
        fp._assembled = self._kprobes.assemble(texts, fp.cells) if texts else None
        fp.raised = 0
        fp._missed = 0
        try:
            registered = self._prepare(fp)
        except KernelError:
            self._forget_assembly(fp)
            raise
        self._registered[fp] = registered
        self._attach_assembly(fp, registered)
        sites.attach(registered.ops, fp.functions)

    def unregister_fprobe(self, fp: Fprobe) -> None:
        """Unregister an fprobe. Pending calls return without calling the exit handler.

        Raises: KernelError EINVAL (not registered).
        Mirrors: kernel/trace/fprobe.c:unregister_fprobe (v6.1).
        """
        self._kprobes.lock.assert_held()
        registered = self._registered.get(fp)
        if registered is None:
            raise KernelError(errno.EINVAL, "the fprobe isn't registered")
        assert self._kprobes.sites is not None
        # Other CPUs call the code until the text has changed.
        self._kprobes.sites.detach(registered.ops)
        del self._registered[fp]
        self._drop_code(registered)
        self._kprobes.compiler.drop_asm_thunks(registered)
        # The caller may be the fprobe's own handler, so make no more guest code for it.
        registered.is_python = True
        hook = fp.hook
        if hook is not None:
            fp._missed += hook.missed
            fp.hook = None
            self._hooks.remove(hook)
        self._forget_assembly(fp)
        fp.functions = ()

    def _forget_assembly(self, fp: Fprobe) -> None:
        assembled = fp._assembled
        fp._assembled = None
        if assembled is not None:
            fp.raised += assembled.faults
            self._kprobes.forget(assembled)

    def _attach_assembly(self, fp: Fprobe, registered: _FprobeOps) -> None:
        """Make an fprobe's assembly handlers run at returns, and at entries that Python handles.

        If the fprobe is disabled, the handlers do not run any more. `registered`: the _FprobeOps of the
        fprobe.
        """
        moments = () if fp.is_disabled else handler_texts(fp)
        assert self._kprobes.sites is not None
        self._kprobes.sites.set_assembly(registered.ops, registered if HandlerPoint.PRE in moments else None)
        if fp.hook is not None:
            fp.hook.assembled = fp._assembled if HandlerPoint.RETURN in moments else None

    def disable_fprobe(self, fp: Fprobe) -> None:
        """Stop calling an fprobe's handlers. Mirrors: include/linux/fprobe.h:disable_fprobe (v6.1)."""
        self._kprobes.lock.assert_held()
        fp.is_disabled = True
        self.handler_changed(fp)

    def enable_fprobe(self, fp: Fprobe) -> None:
        """Call an fprobe's handlers again. Mirrors: include/linux/fprobe.h:enable_fprobe (v6.1)."""
        self._kprobes.lock.assert_held()
        fp.is_disabled = False
        self.handler_changed(fp)

    def handler_changed(self, fp: Fprobe) -> None:
        """Drop the guest code of an fprobe, because its programs or its disabled flag have changed."""
        registered = self._registered.get(fp)
        if registered is None:
            return
        self._drop_code(registered)
        if fp.hook is not None:
            self._hooks.handler_changed(fp.hook)
        if fp._assembled is not None:
            self._attach_assembly(fp, registered)
            self._kprobes.compiler.drop_asm_thunks(registered)

    def _set_code(self, registered: _FprobeOps, codes_of: CodesOf) -> None:
        assert self._kprobes.sites is not None
        self._kprobes.sites.set_code(registered.ops, codes_of)
        self._kprobes.compiler.drop_asm_thunks(registered)

    def _drop_code(self, registered: _FprobeOps) -> None:
        registered.is_python = False
        if registered.code is not None:
            self._set_code(registered, no_code)
            self._kprobes.compiler.retire(registered.code)
            registered.code = None

    def matching(self, fp: Fprobe) -> tuple[int, ...]:
        """Return the fentry sites of the functions whose names match the filters of `fp`.

        Raises: KernelError EINVAL (no function matches).
        """
        # Thousands of fprobes may name one function each.
        is_glob = _WILDCARDS.search(fp.filter) is not None
        named = self.functions.sites_by_name(None if is_glob else fp.filter)
        found = tuple(
            site
            for name, site in named
            if fnmatchcase(name, fp.filter) and not (fp.notfilter and fnmatchcase(name, fp.notfilter))
        )
        if not found:
            raise KernelError(errno.EINVAL, f"no function {fp.filter!r} can be traced")
        return found

    def functions_removed(self, gone: AbstractSet[int]) -> None:
        """Detach all fprobes from functions whose text is about to be freed.

        `gone`: fentry sites of the functions.
        """
        self._kprobes.lock.assert_held()
        for fp, registered in self._registered.items():
            if not gone.isdisjoint(fp.functions):
                fp.functions = tuple(site for site in fp.functions if site not in gone)
                assert self._kprobes.sites is not None
                self._kprobes.sites.attach(registered.ops, fp.functions)

    def replaced_address(self, fp: Fprobe) -> int:
        """Return the returning call's return address, as the function graph found it on the stack.

        It is a trampoline's address if a return probe hooked the call before the function graph. Only an exit
        handler of `fp` may call this method.
        Mirrors: kernel/trace/fprobe.c:fprobe_return (v7.2).
        """
        assert fp.hook is not None
        return self._hooks.replaced_by_others(fp.hook)

    # Registers

    def _saved(self, fp: Fprobe) -> tuple[frozenset[str], frozenset[str]]:
        """Return (registers that the entry handler gets, registers that the exit handler gets), as names."""
        if fp.registers is FprobeRegs.PT_REGS:
            return (frozenset(self._arch.pt_regs),) * 2
        return frozenset(self._arch.ftrace_regs), frozenset(self._arch.return_regs)

    def _check_registers(self, fp: Fprobe) -> None:
        wanted = zip(("entry", "exit"), (fp.entry_registers, fp.exit_registers), self._saved(fp), strict=True)
        for when, names, saved in wanted:
            missing = [name for name in names if name not in saved]
            if missing:
                what = f"{', '.join(missing)} isn't saved on {when}; there are {', '.join(sorted(saved))}"
                raise KernelError(errno.EOPNOTSUPP, what)

    # Hits

    def _prepare(self, fp: Fprobe) -> _FprobeOps:
        on_entry, on_exit = self._saved(fp)
        partial = fp.registers is FprobeRegs.FTRACE_REGS
        if fp.exit_handler is not None or fp.return_code is not None:
            nodes = fp.nr_maxactive or 2 * self._cpus * len(fp.functions)
            returned = self._returned(fp, on_exit if partial else None)
            size = self._arch.word_size + fp.entry_data_size
            in_python = fp.exit_handler is not None and fp.exit_program is None
            program = None if in_python else lambda builder, way: _exits(fp, builder, way)
            fp.hook = self._hooks.add(returned, nodes, size, program)
            fp.hook.follows_convention = True
        entered = self._entered(fp, on_entry if partial else None)

        def enter(site: int, regs: Any) -> None:
            entered(site, regs)
            is_settled = registered.is_python or registered.code is not None
            kprobes = self._kprobes
            if not is_settled and kprobes.split_jumps.may_patch() and kprobes.compiler.may_make():
                self._compile(fp, registered)

        registered = _FprobeOps(fp, _ftrace_ops(fp, enter))
        return registered

    def _compile(self, fp: Fprobe, registered: _FprobeOps) -> None:
        """Compile guest code that handles the fprobe's entries; if that is impossible, Python handles them.

        `registered`: the _FprobeOps of the fprobe, in which the code is stored.
        """
        sites = self._kprobes.sites
        builder = ProgramBuilder()
        assert sites is not None
        try:
            if self._kprobes.compiler.may_compile and self._emit_entry(fp, builder):
                registered.code = self._kprobes.compiler.entries(builder, sites.return_at)
            if registered.code is not None:
                self._set_code(registered, one_code(registered.code.entry))
        except SHORTAGES as error:
            self._kprobes.compiler.log_failure(error)
            self._drop_code(registered)
        registered.is_python = registered.code is None

    def _emit_entry(self, fp: Fprobe, builder: ProgramBuilder) -> bool:
        """Emit guest code that handles entries of the functions; return False if Python must handle them."""
        native = self._hooks.native
        if native is None or fp.is_disabled or fp.entry_data_size:
            return False
        if fp._assembled is not None:
            # These handlers must come first, because the code that follows uses virtual registers.
            fp._assembled.emit(builder, HandlerPoint.PRE)
        if fp.entry_handler is not None:
            if fp.entry_program is None:
                return False
            get_called(builder, self._arch, CALLED)
            if not fp.entry_program(builder, EntryKind.CALL):
                return False
        return fp.hook is None or native.emit_entry(builder, EntryKind.CALL, fp.hook, keeps_called=True)

    def _entered(self, fp: Fprobe, names: frozenset[str] | None) -> Called:
        """Return the function that handles entries of the probe's functions in Python.

        `names`: the registers that the probe's handlers can read; None means all.
        Mirrors: kernel/trace/fprobe.c:fprobe_handler (v6.1).
        """
        hook_call = self._hooks.hook_call
        hook = fp.hook
        word = self._arch.word_size
        nothing = memoryview(bytearray(fp.entry_data_size))

        def entered(site: int, regs: Any) -> None:
            if fp.is_disabled:
                return
            seen = regs if names is None else PartialRegs(regs, names)
            if hook is None:
                self._call(fp, fp.entry_handler, site, seen, nothing)
                return

            def wants(instance: RethookNode, _regs: Any) -> bool:
                data = instance.data
                data[:word] = site.to_bytes(word, "little")
                return not self._call(fp, fp.entry_handler, site, seen, data[word:])

            hook_call(hook, regs, wants)

        return entered

    def _returned(self, fp: Fprobe, names: frozenset[str] | None) -> Callable[[RethookNode, Any], None]:
        """Return the function that handles exits of the probe's functions in Python.

        `names`: the registers that the exit handler can read; None means all.
        Mirrors: kernel/trace/fprobe.c:fprobe_exit_handler (v6.1).
        """
        word = self._arch.word_size

        def returned(instance: RethookNode, regs: Any) -> None:
            if fp.is_disabled:
                return
            data = instance.data
            address = int.from_bytes(data[:word], "little")
            self._call(
                fp, fp.exit_handler, address, regs if names is None else PartialRegs(regs, names), data[word:]
            )

        return returned

    def _call(
        self, fp: Fprobe, handler: FprobeHandler | None, address: int, regs: Any, data: memoryview
    ) -> bool:
        """Call an fprobe's handler; return True if the handler returns a true value.

        If the handler raises an exception, report the exception and return False. If `handler` is None,
        return False.
        """
        if handler is None:
            return False
        try:
            return bool(handler(fp, address, regs, data))
        except BaseException as error:
            fp.raised += 1
            self._kprobes.hits.failures.note(error, address, is_first=fp.raised == 1)
            return False


def _exits(fp: Fprobe, builder: ProgramBuilder, way: EntryKind) -> bool:
    """Emit the exit handler as guest code; return False if Python must handle exits.

    Precondition: the return hook has stored the function's address in the virtual register SLOT (see
    stack_code.py). The code moves it to CALLED.
    """
    if fp.is_disabled:
        return False
    if fp.exit_handler is None:
        return True
    assert fp.exit_program is not None
    builder.emit(Move(CALLED, SLOT))
    return fp.exit_program(builder, way)


def _ftrace_ops(fp: Fprobe[Any], enter: Called) -> FtraceOps:
    """Return the FtraceOps by which an fprobe hooks fentry sites; `enter`: the function that handles entries.

    Mirrors: kernel/trace/fprobe.c:fprobe_ftrace_ops, fprobe_graph_ops (v7.2).
    """
    if not fp.is_over_fgraph:
        return FtraceOps(enter, lambda: "fprobe_handler", saves_regs=True)
    if fp.exit_handler is None:
        return FtraceOps(enter, lambda: "fprobe_ftrace_entry")
    return FtraceOps(enter, lambda: "ftrace_graph_func", sub_symbols=("fprobe_fgraph_entry", "fprobe_return"))
