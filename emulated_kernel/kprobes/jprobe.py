"""Jprobe: a guest function with a probed function's signature, which sees its arguments where they lie.

Source: "Kernel Probes" (2010), section 1.2. Linux had it up to 4.14.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from emulated_kernel.abi import PAGE_SIZE
from emulated_kernel.arch.base import Arch, Registers
from emulated_kernel.errors import KernelError
from emulated_kernel.kprobes.batch import register_all
from emulated_kernel.kprobes.ctlblk import KprobeCtlblk
from emulated_kernel.kprobes.hit import HitHandling
from emulated_kernel.kprobes.kprobe import Kprobe, Regs
from emulated_kernel.machine.traps import MemoryFault

MAX_STACK_SIZE = 64
"""Bytes of the stack that are kept for the probed function, whose arguments its mirror may overwrite."""


class JprobeMemory(Protocol):
    def read(self, va: int, size: int, /) -> bytes: ...

    def write(self, va: int, data: bytes, /) -> None: ...


class JprobeText(Protocol):
    def alloc_text(self, size: int, /) -> int: ...

    def poke(self, va: int, data: bytes, /) -> None: ...


class JprobeMachine(Protocol):
    @property
    def memory(self) -> JprobeMemory: ...

    @property
    def text(self) -> JprobeText: ...

    @property
    def breakpoints(self) -> dict[int, Callable[[Any], None]]: ...


class Registry(Protocol):
    """Where the kprobes below jprobes are registered."""

    @property
    def hits(self) -> HitHandling: ...

    def locate(self, kprobe: Kprobe, /) -> tuple[int, bool]: ...

    def register_kprobe(self, kprobe: Kprobe, /) -> None: ...

    def unregister_kprobe(self, kprobe: Kprobe, /) -> None: ...

    def enable_kprobe(self, kprobe: Kprobe, /) -> None: ...

    def disable_kprobe(self, kprobe: Kprobe, /) -> None: ...


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
    """The jprobes of one kernel. Callers hold the kernel's control lock."""

    def __init__(self, registry: Registry, machine: JprobeMachine, arch: Arch) -> None:
        self._registry = registry
        self._memory = machine.memory
        self._registers = arch.registers
        self.jprobe_return = machine.text.alloc_text(len(arch.breakpoint))
        """Address that a mirror function jumps to or calls at its end."""
        machine.text.poke(self.jprobe_return, arch.breakpoint)
        machine.breakpoints[self.jprobe_return] = registry.hits.on_break

    def register_jprobe(self, jprobe: Jprobe) -> None:
        """Register a jprobe.

        Raises: KernelError as register_kprobe; EINVAL (not a function's entry), EEXIST (it has a jprobe).
        Mirrors: kernel/kprobes.c:register_jprobe (v4.14).
        """
        kp = jprobe.kp
        addr, on_entry = self._registry.locate(kp)
        if not on_entry:
            raise KernelError(errno.EINVAL, f"{addr:#x} is not the entry of a function")
        mirror = _Mirror(jprobe.entry, self._registers, self._memory, self._registry.hits.ctlblk)
        kp.pre_handler, kp.break_handler = mirror.enter, mirror.leave
        self._registry.register_kprobe(kp)

    def register_jprobes(self, jprobes: Sequence[Jprobe]) -> None:
        """Register all or none. Raises: as register_jprobe; EINVAL for an empty sequence."""
        register_all(jprobes, self.register_jprobe, self.unregister_jprobe)

    def unregister_jprobe(self, jprobe: Jprobe) -> None:
        """As unregister_kprobe."""
        self._registry.unregister_kprobe(jprobe.kp)

    def unregister_jprobes(self, jprobes: Sequence[Jprobe]) -> None:
        for jprobe in jprobes:
            self.unregister_jprobe(jprobe)

    def enable_jprobe(self, jprobe: Jprobe) -> None:
        """See Kprobes.enable_kprobe."""
        self._registry.enable_kprobe(jprobe.kp)

    def disable_jprobe(self, jprobe: Jprobe) -> None:
        """See Kprobes.disable_kprobe."""
        self._registry.disable_kprobe(jprobe.kp)


class _Mirror:
    """What a jprobe's kprobe does: enter the mirror function, and come back as if nothing had been.

    Mirrors: arch/x86/kernel/kprobes/core.c:setjmp_pre_handler, longjmp_break_handler (v4.14).
    """

    def __init__(self, entry: int, registers: Registers, memory: JprobeMemory, ctlblk: KprobeCtlblk) -> None:
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
