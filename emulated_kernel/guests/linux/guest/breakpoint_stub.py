"""Guest code that delivers breakpoints of the kernel's own kprobes to the kernel, without Python.

Unicorn calls a native routine of the host at each trap. At a breakpoint, the routine stores four registers in
the host's data page, and makes the guest continue in the stub, the code STUB. The stub pushes the frame of
the exception, and jumps to the handler in the IDT's gate. No instruction before the push of the flags changes
the flags. No interrupt arrives in the stub: the host delivers interrupts only between runs, and never ends a
run there.
"""

from __future__ import annotations

from emulated_kernel.guests.linux.guest.wakeup_thunk import WakeupThunk
from emulated_kernel.guests.linux.pc.pc_machine import PcMachine
from emulated_kernel.machine.traps.trap import GuestFault
from emulated_kernel.util.abi import Vector
from emulated_kernel.util.code_listing import machine_code

STUB = """
    ff 35 rel32:ss   | push qword ptr [rip + ss]
    ff 35 rel32:sp   | push qword ptr [rip + sp]
    9c               | pushfq
    ff 35 rel32:cs   | push qword ptr [rip + cs]
    ff 35 rel32:ip   | push qword ptr [rip + ip]
    fa               | cli
    ff 25 rel32:gate | jmp qword ptr [rip + gate]
"""
_CELLS = ("ss", "sp", "cs", "ip", "gate")


def install(machine: PcMachine, thunk: WakeupThunk) -> None:
    """From now on, let guest code, without Python, deliver the breakpoints in kernel mode.

    `thunk`: the host's wakeup code, whose pages have room for the stub.

    Do nothing in three cases, in which Python continues to deliver the breakpoints: the host lacks the native
    routine for traps; kprobefs probes the guest, and must handle each breakpoint first; or the gate of #BP in
    the IDT is missing, switches the stack, or leaves interrupts enabled.
    """
    hooks = machine.hooks
    if hooks.breakpoints or hooks.fault_hooks or not hooks.is_native:
        return
    try:
        gate = machine.cpu.gate(Vector.BREAKPOINT)
    except GuestFault:
        return
    if gate.stack or not gate.disables_interrupts:
        return
    physical, virtual = thunk.stub_cells
    symbols = {name: virtual + 8 * number for number, name in enumerate(_CELLS)}
    words = machine.memory.words
    words[(physical >> 3) + _CELLS.index("gate")] = gate.entry
    text, entry = thunk.stub_text
    code = machine_code(STUB, entry, symbols)
    machine.memory.ram[text : text + len(code)] = code
    machine.deliver_breakpoints(range(entry, entry + len(code)), physical)
