"""KernelFunctions, which passes calls from fentry sites to tracers, and CallRecorder, which records calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from operator import attrgetter
from typing import Any

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.kprobes.hit.entry_code import EntryCode
from emulated_kernel.kprobes.hit.ftrace import OPS_LIST_FUNC
from emulated_kernel.kprobes.hit.ftrace_ops import FtraceOps
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.trace.array.trace_array import TraceArray
from emulated_kernel.trace.compiled.calls import CompiledCalls, SelectedTasks
from emulated_kernel.trace.compiled.guest_addresses import GuestAddresses
from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.events.event_pids import EventPids
from emulated_kernel.trace.interface import Interface, InterfaceRule
from emulated_kernel.trace.output.function_args import COUNT
from emulated_kernel.trace.output.tracer_options import FunctionOption
from emulated_kernel.trace.ring.trace_entry import EntryType, repeats_entry
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.trace.tracers.available_functions import CallHandler, Functions, TraceableFunction
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.fast_dataclass import dataclass

_MAX_REPEATS = 0xFFFF
_UNUSED = "ftrace_stub"
"""Name of the Linux function that touched_functions shows as the target of a site without an ftrace_ops."""
_INVALID_FUNCTION = "__ftrace_invalid_address__"


class KernelFunctions:
    """The traceable functions of a kernel, and the calls from their fentry sites to tracers."""

    def __init__(
        self,
        kprobes: Kprobes,
        fentry: Collection[int],
        symbols: KernelSymbols,
        hit: ProbeHit,
        arch: Arch,
        places: GuestAddresses,
        interface: Interface,
    ) -> None:
        sites = kprobes.sites
        self._kprobes = kprobes
        self._sites = sites
        self.arch = arch
        self.places = places
        self._is_entry = kprobes.probe_checker.is_entry_site
        self._has_trampolines = arch.has_ops_trampolines
        self._has_subops = InterfaceRule.FUNCTION_SUBOPS in interface
        self._has_flags = InterfaceRule.FUNCTION_FLAGS in interface
        if sites is not None:
            sites.keeps_history = self._has_flags or InterfaceRule.FUNCTION_FILES in interface
        self._word_size = arch.word_size
        self._hit = hit
        hit.has_several = True
        self._latest = 0
        """Number of the latest call (FtraceSites.calls), to which the call chain cached in `_hit` belongs."""
        self._symbols = symbols
        self.functions = Functions(self._at(fentry), symbols.has_module)

    def _at(self, fentry: Iterable[int]) -> Iterator[TraceableFunction]:
        if self._sites is None:
            return
        sites = sorted(fentry)
        for site, where in zip(sites, self._symbols.locate_each(sites), strict=True):
            if where is None:
                continue
            name, offset, module = where
            if self._is_entry(offset):
                yield TraceableFunction(site, name, module)
            else:
                yield TraceableFunction(site, f"{_INVALID_FUNCTION}_{offset}", module, is_dropped=True)

    @property
    def has_sites(self) -> bool:
        """Whether the kernel has fentry sites. A kernel without them has no function tracer."""
        return self._sites is not None

    def module_added(self, name: str, fentry: frozenset[int]) -> None:
        """Add the functions of the new module `name`, whose symbols can already be looked up.

        `fentry`: addresses of the module's fentry sites.
        """
        self.functions.add(name, self._at(fentry))

    def init_removed(self, name: str, fentry: frozenset[int]) -> None:
        """Remove the functions in the init text of the module `name`, because that text is about to be freed.

        `fentry`: addresses of the functions' fentry sites. If any fentry site of the kernel has an
        ftrace_ops, the functions' symbols are kept, so that existing trace entries still show names.
        Mirrors: kernel/trace/ftrace.c:ftrace_free_mem (v6.1).
        """
        if self._sites is not None and self._sites.is_used:
            found = [self._symbols.lookup(site) for site in sorted(fentry)]
            self._symbols.remember(name, [where for where in found if where is not None])
        self.functions.remove(fentry)

    def module_removed(self, name: str, fentry: frozenset[int]) -> None:
        """Remove the functions of the module `name`, because the module is about to be freed.

        `fentry`: addresses of the module's fentry sites.
        """
        self._symbols.forget(name)
        if self._sites is not None:
            self._sites.forget(fentry)
        self.functions.remove(fentry)

    def user(self, handler: CallHandler, symbol: Callable[[], str]) -> FtraceOps:
        """Create an ftrace_ops whose `handler` is called from the fentry sites that are passed to attach().

        `symbol` returns the name of Linux's handler, which enabled_functions shows; see FtraceOps.
        """
        return FtraceOps(partial(self._call, handler), symbol)

    def entry_code(self, user: FtraceOps) -> EntryCode[None] | None:
        """Return an object that compiles guest code for `user`; None if the kernel has no fentry sites."""
        return self._kprobes.entry_code(user) if self._sites is not None else None

    @property
    def may_compile(self) -> bool:
        """Whether handlers of calls can be compiled to guest code. If not, Python runs them at each call."""
        return self._kprobes.compiler.may_compile

    def attach(self, user: FtraceOps, sites: AbstractSet[int]) -> None:
        """Call the ftrace_ops `user` from the fentry sites `sites`, and stop calling it from all other sites.

        Sites of disabled functions (TraceableFunction.is_dropped) are ignored. See FtraceSites.attach.
        """
        if self._sites is not None:
            # Linux: a number in a filter also selects disabled functions, whose calls are not traced.
            dropped = self.functions.dropped
            self._sites.attach(user, sites - dropped if dropped else sites)

    def detach(self, user: FtraceOps) -> None:
        """Stop calling the ftrace_ops `user` from all fentry sites; see FtraceSites.detach."""
        if self._sites is not None:
            self._sites.detach(user)

    def _call(self, handler: CallHandler, site: int, frame: Any) -> None:
        hit = self._hit
        if self._sites is not None and self._sites.calls != self._latest:
            self._latest = self._sites.calls
            hit.chain = None
        hit.regs = frame
        handler(site, hit)

    def total_info(self) -> str:
        """Return the text of dyn_ftrace_total_info.

        Mirrors: kernel/trace/trace.c:tracing_read_dyn_info (v6.1).
        Deviates: the guest has no struct dyn_ftrace, only tables of fentry sites' addresses. The pages of
        these tables are counted, with one group for the kernel and one for each module.
        """
        groups = Counter(function.module for function in self.functions)
        pages = sum(-(-count * self._word_size // PAGE_SIZE) for count in groups.values())
        return f"{len(self.functions)} pages:{pages} groups: {len(groups)}\n"

    def available(self, index: int = 0) -> Iterator[str]:
        """Yield the lines of available_filter_functions from line `index` on, counted from 0."""
        return (f"{name}\n" for name in self.functions.shown(index))

    def addresses(self) -> Iterator[str]:
        """Yield the lines of available_filter_functions_addrs: fentry site and name."""
        return (f"{function.site:x} {function.shown}\n" for function in self.functions)

    def enabled(self) -> Iterator[str]:
        """Yield the lines of enabled_functions."""
        return self._used(set())

    def touched(self) -> Iterator[str]:
        """Yield the lines of touched_functions: functions that are or have ever been traced."""
        return self._used(set() if self._sites is None else self._sites.touched)

    def _used(self, also: Collection[int]) -> Iterator[str]:
        """Yield the line of each traced function, and of each function whose fentry site is in `also`.

        The lines are those of enabled_functions and touched_functions.

        Mirrors: kernel/trace/ftrace.c:t_show (v6.1, v6.12).
        """
        sites = self._sites
        if sites is None:
            return
        called = sites.users()
        for function in self.functions:
            site = function.site
            if site not in called and site not in also:
                continue
            target, users = called.get(site, (0, ()))
            # Linux: D and O are flags of users without a trampoline, which do not exist here.
            regs = " R" if users and sites.saves_regs(site) else "  "
            ip = " I" if any(ops.modifies_ip for ops in users) else "  "
            past = ""
            if self._has_flags:
                past = f"  {' M ' if site in sites.modified else '   '}"
            way = self._way(target, users)
            yield f"{function.shown} ({len(users)}){regs}{ip}  {past}{way}\n"

    def _way(self, target: int, users: Sequence[FtraceOps]) -> str:
        """Return the end of a line of enabled_functions: a fentry site's trampoline and handler.

        If the site has several ftrace_ops, the end shows only Linux's function that calls them all; if it has
        none, only _UNUSED. `target`: address that the site calls. `users`: the ftrace_ops of the site. Return
        "" if the architecture has no separate trampolines for ftrace_ops.
        Deviates: handlers are shown without an address, because the guest does not contain Linux's handlers.
        Mirrors: kernel/trace/ftrace.c:add_trampoline_func (v6.1).
        """
        if not self._has_trampolines:
            return ""
        if not users:
            return f" ->{_UNUSED}"
        if len(users) > 1:
            return f" ->{OPS_LIST_FUNC}"
        symbol = users[0].symbol()
        subops = users[0].sub_symbols if self._has_subops else None
        end = f"\tsubops: {{ent:{subops[0]} ret:{subops[1]}}}" if subops else ""
        return f"\ttramp: {target:#x} ({symbol}) ->{symbol}{end}"


@dataclass(slots=True)
class _Repeated:
    """The last recorded call on a CPU, and the number of its repetitions. One record shows all repetitions.

    Mirrors: kernel/trace/trace.h:struct trace_func_repeats (v6.1).
    """

    call: bytes = b""
    count: int = 0
    latest: int = 0
    """Time of the latest repetition of the call, in units of the trace clock."""


class CallRecorder:
    """Writes the entries of the function tracer to a trace array."""

    def __init__(self, array: TraceArray, pids: EventPids) -> None:
        system = array.system
        self._array = array
        self.clear_trace: Callable[[], None] = array.clear_trace
        self._pids = pids
        self._tasks = system.tasks
        self._parent = system.stack.caller
        self._is_on = system.tracer_options.is_on
        self._options = frozenset[FunctionOption]()
        self._repeated = [_Repeated() for _ in range(array.cpus)]
        self._word = system.arch.word_size
        self._arguments = attrgetter(*system.arch.registers.arguments[:COUNT])

    def select_options(self) -> None:
        """Adopt the present options of the tracer, which select how calls are recorded.

        Linux: all trace arrays share the options. A trace array selects its handler when its tracer starts,
        and when an option is switched in it.
        Mirrors: kernel/trace/trace_functions.c:select_trace_function (v6.1).
        """
        self._options = frozenset(option for option in FunctionOption if self._is_on(option))

    def compiled(self) -> CompiledCalls | None:
        """Return the settings of guest code that records calls, or None if Python must record them.

        Python records the calls if the clock or an option keeps guest code from writing to the buffers, if
        an option of the tracer is on, or if the lists of pids are very long.
        """
        target = self._array.ring_target()
        tasks = SelectedTasks.of(self._pids.traced.pids, self._pids.untraced.pids)
        if self._options or target is None or tasks is None:
            return None
        return CompiledCalls(target, tasks)

    def record(self, site: int, hit: ProbeHit) -> None:
        """Record a call as the selected options require, unless the pid lists exclude the task.

        Mirrors: kernel/trace/trace_functions.c:function_trace_call and its variants (v6.1).
        """
        if self._pids.is_active and self._pids.ignores(self._tasks.pid()):
            return
        call = self._words((site, self._parent(hit.regs)))
        options = self._options
        if FunctionOption.NO_REPEATS in options and self._repeats(call, hit):
            return
        if FunctionOption.ARGS in options:
            call += self._words(self._arguments(hit.regs))
        self._array.record_at(EntryType.FN, call, hit)
        if FunctionOption.STACK_TRACE in options:
            self._array.record_stack(hit)

    def _words(self, values: Iterable[int]) -> bytes:
        return b"".join(each.to_bytes(self._word, "little") for each in values)

    def _repeats(self, call: bytes, hit: ProbeHit) -> bool:
        """Count a call that repeats the CPU's last recorded call, and return True.

        For any other call, record the number of repetitions so far, if there are any, and return False.
        Mirrors: kernel/trace/trace_functions.c:is_repeat_check, process_repeats (v6.1).
        """
        last = self._repeated[self._tasks.cpu()]
        if last.call == call and last.count < _MAX_REPEATS:
            last.count += 1
            last.latest = self._array.now()
            return True
        if last.count:
            ago = self._array.now() - last.latest
            self._array.record_at(EntryType.FUNC_REPEATS, repeats_entry(last.call, last.count, ago), hit)
        last.call = call
        last.count = 0
        return False
