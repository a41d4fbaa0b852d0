"""KernelTracepoints: records trace events of a distribution's kernel in kprobefs's buffers.

The kernel's own functions make the records.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from errno import EBUSY
from functools import cached_property, partial
from struct import pack
from typing import Any

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.x86.copy_insn import JMP32_SIZE
from emulated_kernel.arch.x86.probe_checks import label_size
from emulated_kernel.guests.linux.probing.replaced_calls import ReplacedCalls
from emulated_kernel.guests.linux.probing.syscall_work import SyscallWork
from emulated_kernel.image.linux.kernel_events import KernelEvent
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.text_tables import JumpLabel
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.text.text_poke import TextPoker
from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.events.link_order import link_rank
from emulated_kernel.trace.events.print_fmt import KernelNames, PrintContext
from emulated_kernel.trace.events.static_event import (
    StaticEvent,
    Tracepoint,
    TracepointStub,
    layout_fields,
)
from emulated_kernel.trace.events.static_keys import StaticKeys
from emulated_kernel.trace.events.syscall_events import SyscallEnter, SyscallExit, SyscallTracepoint
from emulated_kernel.trace.events.syscall_user_data import UserDataSize
from emulated_kernel.trace.events.tracepoints import RAW_SYSCALLS
from emulated_kernel.trace.ring.trace_entry import COMMON_SIZE, EventField
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.errors import KernelError

_RESERVE = "trace_event_buffer_reserve"
_COMMIT = "trace_event_buffer_commit"
REPLACED_FUNCTIONS = (_RESERVE, _COMMIT)
"""Kernel functions that the host replaces. They never run, so a probe on one would never be hit."""
_REGISTERING = ("tracepoint.regfunc", "tracepoint.ext")
_VARIABLES = "vmemmap_base", "jiffies"
"""Kernel variables that print formats refer to."""
_FAULTABLE = "tracepoint_ext.faultable"
_NO_SYSCALL = "sys_ni_syscall"
"""Symbol of the function that the kernel calls for numbers without a system call.

Mirrors: kernel/trace/trace_syscalls.c:find_syscall_meta (v6.1).
"""
_WORD = 8
_INT = 4
_JMP8 = b"\xeb"
_FUNC = 24
"""Size in bytes of a struct tracepoint_func."""
_FUNCS = 3 * _FUNC
"""Size in bytes of an array with the event's function, the tracepoint's stub and the terminator."""
_FILE = 8
"""Distance in bytes between the addresses that stand for the trace_event_files of two tracepoints."""
_DEPTH = 4
"""Maximum number of records under construction; making a record may hit another tracepoint."""
Switch = Callable[[bool], None]
SwitchStub = Callable[["EventBatch", int, bool], None]
"""Function that makes a tracepoint start or stop calling its stub.

