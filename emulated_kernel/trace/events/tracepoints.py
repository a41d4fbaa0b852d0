"""Tracepoints of the kernel image: static keys switch them, and the host reads the guest's records."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from emulated_kernel.image.builtin_image import KernelImage
from emulated_kernel.image.kallsyms import address_of
from emulated_kernel.image.trace_events import event_definitions, syscall_definitions
from emulated_kernel.machine.memory.memory import Memory
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.events.print_fmt import KernelNames
from emulated_kernel.trace.events.static_event import StaticEvent, Tracepoint, TracepointStub, layout_fields
from emulated_kernel.trace.events.static_keys import StaticKeys
from emulated_kernel.trace.events.syscall_events import SyscallEnter, SyscallExit, SyscallTracepoint
from emulated_kernel.trace.events.syscall_user_data import UserDataSize
from emulated_kernel.trace.ring.trace_entry import COMMON_SIZE
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.errors import KernelError

RAW_SYSCALLS = "raw_syscalls"
_ENUM = "enum."


class Tracepoints:
    """All tracepoints of a kernel image, and their events.

    When the guest commits a record, the object passes the record to the tracepoint's handlers.
    """

    def __init__(
        self,
        image: KernelImage,
        memory: Memory,
        breakpoints: MutableMapping[int, Callable[[Any], object]],
        keys: StaticKeys,
        hit: ProbeHit,
        argument_registers: Sequence[str],
        user_data: UserDataSize | None = None,
        *,
        signed_char: bool = True,
    ) -> None:
        """Create an empty table of tracepoints, which events() fills.

        `breakpoints`: address -> handler of a breakpoint; events() adds the handler that takes the records.
        `hit`: the ProbeHit object that handlers get with each record; its `regs` are set before each call.
        `keys`: the static keys that switch the tracepoints. `argument_registers`: names of the registers with
        a function's arguments.
        """
        self._user_data = user_data
        """Size of user memory in records of system calls; None if records contain no user memory."""
        self._signed_char = signed_char
        """Whether formats show a char as signed."""
        self._image = image
        self._memory = memory
        self._breakpoints = breakpoints
        self._keys = keys
        self._hit = hit
        self._points: dict[int, Tracepoint] = {}
        """Address of the struct trace_event_call -> tracepoint."""
        self.by_name: dict[str, Tracepoint] = {}
        """GROUP:EVENT -> tracepoint; complete after events() was iterated."""
        self.syscalls = tuple(syscall_definitions(image))
        self._word = image.bits // 8
        self._arguments: Callable[[Any], tuple[int, int, int]] = attrgetter(*argument_registers[:3])
        """Function: registers -> arguments of host_trace_commit(), by which the guest commits a record.

        The arguments are the address of the trace_event_call, the address of the entry, and the entry's size
        in bytes.
        """

    def _commit(self, regs: Any) -> None:
        """Pass a record from guest memory to the handlers of its tracepoint.

        This method handles the breakpoint at host_trace_commit(). The IP is already after the breakpoint.
        Hazard: any guest code may call the function with any arguments, so invalid arguments are ignored.
        """
        call, entry, size = self._arguments(regs)
        point = self._points.get(call)
        if point is None or not point.handlers or not COMMON_SIZE <= size <= PAGE_SIZE:
            return
        try:
            payload = self._memory.read(entry + COMMON_SIZE, size - COMMON_SIZE)
        except MemoryFault:
            return
        self._hit.regs = regs
        for handler in point.handlers:
            handler(payload, self._hit)

    def _address(self, name: str) -> int:
        return address_of(self._image.kallsyms, name)

    def events(self) -> Iterator[TraceEvent]:
        """Create the tracepoints. Yield an event for each of them, then two events for each system call."""
        raw: dict[str, Tracepoint] = {}
        for each in event_definitions(self._image):
            stub = TracepointStub(f"__traceiter_{each.name}")
            point = Tracepoint(partial(self._keys.switch, each.key), stub)
            self._points[each.address] = point
            self.by_name[f"{each.system}:{each.name}"] = point
            if each.system == RAW_SYSCALLS:
                raw[each.name] = point
            fields = layout_fields(each.fields, signed_char=self._signed_char)
            yield StaticEvent(each.system, each.name, fields, each.print_fmt, point, self._names, self._word)
        if self._points:
            # The breakpoint is never removed: a CPU may be about to hit it when the last event is disabled.
            self._breakpoints[self._address("host_trace_commit")] = self._commit
        if raw:
            entry = SyscallTracepoint(_named(raw, "sys_enter"), self._word)
            end = SyscallTracepoint(_named(raw, "sys_exit"), self._word)
            for syscall in self.syscalls:
                yield SyscallEnter(syscall, entry, self._user_data)
                yield SyscallExit(syscall, end)

    def _names(self) -> KernelNames:
        """Return the kernel's names that print formats may use."""
        abi = self._image.abi
        variables = {"vmemmap_base": partial(self._variable, "vmemmap_base")}
        constants = {key[len(_ENUM) :]: value for key, value in abi.items() if key.startswith(_ENUM)}
        return KernelNames(variables, constants, {"page": abi["page.size"]}, {})

    def _variable(self, name: str) -> int:
        return int.from_bytes(self._memory.read(self._address(name), self._word), "little")


def _named(points: Mapping[str, Tracepoint], name: str) -> Tracepoint:
    if name not in points:
        raise KernelError(errno.ENOEXEC, f"the kernel image has no event {RAW_SYSCALLS}:{name}")
    return points[name]
