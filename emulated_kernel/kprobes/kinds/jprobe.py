"""Jprobe: a handler with the signature of the probed function, in the guest or in Python.

Source: "Kernel Probes" (2010), section 1.2. Linux had jprobes up to 4.14.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from emulated_kernel.arch.arch_hooks import Arch, Registers
from emulated_kernel.kprobes.aggr_kprobe import JPROBE
from emulated_kernel.kprobes.hit.ctlblk import KprobeCtlblk
from emulated_kernel.kprobes.kprobe import Kprobe, PreHandler, Regs
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.machine.memory.guest_memory import GuestMemory
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.fast_dataclass import ADDRESS, dataclass, field

MAX_STACK_SIZE = 64
"""Maximum size in bytes of the part of the stack that is saved at entry, and restored afterwards.

The jprobe's function may overwrite its arguments on the stack.
"""


JprobeHandler: TypeAlias = Callable[..., object]
"""Function that takes the arguments of the probed function as integers."""


@dataclass(eq=False)
class Jprobe:
    """A probe on a function's entry: a function with the same signature is called before the probed function.

    `handler` is this function in Python. It gets as many arguments as it has parameters; each is a word. If
    the function is guest code instead, `entry` is its address. Guest code runs with interrupts off, and must
    end in a jump or call to Jprobes.jprobe_return. `symbol_name` or `addr` names the probed function.
    Mirrors: include/linux/kprobes.h:struct jprobe (v4.14).
    """

    entry: int = field(default=0, metadata=ADDRESS)
    """Guest address of a function with the signature of the probed function; 0 if `handler` is given."""
    handler: JprobeHandler | None = None
    """Python function that is called with the arguments of the probed function; None if `entry` is given."""
    symbol_name: str | None = None
    """Name of the probed function; None if `addr` is given."""
    addr: int | None = field(default=None, metadata=ADDRESS)
    """Address of the probed function; None if `symbol_name` is given."""
    kp: Kprobe = field(init=False)
    """The kprobe on the function's entry."""

    def __post_init__(self) -> None:
        self.kp = Kprobe(symbol_name=self.symbol_name, addr=self.addr)


class Jprobes:
    """The jprobes of one kernel."""

    def __init__(self, kprobes: Kprobes, machine: ProbedMachine, arch: Arch) -> None:
        self._kprobes = kprobes
        self._memory = machine.memory
        self._registers = arch.registers
        self._word = arch.word_size
        self.jprobe_return = machine.text.alloc_text(len(arch.breakpoint))
        """Address of the breakpoint that a jprobe's function in the guest jumps to, or calls, at its end."""
        machine.text.poke(self.jprobe_return, arch.breakpoint)
        machine.breakpoints[self.jprobe_return] = kprobes.hits.on_break

    def register_jprobe(self, jprobe: Jprobe) -> None:
        """Register a jprobe.

        Raises: KernelError (as register_kprobe), EINVAL (not a function's entry), EEXIST (the function has a
        jprobe).
        Mirrors: kernel/kprobes.c:register_jprobe (v4.14).
        """
        kp = jprobe.kp
        self._kprobes.places.function_entry(kp)
        if jprobe.handler is not None:
            kp.pre_handler = self._calling(jprobe.handler)
        else:
            mirror = _Mirror(jprobe.entry, self._registers, self._memory, self._kprobes.hits.ctlblk)
            kp.pre_handler = mirror.enter
            kp.break_handler = mirror.leave
        self._kprobes.register_kprobe(kp, JPROBE)

    def _calling(self, handler: JprobeHandler) -> PreHandler:
        """Return a pre_handler that calls `handler` with the probed function's arguments.

        The pre_handler reads the arguments that are not in registers from the stack. On x86, they are above
        the return address.
        """
        from inspect import signature

        count = len(signature(handler).parameters)
        names = self._registers.arguments[:count]
        memory = self._memory
        word = self._word
        first = 0 if self._registers.link is not None else word

        def enter(_kprobe: Kprobe, regs: Regs) -> None:
            start = getattr(regs, self._registers.sp) + first
            on_stack = range(start, start + word * (count - len(names)), word)
            stacked = [memory.read_word(at) for at in on_stack]
            handler(*(getattr(regs, name) for name in names), *stacked)

        return enter

    def unregister_jprobe(self, jprobe: Jprobe) -> None:
        """Disarm and forget a jprobe; see Kprobes.unregister_kprobe."""
        self._kprobes.unregister_kprobe(jprobe.kp)


class _Mirror:
    """Handlers of a jprobe's kprobe: enter the jprobe's function, which is guest code, and restore the state.

    Mirrors: arch/x86/kernel/kprobes/core.c:setjmp_pre_handler, longjmp_break_handler (v4.14).
    """

    def __init__(self, entry: int, registers: Registers, memory: GuestMemory, ctlblk: KprobeCtlblk) -> None:
        self._entry = entry
        self._registers = registers
        self._memory = memory
        self._ctlblk = ctlblk
        self._saved: dict[int, tuple[Any, bytes]] = {}
        """CPU number -> registers and stack saved at entry; several CPUs can be in the function at a time.
        """

    def enter(self, _kprobe: Kprobe, regs: Regs) -> int:
        """Save registers and stack, and make the guest continue at the jprobe's function.

        The method is the pre_handler of the jprobe's kprobe.
        """
        stack = self._read_stack(getattr(regs, self._registers.sp))
        self._saved[self._ctlblk.cpu] = regs.snapshot(), stack
        setattr(regs, self._registers.ip, self._entry)
        return 1

    def _read_stack(self, sp: int) -> bytes:
        try:
            return self._memory.read(sp, MAX_STACK_SIZE)
        except MemoryFault:
            return self._memory.read(sp, -sp % PAGE_SIZE)

    def leave(self, _kprobe: Kprobe, regs: Regs) -> int:
        """Restore registers and stack when the jprobe's function has reached jprobe_return.

        The method is the break_handler of the jprobe's kprobe.
        """
        saved, stack = self._saved.pop(self._ctlblk.cpu)
        regs.restore(saved)
        self._memory.write(getattr(regs, self._registers.sp), stack)
        return 1
