"""The hit state machine: from the breakpoint over the out-of-line step back into the probed code."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from emulated_kernel.arch.base import Arch, ByteMemory
from emulated_kernel.kprobes.kprobe import AggregatorProbe, Kprobe, Regs
from emulated_kernel.machine.traps import MemoryFault

_log = logging.getLogger(__name__)


class HitStatus(Enum):
    """Mirrors: include/asm-generic/kprobes.h KPROBE_HIT_*, KPROBE_REENTER."""

    ACTIVE = auto()
    SINGLE_STEP = auto()
    REENTER = auto()
    STEP_DONE = auto()


@dataclass
class KprobeCtlblk:
    """A CPU's probe state: which probe is being handled, and which one it interrupted.

    Mirrors: struct kprobe_ctlblk.
    """

    running: Kprobe | None = None
    status: HitStatus = HitStatus.STEP_DONE
    interrupted: list[tuple[Kprobe, HitStatus]] = field(default_factory=list)


class HitMachine(Protocol):
    """What handling a hit needs of the machine."""

    @property
    def breakpoints(self) -> dict[int, Callable[[Any], None]]: ...

    @property
    def memory(self) -> ByteMemory: ...

    def raise_fault(self, fault: MemoryFault, /) -> object: ...


class HitHandling:
    """Installs what runs when a CPU meets a probe's breakpoint or the end of its step.

    Mirrors: arch/x86/kernel/kprobes/core.c:kprobe_int3_handler (v6.1). Deviates: the interrupt flag
    isn't cleared around the step; instead `may_interrupt` keeps the machine from delivering one.
    """

    def __init__(self, machine: HitMachine, arch: Arch) -> None:
        self._machine = machine
        self._breakpoints = machine.breakpoints
        self._arch = arch
        self.ctlblk = KprobeCtlblk()
        self._failure: BaseException | None = None

    def report(self, kprobe: Kprobe, error: BaseException) -> None:
        """A handler raised: the hit goes on as if it had returned 0, and the first of a probe is logged.

        The guest can't be left in the middle of a hit, and the other handlers have a right to theirs.
        """
        kprobe.failures += 1
        self._failure = self._failure or error
        if kprobe.failures == 1:
            _log.error("a handler of the probe at %#x failed", kprobe.address, exc_info=error)

    def take_failure(self) -> BaseException | None:
        """What the first handler raised that failed since the last call, for a caller to raise."""
        failure, self._failure = self._failure, None
        return failure

    def may_interrupt(self) -> bool:
        """False from a hit until its step has ended: the slot's registers belong to nobody else."""
        return self.ctlblk.running is None

    def install(self, kprobe: Kprobe) -> None:
        """Route the breakpoint at the probe's address and, if it has a slot, the step's end."""
        insn = kprobe.insn
        assert insn is not None
        self._breakpoints[kprobe.address] = self._on_breakpoint(kprobe)
        if insn.step_end is not None:
            self._breakpoints[insn.step_end] = self._on_step_end(kprobe)

    def remove(self, kprobe: Kprobe) -> None:
        insn = kprobe.insn
        self._breakpoints.pop(kprobe.address, None)
        if insn is not None and insn.step_end is not None:
            self._breakpoints.pop(insn.step_end, None)

    def _on_breakpoint(self, kprobe: Kprobe) -> Callable[[Regs], None]:
        ctlblk = self.ctlblk
        resume = self._resume_for(kprobe)
        cost = kprobe.cost
        report = self.report

        def hit(regs: Regs) -> None:
            if ctlblk.running is not None:
                self._reenter(kprobe, regs, resume)
                return
            cost.start()
            ctlblk.running = kprobe
            ctlblk.status = HitStatus.ACTIVE
            pre_handler = kprobe.pre_handler
            if pre_handler is not None:
                try:
                    if pre_handler(kprobe, regs):
                        ctlblk.running = None
                        return
                except BaseException as error:
                    report(kprobe, error)
            resume(regs)

        return hit

    def _resume_for(self, kprobe: Kprobe) -> Callable[[Regs], None]:
        """How the probed instruction is run: a jump into the slot, or emulation on the spot."""
        assert kprobe.insn is not None
        ctlblk, slot, prepared = self.ctlblk, kprobe.insn.slot, kprobe.insn.prepared

        if slot is not None:

            def step(regs: Regs) -> None:
                if ctlblk.status is not HitStatus.REENTER:
                    ctlblk.status = HitStatus.SINGLE_STEP
                regs.ip = slot

            return step

        emulation = prepared.emulate
        assert emulation is not None, "an instruction without a slot is emulated"

        def emulate(regs: Regs) -> None:
            try:
                self._arch.emulate(emulation, regs, self._machine.memory)
            except MemoryFault as fault:
                # What the emulated instruction would have met: its own page fault, at its own place.
                regs.ip = kprobe.address
                self.forget_step()
                self._machine.raise_fault(fault)
                return
            self._post_process(kprobe, regs)

        return emulate

    def _on_step_end(self, kprobe: Kprobe) -> Callable[[Regs], None]:
        assert kprobe.insn is not None
        next_ip = kprobe.address + kprobe.insn.prepared.length

        def stepped(regs: Regs) -> None:
            regs.ip = next_ip
            self._post_process(kprobe, regs)

        return stepped

    def _post_process(self, kprobe: Kprobe, regs: Regs) -> None:
        """Mirrors: arch/x86/kernel/kprobes/core.c:kprobe_post_process (v6.1)."""
        ctlblk = self.ctlblk
        if ctlblk.status is HitStatus.REENTER:
            ctlblk.running, ctlblk.status = ctlblk.interrupted.pop()
            return
        if kprobe.post_handler is not None:
            ctlblk.status = HitStatus.STEP_DONE
            try:
                kprobe.post_handler(kprobe, regs)
            except BaseException as error:
                self.report(kprobe, error)
        ctlblk.running = None
        kprobe.cost.stop()

    def _reenter(self, kprobe: Kprobe, regs: Regs, resume: Callable[[Regs], None]) -> None:
        """A hit inside a handler: only counted as missed, its instruction is run all the same.

        Mirrors: arch/x86/kernel/kprobes/core.c:reenter_kprobe (v6.1).
        """
        ctlblk = self.ctlblk
        assert ctlblk.running is not None
        count_missed(kprobe)
        ctlblk.interrupted.append((ctlblk.running, ctlblk.status))
        ctlblk.running = kprobe
        ctlblk.status = HitStatus.REENTER
        resume(regs)

    def fix_fault(self, _trap: object, regs: Regs) -> bool:
        """A fault while stepping: let it look as if the original instruction had faulted.

        False: the guest gets the fault, at the address where `regs` stands now.
        Mirrors: arch/x86/kernel/kprobes/core.c:kprobe_fault_handler (v6.1).
        """
        running = self.ctlblk.running
        if running is None or running.insn is None or regs.ip != running.insn.slot:
            return False
        regs.ip = running.address
        self.forget_step()
        return False

    def abandon(self) -> None:
        """The run that hits may stand in the middle of has been given up: none of them goes on."""
        self.ctlblk.interrupted.clear()
        self.ctlblk.running = None

    def forget_step(self) -> None:
        """Leave the current hit without its step's end: it faulted, or its task was killed."""
        ctlblk = self.ctlblk
        if ctlblk.status is HitStatus.REENTER:
            ctlblk.running, ctlblk.status = ctlblk.interrupted.pop()
        else:
            ctlblk.running = None


def count_missed(kprobe: Kprobe) -> None:
    """Mirrors: kernel/kprobes.c:kprobes_inc_nmissed_count (v6.1)."""
    if isinstance(kprobe, AggregatorProbe):
        for member in kprobe.members:
            member.nmissed += 1
    else:
        kprobe.nmissed += 1
