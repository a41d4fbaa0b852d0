"""Jprobe: a function with a probed one's signature, which sees its arguments; in the guest, or in Python.

Source: "Kernel Probes" (2010), section 1.2. Linux had it up to 4.14.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from inspect import signature
from typing import Any

from emulated_kernel.arch.arch_hooks import Arch, Registers
from emulated_kernel.kprobes.hit.ctlblk import KprobeCtlblk
from emulated_kernel.kprobes.kprobe import Kprobe, PreHandler, Regs
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.machine.memory.guest_memory import GuestMemory
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.fast_dataclass import ADDRESS, dataclass

MAX_STACK_SIZE = 64
"""Bytes of the stack that are kept for the probed function, whose arguments its mirror may overwrite."""


JprobeHandler = Callable[..., object]


@dataclass(eq=False)
class Jprobe:
    """A probe on a function's entry: a function with the same signature is called before it.

    `handler` is such a function in Python. It gets as many arguments as it takes; each is a word. Instead,
    `entry` is the guest address of such a function. That function runs with interrupts off, and must end in a
    jump or call to Jprobes.jprobe_return. Give `symbol_name` or `addr`.

    Mirrors: include/linux/kprobes.h:struct jprobe (v4.14).
    """

    entry: int = field(default=0, metadata=ADDRESS)
    """Guest address of a function with the same signature."""
    handler: JprobeHandler | None = None
    """A function in Python with the same signature."""
    symbol_name: str | None = None
    """Name of the probed function."""
    addr: int | None = field(default=None, metadata=ADDRESS)
    """Address of the probed function."""
    kp: Kprobe = field(init=False)
    """The kprobe on the function's entry."""

    def __post_init__(self) -> None:
        self.kp = Kprobe(symbol_name=self.symbol_name, addr=self.addr)
        self.kp.kind = "j"


class Jprobes:
    """The jprobes of one kernel."""

    def __init__(self, kprobes: Kprobes, machine: ProbedMachine, arch: Arch) -> None:
        self._kprobes = kprobes
        self._memory = machine.memory
        self._registers = arch.registers
        self._word = arch.word_size
        self.jprobe_return = machine.text.alloc_text(len(arch.breakpoint))
        """Address that a mirror function jumps to or calls at its end."""
        machine.text.poke(self.jprobe_return, arch.breakpoint)
        machine.breakpoints[self.jprobe_return] = kprobes.hits.on_break

    def register_jprobe(self, jprobe: Jprobe) -> None:
        """Register a jprobe.

        Raises: KernelError (as register_kprobe), EINVAL (not a function's entry), EEXIST (it has a jprobe).
        Mirrors: kernel/kprobes.c:register_jprobe (v4.14).
        """
        kp = jprobe.kp
        self._kprobes.function_entry(kp)
        if jprobe.handler is not None:
            kp.pre_handler = self._calling(jprobe.handler)
            become_jprobe(kp)
        else:
            mirror = _Mirror(jprobe.entry, self._registers, self._memory, self._kprobes.hits.ctlblk)
            kp.pre_handler = mirror.enter
            kp.break_handler = mirror.leave
        self._kprobes.register_kprobe(kp)

    def _calling(self, handler: JprobeHandler) -> PreHandler:
        """Arguments beyond the registers lie on the stack, behind the return address if that is there."""
        count = len(signature(handler).parameters)
        names = self._registers.arguments[:count]
        memory = self._memory
        word = self._word
        first = 0 if self._registers.link is not None else word

        def enter(_kprobe: Kprobe, regs: Regs) -> None:
            start = getattr(regs, self._registers.sp) + first
            on_stack = range(start, start + word * (count - len(names)), word)
            handler(*(getattr(regs, name) for name in names), *map(memory.read_word, on_stack))

        return enter

    def unregister_jprobe(self, jprobe: Jprobe) -> None:
        """As unregister_kprobe."""
        self._kprobes.unregister_kprobe(jprobe.kp)


def become_jprobe(kprobe: Kprobe) -> None:
    """Let a kprobe on a function's entry, whose handler is no function of the guest's, count as a jprobe."""
    kprobe.kind = "j"
    kprobe.break_handler = _never_left_open


def _never_left_open(_kprobe: Kprobe, _regs: Regs) -> int:
    """A function has one jprobe, and no jump takes its breakpoint's place, whatever its handler is."""
    return 0


class _Mirror:
    """What a jprobe's kprobe does: enter the mirror function, and come back as if nothing had been.

    Mirrors: arch/x86/kernel/kprobes/core.c:setjmp_pre_handler, longjmp_break_handler (v4.14).
    """

    def __init__(self, entry: int, registers: Registers, memory: GuestMemory, ctlblk: KprobeCtlblk) -> None:
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
