"""UnwinderAnswers: tells the unwinder of a distribution's kernel the real callers of hooked functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from emulated_kernel.arch.arch_hooks import Arch, ByteMemory, Emulation
from emulated_kernel.guests.linux.probing.replaced_calls import ReplacedCalls
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.kprobes.return_hook.hook_sets import RETURN_PLACE, HookSets, return_place_size
from emulated_kernel.machine.interrupts.trap_handlers import Redirect
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.util.errors import KernelError

_FIND = "ftrace_graph_ret_addr"
_TRAMPOLINES = (
    "arch_rethook_trampoline",
    "__kretprobe_trampoline",
    "kretprobe_trampoline",
    "return_to_handler",
)
"""Names of the kernel's own return trampolines, which may have filler bytes after their code."""
ANSWERED_FUNCTIONS = (_FIND,)
"""Kernel functions that an unwinder calls; for a hooked call, the host answers instead of the function.

A breakpoint replaces the first instruction of each function.
"""


def return_place(kernel: LinuxKernel, arch: Arch) -> dict[str, int]:
    """Return {RETURN_PLACE: address}, the address in the kernel's text to which hooked functions return.

    The address is in the filler bytes after one of the kernel's own trampolines.

    Return {} if there are too few filler bytes, or if the unwinders need no such address.
    """
    text_returns = arch.text_returns
    if text_returns is None:
        return {}
    needed = return_place_size(arch)
    for name in _TRAMPOLINES:
        address = kernel.kallsyms.lookup_name(name)
        found = None if address is None else kernel.kallsyms.lookup(address)
        if found is not None:
            start, size = found.symbol.address, found.symbol.size
            if text_returns.filler_size(kernel.read(start, size)) >= needed:
                return {RETURN_PLACE: start + size - needed}
    return {}


class UnwinderAnswers:
    """Replaces the kernel function from which unwinders get the real return address of a hooked call.

    If the address that an unwinder has found is no trampoline of kprobefs, the kernel's own function runs.
    """

    def __init__(self, machine: ProbedMachine, kernel: LinuxKernel, arch: Arch, hook_sets: HookSets) -> None:
        """Prepare the answers; the guest's text does not change before the first function is hooked."""
        self._machine = machine
        self._kernel = kernel
        self._arch = arch
        self._sets = hook_sets
        self._calls = ReplacedCalls(arch, machine.memory)
        hook_sets.first.trampoline.on_install.append(self._install)

    def _install(self) -> None:
        """Put a permanent breakpoint on the function that this class replaces, if the kernel has it."""
        function = self._kernel.kallsyms.lookup_name(_FIND)
        if function is None:
            return
        try:
            go_on = self._copy_first_instruction(function)
        except (HardwareError, KernelError):
            # Without the copy, the kernel's stack dumps lack the callers of hooked calls.
            return
        _, _, address, pointer = self._arch.registers.arguments[:4]

        def asked(regs: Any) -> None:
            """If the unwinder asks about a trampoline of kprobefs, return the real return address to it.

            Otherwise run the kernel's own function.

            Mirrors: kernel/trace/fgraph.c:ftrace_graph_ret_addr (v6.1).
            """
            returned_to = getattr(regs, address)
            found = self._sets.caller_near(getattr(regs, pointer), returned_to)
            if found == returned_to:
                go_on(regs)
            else:
                self._calls.end(regs, found)

        self._machine.breakpoints[function] = asked
        self._machine.text.replace(function, self._arch.breakpoint)

    def _copy_first_instruction(self, function: int) -> Callable[[Any], None]:
        """Return a function that makes the CPU continue in `function` as without the breakpoint.

        Its argument is the registers.

        Raises: HardwareError (no executable memory is left), KernelError (the instruction can't be copied).
        """
        arch = self._arch
        text = self._machine.text
        slot = text.alloc_text(arch.max_insn_size)
        copy = arch.prepare(text.original(function, arch.max_insn_size), function, slot)
        if copy.emulate is not None:
            text.free_text(slot)
            return partial(_emulate, copy.emulate, self._machine.memory)
        text.poke(slot, copy.slot_bytes)
        after = function + copy.length
        self._machine.breakpoints[slot + copy.length] = Redirect(after, _go_to, after)
        return partial(_go_to, slot)


def _go_to(address: int, regs: Any) -> None:
    regs.ip = address


def _emulate(instruction: Emulation, memory: ByteMemory, regs: Any) -> None:
    instruction.run(regs, memory)
