"""Jprobe: a guest function with a probed function's signature, which sees its arguments where they lie.

Source: "Kernel Probes" (2010), section 1.2. Linux had it up to 4.14.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from emulated_kernel.abi import PAGE_SIZE
from emulated_kernel.arch.base import Arch, Registers
from emulated_kernel.kprobes.ctlblk import KprobeCtlblk
from emulated_kernel.kprobes.kprobe import Kprobe, Regs
from emulated_kernel.kprobes.kprobes import Kprobes
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.memory.memory import Memory
from emulated_kernel.machine.traps.trap import MemoryFault

MAX_STACK_SIZE = 64
"""Bytes of the stack that are kept for the probed function, whose arguments its mirror may overwrite."""


@dataclass(eq=False)
class Jprobe:
    """A probe on a function's entry: `entry` is the guest address of a function with the same signature.

    It must end in a jump or call to Jprobes.jprobe_return, and runs with interrupts off. Give `symbol_name`
    or `addr`. Mirrors: include/linux/kprobes.h:struct jprobe (v4.14).
    """

    entry: int
    symbol_name: str | None = None
    addr: int | None = None
    kp: Kprobe = field(init=False)

    def __post_init__(self) -> None:
        self.kp = Kprobe(symbol_name=self.symbol_name, addr=self.addr)
        self.kp.kind = "j"


class Jprobes:
    """The jprobes of one kernel."""

    def __init__(self, kprobes: Kprobes, machine: Machine, arch: Arch) -> None:
        self._kprobes = kprobes
        self._memory = machine.memory
        self._registers = arch.registers
        self.jprobe_return = machine.text.alloc_text(len(arch.breakpoint))
        """Address that a mirror function jumps to or calls at its end."""
        machine.text.poke(self.jprobe_return, arch.breakpoint)
        machine.breakpoints[self.jprobe_return] = kprobes.hits.on_break

    def register_jprobe(self, jprobe: Jprobe) -> None:
        """Register a jprobe.

        Raises: KernelError as register_kprobe; EINVAL (not a function's entry), EEXIST (it has a jprobe).
        Mirrors: kernel/kprobes.c:register_jprobe (v4.14).
        """
        kp = jprobe.kp
        self._kprobes.function_entry(kp)
        mirror = _Mirror(jprobe.entry, self._registers, self._memory, self._kprobes.hits.ctlblk)
        kp.pre_handler, kp.break_handler = mirror.enter, mirror.leave
        self._kprobes.register_kprobe(kp)

    def unregister_jprobe(self, jprobe: Jprobe) -> None:
        """As unregister_kprobe."""
        self._kprobes.unregister_kprobe(jprobe.kp)


class _Mirror:
    """What a jprobe's kprobe does: enter the mirror function, and come back as if nothing had been.

    Mirrors: arch/x86/kernel/kprobes/core.c:setjmp_pre_handler, longjmp_break_handler (v4.14).
    """

    def __init__(self, entry: int, registers: Registers, memory: Memory, ctlblk: KprobeCtlblk) -> None:
        self._entry = entry
        self._registers = registers
        self._memory = memory
        self._ctlblk = ctlblk
        self._saved: dict[int, tuple[Any, bytes]] = {}
        """Registers and stack of each CPU: one in the mirror may have to wait for another one."""

    def enter(self, _kprobe: Kprobe, regs: Regs) -> int:
        """The kprobe's pre_handler."""
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
        """The kprobe's break_handler, at jprobe_return."""
        saved, stack = self._saved.pop(self._ctlblk.cpu)
        regs.restore(saved)
        self._memory.write(getattr(regs, self._registers.sp), stack)
        return 1