Its arguments are a batch, the index of the tracepoint in the batch, and whether to call the stub.
"""
log = logging.getLogger("kprobefs.linux")


class EventBatch:
    """Events that are added and removed together, such as the events of a module.

    Their tracepoints share a block of memory, which is allocated when the first event is enabled.
    """

    def __init__(
        self,
        machine: ProbedMachine,
        names: Callable[[], KernelNames],
        references: int = 0,
        module: str = "",
    ) -> None:
        """Create a batch without events.

        `names`: returns the names that print formats may use. `references`: address of the module's reference
        count. `module`: name of the module. For events of the kernel itself, `references` is 0 and `module`
        is "".
        """
        self.module = module
        self._machine = machine
        self.names = names
        self._references = references
        self.points: list[Tracepoint] = []
        self.is_going = False
        self.is_gone = False
        self._funcs = 0

    def hold(self) -> None:
        """Take a reference to the module of the events; do nothing for events of the kernel itself.

        Raises: KernelError EBUSY (the module is being unloaded).
        Mirrors: kernel/module/main.c:try_module_get (v6.1).
        """
        if self._references:
            count = self._count(0)
            if not count:
                raise KernelError(EBUSY, "the event's module is being unloaded")
            self._count(1)

    def let_go(self) -> None:
        """Drop the reference to the module. Mirrors: kernel/module/main.c:module_put (v6.1)."""
        if self._references:
            self._count(-1)

    def _count(self, change: int) -> int:
        memory = self._machine.memory
        count = int.from_bytes(memory.read(self._references, _INT), "little") + change & 0xFFFFFFFF
        if change:
            memory.write(self._references, count.to_bytes(_INT, "little"))
        return count

    def add(self, switch: Callable[[int, bool], None], stub: str, switch_stub: SwitchStub) -> Tracepoint:
        """Create a tracepoint in the batch, and return it.

        `switch` is called with the tracepoint's index in the batch and True to enable the tracepoint, False
        to disable it. `stub`: symbol of the tracepoint's stub (the empty function for `t` events), or "" if
        it has none. `switch_stub` is called to make the tracepoint start or stop calling the stub.
        """
        number = len(self.points)
        called = TracepointStub(stub, 1, 0, partial(switch_stub, self, number)) if stub else None
        point = Tracepoint(partial(switch, number), called)
        self.points.append(point)
        return point

    def prepare(self) -> Iterator[tuple[int, Tracepoint]]:
        """Allocate the batch's memory; yield (address that serves as trace_event_file, tracepoint) pairs.

        If the memory was allocated before, yield nothing.
        """
        if self._funcs:
            return
        # The kernel reads zeros in all fields of these files.
        self._funcs = self._machine.alloc_pages(len(self.points) * (_FUNCS + _FILE) + PAGE_SIZE)
        yield from ((self.file(number), point) for number, point in enumerate(self.points))

    def release(self) -> list[int]:
        """Free the batch's memory; return the addresses that served as trace_event_files.

        No CPU may use the memory any more. Return [] if no memory was allocated.
        """
        if not self._funcs:
            return []
        files = [self.file(number) for number in range(len(self.points))]
        self._machine.free_pages(self._funcs)
        self._funcs = 0
        return files

    def stub(self, number: int) -> str:
        """Return the symbol of the stub of the tracepoint with the index `number`; "" if it has no stub."""
        stub = self.points[number].stub
        return "" if stub is None else stub.symbol

    def array(self, number: int) -> int:
        """Return the address of the array of struct tracepoint_func of the tracepoint with index `number`."""
        return self._funcs + number * _FUNCS

    def file(self, number: int) -> int:
        """Return the address that serves as the trace_event_file of the tracepoint with index `number`."""
        return self.array(len(self.points)) + number * _FILE


class KernelTracepoints:
    """Trace events of the kernel's tracepoints.

    An enabled tracepoint calls the kernel's function trace_event_raw_event_EVENT(). This function's argument
    is a trace_event_file that the host has allocated. The file consists of zeros; its address identifies the
    event. The host replaces trace_event_buffer_reserve(), which returns a page of host-owned memory, and
    trace_event_buffer_commit(), which passes the record to the event.

    If a tracepoint has a regfunc or unregfunc, the host must call the function to enable or disable the
    event. If the host cannot call functions of the kernel, such events are not available, except
    those of system calls.
    Mirrors: include/trace/trace_events.h:trace_event_raw_event_##call (v6.1).
    """

    def __init__(
        self,
        machine: ProbedMachine,
        kernel: LinuxKernel,
        arch: Arch,
        poker: TextPoker,
        hit: ProbeHit,
        syscall_work: SyscallWork,
        call: Callable[[int], int] | None,
        user_data: UserDataSize | None = None,
    ) -> None:
        """Prepare the tracepoints; the guest does not change until an event is enabled.

        `hit`: object that describes the current hit to the events' handlers; it is filled in again for each
        record. `call`: calls the kernel function at an address; None if the host cannot call kernel
        functions. `user_data`: size of the user memory that records of system calls contain; None if they
        contain none.
        """
        self._syscall_work = syscall_work
        self.user_data = user_data
        """Size of the user memory that records of system calls contain; None if they contain none."""
        self._call = call
        self._machine = machine
        self._memory = machine.memory
        self._hit = hit
        self._kernel = kernel
        self._arch = arch
        self._replaced = ReplacedCalls(arch, machine.memory)
        # Functions that ran at boot have been freed.
        text = range(*kernel.text)
        labels = (label for label in kernel.jump_labels if label.code in text)
        self.keys = (_ShortKeys if arch.registers.link is None else StaticKeys)(labels, machine, poker, arch)
        """Switches static keys: it writes the branches (jump labels) of the kernel and of modules."""
        # Linux: a preemptible kernel subtracts the count that the tracepoint itself has added.
        self._own_count = -1 if kernel.is_preemptible else 0
        self._points: dict[int, Tracepoint] = {}
        """Address of an event's trace_event_file (see the class) -> the event's tracepoint.

        The events of an EventBatch are missing until one of them is enabled for the first time.
        """
        self.by_name: dict[str, Tracepoint] = {}
        """Name of an event as GROUP:EVENT -> its tracepoint."""
        self._pending: list[tuple[int, int, int, int]] = []
        """(trace_event_buffer, trace_event_file, address, size in bytes) of each record under construction.

        The first three items are addresses; the newest record is last.
        """
        self._places = 0

    def events(self) -> Iterator[TraceEvent]:
        """Yield the kernel's trace events in Linux's order.

        Yield nothing if the kernel lacks one of REPLACED_FUNCTIONS.
        """
        if not self._hands_over:
            return
        has_syscalls = self._syscall_work.is_known()
        found: list[TraceEvent] = []
        raw: dict[str, SyscallTracepoint] = {}
        batch = EventBatch(self._machine, lambda: self.names)
        for event in self._kernel.events:
            is_syscall = event.system == RAW_SYSCALLS and has_syscalls
            made = self._event(event, batch, self._syscall_work.switch if is_syscall else None)
            if made is None:
                continue
            found.append(made)
            self.by_name[f"{event.system}:{event.name}"] = made.tracepoint
            if is_syscall:
                raw[event.name] = self._syscall_tracepoint(event, made)
        if raw.keys() >= {"sys_enter", "sys_exit"}:
            entry, end = raw["sys_enter"], raw["sys_exit"]
            for call in self._kernel.syscalls:
                if call.nr >= 0 and call.name != _NO_SYSCALL:
                    found += [SyscallEnter(call, entry, self.user_data), SyscallExit(call, end)]
        yield from sorted(found, key=lambda event: link_rank(event.group, event.name))

    def _syscall_tracepoint(self, event: KernelEvent, made: KernelStaticEvent) -> SyscallTracepoint:
        """Return the object that passes records of raw_syscalls:sys_enter or sys_exit to each call's event.

        `event`: the kernel's event, sys_enter or sys_exit. `made`: the trace event that was made from it.
        Since v6.13, these tracepoints are called with preemption enabled.
        Mirrors: include/linux/tracepoint-defs.h:struct tracepoint_ext (v7.2).
        """
        start = made.fields[0].offset - COMMON_SIZE
        btf = self._kernel.btf
        is_faultable = False
        if btf.has(_FAULTABLE):
            extra = self._word_at(event.tracepoint + btf.offset("tracepoint.ext"))
            bit, _ = btf.locate(_FAULTABLE)
            is_faultable = bool(extra and self._memory.read(extra + bit // 8, 1)[0] >> bit % 8 & 1)
        return SyscallTracepoint(made.tracepoint, _WORD, start, 0 if is_faultable else -self._own_count)

    def of_module(self, events: Iterable[KernelEvent], batch: EventBatch) -> list[KernelStaticEvent]:
        """Return the available trace events of a module, in the module's order; `batch` must be empty.

        Return [] if the kernel lacks one of REPLACED_FUNCTIONS.
        """
        made = [self._event(event, batch, None) for event in events] if self._hands_over else []
        return [event for event in made if event is not None]

    def forget(self, batch: EventBatch) -> None:
        """Forget the events of a module that is being unloaded. None of the events may be enabled."""
        for file in batch.release():
            del self._points[file]

    @cached_property
    def _hands_over(self) -> bool:
        """Whether the kernel has all REPLACED_FUNCTIONS, by which it reserves and commits records."""
        lookup = self._kernel.kallsyms.lookup_name
        return lookup(_RESERVE) is not None and lookup(_COMMIT) is not None

    def _event(
        self, event: KernelEvent, batch: EventBatch, register: Switch | None
    ) -> KernelStaticEvent | None:
        """Return a trace event for a kernel event; None if it has no probe function or no fields.

        Also return None if the host cannot call the tracepoint's regfunc and unregfunc, but would have to.

        `register`: called before the event's key is switched, with True to enable the event and False to
        disable it. If it is None, the tracepoint's regfunc or unregfunc is called, provided that there is
        one.
        """
        if register is None and not event.is_plain:
            if not self._can_register:
                return None
            register = partial(self._register, event, batch)
        if not (event.probe and event.fields):
            return None
        switch = partial(self._switch, event, batch)
        if register is not None:
            switch = partial(self._switch_registered, register, event, batch)
        stub = f"__probestub_{event.name}"
        has_stub = self._has_stubs and self._kernel.kallsyms.lookup_name(stub) is not None
        point = batch.add(switch, stub if has_stub else "", self._switch_stub)
        return KernelStaticEvent(event, self._common_size, batch, point)

    @cached_property
    def _common_size(self) -> int:
        return self._kernel.btf.size("trace_entry")

    @cached_property
    def _can_register(self) -> bool:
        """Whether the host can call the functions regfunc and unregfunc of tracepoints."""
        return self._call is not None and any(self._kernel.btf.has(name) for name in _REGISTERING)

    @cached_property
    def _has_stubs(self) -> bool:
        """Whether tracepoints have stubs, as they do since Linux 6.3.

        The result is cached, because a lookup for each event would take 3 ms.
        """
        return self._kernel.kallsyms.lookup_name("__probestub_sched_switch") is not None

    @cached_property
    def names(self) -> KernelNames:
        """Kernel names to which print formats refer: variables, enumerators, sizes and functions."""
        btf = self._kernel.btf
        lookup = self._kernel.kallsyms.lookup_name
        variables = {name: partial(self._word_at, at) for name in _VARIABLES if (at := lookup(name))}
        tick = lookup("tick_nsec")
        functions = {} if tick is None else {"jiffies_to_msecs": partial(self._milliseconds, tick)}
        return KernelNames(variables, btf.constants, {"page": btf.size("page")}, functions)

    def _milliseconds(self, tick: int, jiffies: int) -> int:
        """Convert `jiffies` to milliseconds.

        `tick`: address of the kernel's variable tick_nsec.
        Mirrors: kernel/time/time.c:jiffies_to_msecs (v6.1).
        """
        # A guest can set its variable to any number.
        per_second = round(10**9 / max(self._word_at(tick), 1))
        return jiffies * 1000 // max(per_second, 1) & 0xFFFFFFFF

    def _word_at(self, address: int) -> int:
        return int.from_bytes(self._memory.read(address, _WORD), "little")

    def _switch_registered(
        self, register: Switch, event: KernelEvent, batch: EventBatch, number: int, on: bool
    ) -> None:
        """Switch an event that has regfunc and unregfunc: call `register`, then switch the event's key.

        If the key cannot be switched, undo the registration. `register`: _register(), bound to the event and
        its batch, or SyscallWork.switch(). It is called with `on`. `number`: index of the event's tracepoint
        in the batch. `on`: enable the event; otherwise disable it. Raises: the errors of `register`.
        """
        self._prepare(batch)
        register(on)
        try:
            self._switch(event, batch, number, on)
        except BaseException:
            # Report why the event could not be switched, even if undoing fails as well.
            with suppress(KernelError):
                register(not on)
            raise

    def _register(self, event: KernelEvent, batch: EventBatch, on: bool) -> None:
        """Call an event's regfunc if `on` is True, otherwise its unregfunc, provided that the event has it.

        Deviates: the unregfunc of a module in the state GOING is not called, because the kernel is in the
        middle of the unload.
        Raises: KernelError (if `on` is True: with regfunc's errno, or as LinuxEngine._call()).
        """
        if batch.is_going:
            return
        assert self._call is not None
        function = self._function(event, "regfunc" if on else "unregfunc")
        if not function:
            return
        if on:
            result = self._call(function) & 0xFFFFFFFF
            if result >> 31:
                raise KernelError((1 << 32) - result)
        else:
            # Events of a dead guest can still be disabled.
            with suppress(KernelError):
                self._call(function)

    def _function(self, event: KernelEvent, name: str) -> int:
        """Return the address of the regfunc or unregfunc of an event's tracepoint; 0 if it has none.

        `name`: "regfunc" or "unregfunc". The address is in struct tracepoint, or since v6.14 in the struct
        tracepoint_ext to which struct tracepoint points.
        """
        btf = self._kernel.btf
        base = event.tracepoint
        if btf.has("tracepoint.ext"):
            base = self._word_at(base + btf.offset("tracepoint.ext"))
            owner = "tracepoint_ext"
        else:
            owner = "tracepoint"
        return self._word_at(base + btf.offset(f"{owner}.{name}"))

    def _switch(self, event: KernelEvent, batch: EventBatch, number: int, on: bool) -> None:
        """Switch an event: set the functions of its tracepoint and its static key.

        `number`: index of the event's tracepoint in the batch. `on`: enable the event; otherwise disable it.
        Mirrors: kernel/tracepoint.c:tracepoint_add_func, tracepoint_remove_func (v6.1).
        """
        self._prepare(batch)
        funcs = event.tracepoint + self._kernel.btf.offset("tracepoint.funcs")
        array = batch.array(number)
        if on:
            entry = pack("<QQQ", event.probe, batch.file(number), 0)
            self._memory.write(array, entry.ljust(_FUNCS, b"\0"))
            self._memory.write(funcs, pack("<Q", array))
        if self._kernel.jump_labels:
            self.keys.switch(event.key, on)
        else:
            # Linux: without CONFIG_JUMP_LABEL, code tests static_key.enabled, which is the first word.
            self._memory.write(event.key, pack("<i", on))
        if not on:
            self._memory.write(funcs, bytes(_WORD))

    def _switch_stub(self, batch: EventBatch, number: int, on: bool) -> None:
        """Make an enabled tracepoint call its stub if `on` is True, and not call it if `on` is False.

        The stub is the second entry of the tracepoint's array of functions. The third entry stays zero.
        """
        entry = bytes(_WORD)
        if on:
            entry = pack("<Q", self._kernel.required(batch.stub(number)))
        self._memory.write(batch.array(number) + _FUNC, entry)

    def _prepare(self, batch: EventBatch) -> None:
        self._points.update(batch.prepare())
        if self._places:
            return
        self._places = self._machine.alloc_pages(_DEPTH * PAGE_SIZE)
        # The functions stay replaced, because a CPU may be about to call one when the last event is disabled.
        for name, function in ((_RESERVE, self._reserve), (_COMMIT, self._commit)):
            address = self._kernel.required(name)
            self._machine.breakpoints[address] = function
            self._machine.text.replace(address, self._arch.breakpoint)

    def _reserve(self, regs: Any) -> None:
        """Replace trace_event_buffer_reserve(): make it return the address of memory for a record, or 0.

        The function's arguments are a trace_event_buffer, a trace_event_file and a size. It returns 0 in
        three cases: the file belongs to the kernel's own tracefs, which no client can see; _DEPTH records are
        under construction; or no record has this size.
        """
        buffer, file, size = self._replaced.arguments(regs)
        place = self._places + len(self._pending) * PAGE_SIZE
        if file in self._points and len(self._pending) < _DEPTH and COMMON_SIZE <= size <= PAGE_SIZE:
            self._memory.write(place, bytes(size))
            self._pending.append((buffer, file, place, size))
            self._replaced.end(regs, place)
        else:
            self._replaced.end(regs, 0)

    def _commit(self, regs: Any) -> None:
        """Replace trace_event_buffer_commit(): pass a finished record to its event.

        The function's argument is a trace_event_buffer.
        """
        buffer, *_ = self._replaced.arguments(regs)
        self._replaced.end(regs, 0)
        while self._pending:
            asked, file, place, size = self._pending.pop()
            # Records that were reserved later than this one have ended with a fault.
            if asked == buffer:
                self._record(file, self._memory.read(place + COMMON_SIZE, size - COMMON_SIZE), regs)
                return

    def _record(self, file: int, payload: bytes, regs: Any) -> None:
        hit = self._hit
        hit.regs = regs
        hit.handler_preempt_count = self._own_count
        point = self._points.get(file)
        for handler in point.handlers if point else ():
            handler(payload, hit)


class _ShortKeys(StaticKeys):
    """Static keys of x86 kernels. Since v5.14, they use a jump of two bytes where it reaches the target."""

    def jump(self, label: JumpLabel) -> bytes:
        size = label_size(self._text.original(label.code, JMP32_SIZE))
        if size == JMP32_SIZE:
            return super().jump(label)
        return _JMP8 + (label.target - label.code - size).to_bytes(1, "little", signed=True)


class KernelStaticEvent(StaticEvent):
    """An event whose print format may use names that only its kernel defines.

    Deviates: a format that uses unknown names shows the raw fields. Linux evaluates each format.
    """

    def __init__(
        self, event: KernelEvent, common_size: int, batch: EventBatch, tracepoint: Tracepoint
    ) -> None:
        """Create an event of a batch. `common_size`: see layout_fields()."""
        super().__init__(event.system, event.name, (), event.print_fmt, tracepoint, batch.names, _WORD)
        self._batch = batch
        self._definitions = event.fields
        self._common_size = common_size

    @cached_property
    def fields(self) -> tuple[EventField, ...]:
        """The event's own fields. They are computed at the first use, because most events are never used."""
        return tuple(layout_fields(self._definitions, self._common_size))

    @property
    def module(self) -> str:  # type: ignore[override]
        return self._batch.module

    @property
    def is_removed(self) -> bool:
        """Whether the event's module has been unloaded."""
        return self._batch.is_gone

    def hold(self) -> None:
        """Take a reference to the event and its module.

        Raises: KernelError EBUSY (the module is being unloaded).
        """
        self._batch.hold()
        super().hold()

    def let_go(self) -> None:
        """Drop a reference to the event and its module."""
        super().let_go()
        self._batch.let_go()

    @cached_property
    def _print(self) -> Callable[[PrintContext], str]:
        try:
            return super()._print
        except ValueError as error:
            log.info("%s:%s: %s", self.group, self.name, error)
            return self._bare

    def _bare(self, context: PrintContext) -> str:
        """Return the record's numeric fields as NAME=VALUE, for an event whose print format is unknown."""
        shown = []
        for field in self.fields:
            raw = context.payload[field.offset - COMMON_SIZE :][: field.size]
            if field.size in (1, 2, 4, 8) and not field.type.startswith("__data_loc"):
                value = int.from_bytes(raw, "little", signed=field.is_signed)
                shown.append(f"{field.name}={value if field.is_signed else hex(value)}")
        return " ".join(shown)
