"""Builds tracing over a distribution's kernel, with the kernel's tracepoints, names and formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from struct import Struct

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.components.records import ProbeRegistries, TracingComponents
from emulated_kernel.components.tracing import TracedKernel, build_trace
from emulated_kernel.guests.linux.guest.running_linux import RunningLinux
from emulated_kernel.guests.linux.guest.wakeup_thunk import thunks
from emulated_kernel.guests.linux.probing.detect_interface import interface_with
from emulated_kernel.guests.linux.probing.kernel_calls import calls_text
from emulated_kernel.guests.linux.probing.kernel_tracepoints import KernelTracepoints
from emulated_kernel.guests.linux.probing.linux_context import linux_context, linux_need_resched
from emulated_kernel.guests.linux.probing.other_tracers import other_tracers
from emulated_kernel.guests.linux.probing.syscall_work import SyscallWork
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.live_image import LiveImage
from emulated_kernel.image.text_tables import words
from emulated_kernel.kprobes.profile import KERNEL_INTERFACE
from emulated_kernel.kprobes.return_hook.hook_sets import GRAPH_TRAMPOLINE
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.trace.context.probe_hit import ProbeHit, Tasks
from emulated_kernel.trace.events.syscall_user_data import UserDataSize
from emulated_kernel.trace.interface import InterfaceRule, interface_named
from emulated_kernel.trace.output.tracer_options import TRACERS
from emulated_kernel.trace.ring.trace_entry import MARKER_SYMBOL
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.util.lazy_pattern import lazy_pattern
from emulated_kernel.util.limits import Limits


def linux_tracing(
    machine: ProbedMachine,
    live: LiveImage[LinuxKernel],
    arch: Arch,
    engine: ProbeRegistries,
    abi: Mapping[str, int],
    printk: Callable[[str], None],
    task_structs: Callable[[], Iterator[int]],
    call: Callable[[int], int] | None,
    limits: Limits,
    guest: RunningLinux,
) -> tuple[TracingComponents, KernelTracepoints]:
    """Build tracing and the tracepoints of a distribution's kernel.

    `live`: the kernel, with its text in memory. `printk`: writes a line to a log of the host. `call`: see
    KernelTracepoints.__init__. `guest`: the running kernel; only its masks of thread flags and its ABI are
    used.
    """
    kernel = live.core
    kprobes = engine.kprobes
    tasks = Tasks(machine, abi)
    context = linux_context(
        kprobes.hits.ctlblk,
        machine,
        abi,
        arch,
        preemption=kprobes.profile.preemption,
        need_resched=guest.need_resched,
    )
    profile = kprobes.profile
    own = interface_with(kernel, profile) if profile.interface == KERNEL_INTERFACE else None
    interface = own or interface_named(kprobes.profile.interface)
    user_data = UserDataSize() if InterfaceRule.SYSCALL_USER_DATA in interface else None
    points = KernelTracepoints(
        machine,
        kernel,
        arch,
        kprobes.poker,
        ProbeHit(machine.memory, tasks, context.trace_ctx),
        SyscallWork(kernel, machine.memory, task_structs, guest.syscall_trace),
        call,
        user_data,
    )
    traced = TracedKernel(
        machine=machine,
        live=live,
        abi=abi,
        symbols=KernelSymbols(
            kernel.kallsyms,
            engine.hook_sets,
            kprobes.sites,
            lambda: (*machine.text.generated, thunks(guest.machine.abi), calls_text(guest.machine.abi)),
        ),
        tasks=tasks,
        context=context,
        events=points.events(),
        points=points.by_name,
        syscall_name=lambda number: _syscall_names(kernel).get(number),
        # Functions that ran only at boot are excluded, because their text has been freed.
        fentry=kernel.mcount.between(*kernel.text),
        resched=linux_need_resched(kernel, guest.need_resched),
        limits=limits,
        log=printk,
        release=kernel.release,
        interface=own,
        user_data=user_data,
        types=lambda: kernel.btf,
        printk_formats=partial(printk_formats, kernel),
        marker_ip=_marker_ip(kernel),
        other_tracers=other_tracers(kernel, machine.memory, TRACERS),
        # A kernel without its own graph tracer has not marked the functions that return to another task.
        has_graph=kernel.kallsyms.lookup_name(GRAPH_TRAMPOLINE) is not None,
    )
    return build_trace(traced, engine, arch), points


_LEA_RIP = lazy_pattern(rb"[\x48\x4c]\x8d[\x05\x0d\x15\x1d\x25\x2d\x35\x3d](.{4})", re.DOTALL)
"""Matches a `lea` that loads an address relative to the instruction pointer into any register."""
_S32 = Struct("<i")
_U64 = (1 << 64) - 1


def _marker_ip(kernel: LinuxKernel) -> int | None:
    """Return the address within tracing_mark_write() that this function writes to its records as the ip.

    The function loads this address by a `lea` relative to the instruction pointer, or as a 32-bit constant.
    On RISC-V, it loads the address by an auipc and an addi. Return None if the kernel has no such function,
    and the start of the function if no address is found.
    Mirrors: include/linux/instruction_pointer.h:_THIS_IP_ (v6.1).
    """
    start = kernel.kallsyms.lookup_name(MARKER_SYMBOL)
    found = None if start is None else kernel.kallsyms.lookup(start)
    if start is None or found is None:
        return None
    text = kernel.read(start, found.symbol.size)
    inside = range(start + 1, start + len(text))
    return next(filter(inside.__contains__, _addresses_in(kernel.architecture, text, start)), start)


def _addresses_in(architecture: str, text: bytes, start: int) -> Iterator[int]:
    """Yield the addresses that the code `text` may load. `start`: address of its first instruction."""
    if architecture == "riscv64":
        from emulated_kernel.guests.linux.probing.riscv_addresses import riscv_addresses_in

        yield from riscv_addresses_in(text, start)
        return
    yield from (start + lea.end() + _S32.unpack(lea[1])[0] for lea in _LEA_RIP.finditer(text))
    yield from (_S32.unpack_from(text, at)[0] & _U64 for at in range(len(text) - _S32.size + 1))


_FORMATS = ("trace_bprintk_fmt", "tracepoint_str")
_SHOWN = str.maketrans({"\n": "\\n", "\t": "\\t", '"': '\\"'})


def printk_formats(kernel: LinuxKernel) -> Iterator[str]:
    """Yield the lines of the file printk_formats: trace_printk() formats and tracepoint_string() strings.

    Records contain only the addresses of these texts, so readers look them up in the file.

    Mirrors: kernel/trace/trace_printk.c:find_next, t_show (v6.1).
    """
    for place in _FORMATS:
        start, end = kernel.between(f"__start___{place}", f"__stop___{place}")
        for at in words(kernel.read(start, end - start)) if start < end else ():
            if at:
                yield f'{at:#x} : "{kernel.vmlinux.string(at).translate(_SHOWN)}"\n'


@cache
def _syscall_names(kernel: LinuxKernel) -> Mapping[int, str]:
    return {call.nr: call.name for call in kernel.syscalls}
