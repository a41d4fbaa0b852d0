"""Reads the options of tracers that a distribution's kernel has and kprobefs lacks, such as blk."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.machine.memory.guest_memory import GuestMemory
from emulated_kernel.machine.traps.trap import GuestFault, MemoryFault
from emulated_kernel.util.errors import KernelError

_MAX_TRACERS = 32
_MAX_OPTIONS = 64
_NAME_SIZE = 64
_OPTION_SIZE = 16
_BIT_OFFSET = 8


def other_tracers(
    kernel: LinuxKernel, memory: GuestMemory, known: Collection[str]
) -> Mapping[str, Mapping[str, bool]]:
    """Return tracer -> option -> whether the option is on, for registered tracers that are not in `known`.

    If a tracer is unreadable, because the guest may have damaged the list of tracers, this tracer and all
    tracers after it are left out. Tracers without options are left out, too.
    Mirrors: kernel/trace/trace.c:trace_types, create_trace_option_files (v6.1).
    """
    found: dict[str, Mapping[str, bool]] = {}
    with suppress(GuestFault, MemoryFault, KernelError):
        for tracer in _tracers(kernel, memory):
            name = _string(memory, memory.read_word(tracer + kernel.btf.offset("tracer.name")))
            flags = memory.read_word(tracer + kernel.btf.offset("tracer.flags"))
            if name and flags and name not in known and (options := _options(kernel, memory, flags)):
                found[name] = options
    return found


def _tracers(kernel: LinuxKernel, memory: GuestMemory) -> Iterator[int]:
    """Yield the addresses of the registered struct tracers, the latest first."""
    at = memory.read_word(kernel.required("trace_types"))
    for _ in range(_MAX_TRACERS):
        if not at:
            return
        yield at
        at = memory.read_word(at + kernel.btf.offset("tracer.next"))


def _options(kernel: LinuxKernel, memory: GuestMemory, flags: int) -> Mapping[str, bool]:
    """Return option -> whether the option is on, from the struct tracer_flags at `flags`."""
    value = memory.read_u32(flags + kernel.btf.offset("tracer_flags.val"))
    options = memory.read_word(flags + kernel.btf.offset("tracer_flags.opts"))
    found = {}
    for at in range(options, options + _MAX_OPTIONS * _OPTION_SIZE, _OPTION_SIZE) if options else ():
        name = _string(memory, memory.read_word(at))
        if not name:
            break
        found[name] = bool(value & memory.read_u32(at + _BIT_OFFSET))
    return found


def _string(memory: GuestMemory, at: int) -> str:
    """Return the string at the address `at`, or "" if this string can't be the name of a file."""
    name = memory.read_cstring(at, _NAME_SIZE).decode("latin-1") if at else ""
    return name if name.isascii() and name.isprintable() and "/" not in name else ""
