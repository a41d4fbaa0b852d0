"""Arming: the breakpoint, call or jump of a probe comes into the text, or goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from emulated_kernel.arch.base import Arch
from emulated_kernel.kprobes.ftrace import FtraceSites
from emulated_kernel.kprobes.kprobe import AggregatorProbe, Kprobe
from emulated_kernel.kprobes.optimizer import Optimizer
from emulated_kernel.kprobes.table import ProbeTable
from emulated_kernel.kprobes.text_poke import TextPoker


class ArmedText(Protocol):
    def poke_batch(self, pokes: Iterable[tuple[int, bytes]], /) -> None: ...

    def sync(self) -> None: ...

    def original(self, va: int, size: int, /) -> bytes: ...


class Breakpoints:
    """Writes and takes back the breakpoint at a probed address.

    Linux: on RISC-V under stop_machine(). Deviates: a breakpoint that CPUs may fetch in two parts is written
    in steps, as a jump is. Mirrors: arch/*/kernel/**/kprobes.c:arch_arm_kprobe, arch_disarm_kprobe (v6.1).
    """

    def __init__(self, text: ArmedText, arch: Arch, poker: TextPoker) -> None:
        self._text = text
        self._arch = arch
        self._poker = poker

    def set(self, *probes: Kprobe) -> None:
        self._write({probe.address: self._breakpoint(probe) for probe in probes})

    def clear(self, *probes: Kprobe) -> None:
        original = self._text.original
        self._write(
            {probe.address: original(probe.address, len(self._breakpoint(probe))) for probe in probes}
        )

    def _write(self, insns: Mapping[int, bytes]) -> None:
        size = len(self._arch.breakpoint)
        longer = {va: insn for va, insn in insns.items() if len(insn) > size}
        if len(longer) < len(insns):
            self._text.poke_batch((va, insn) for va, insn in insns.items() if va not in longer)
            self._text.sync()
        if longer:
            self._poker.replace_all(longer)

    def _breakpoint(self, probe: Kprobe) -> bytes:
        insn = probe.insn
        return self._arch.breakpoint if insn is None else self._arch.breakpoint_for(insn.prepared.length)


class Arming:
    """Arms and disarms one probe, or all. Mirrors: kernel/kprobes.c (v6.1)."""

    def __init__(
        self,
        table: ProbeTable,
        breakpoints: Breakpoints,
        sites: FtraceSites | None,
        optimizer: Optimizer | None,
        log: Callable[[str], None],
    ) -> None:
        self._table = table
        self._breakpoints = breakpoints
        self._sites = sites
        self._optimizer = optimizer
        self._log = log

    def arm(self, head: Kprobe) -> None:
        """Mirrors: arm_kprobe, __arm_kprobe (v6.1)."""
        if self._sites is not None and head.is_ftrace:
            self._sites.arm(head)
            return
        self._uncover(head)
        # Linux: a jump that was about to be taken back gets a breakpoint over it for good, and counts as
        # optimized. Deviates: it stays.
        if not (isinstance(head, AggregatorProbe) and head.is_patched):
            self._breakpoints.set(head)
        if self._optimizer is not None:
            self._optimizer.optimize(head)

    def _uncover(self, head: Kprobe) -> None:
        """Take back a jump that lies over the probed address, or would soon."""
        if self._optimizer is not None:
            for covering in self._optimizer.covering(head.address):
                self._optimizer.unoptimize(covering, force=True)

    def disarm(self, head: Kprobe) -> None:
        """Mirrors: disarm_kprobe, __disarm_kprobe (v6.1)."""
        optimizer = self._optimizer
        if self._sites is not None and head.is_ftrace:
            self._sites.disarm(head)
        elif optimizer is None:
            self._breakpoints.clear(head)
        else:
            optimizer.unoptimize(head, force=False)
            # Queued: the worker disarms it. Linux: a probe that this one kept from its jump stays without,
            # for when it is asked about, this one isn't marked as disabled yet.
            if not optimizer.is_queued(head):
                self._breakpoints.clear(head)

    def arm_all(self) -> None:
        """Arm every probe that isn't disabled. Mirrors: kernel/kprobes.c:arm_all_kprobes (v6.1)."""
        if not self._table.all_disarmed:
            return
        self._table.all_disarmed = False
        enabled = [head for head in self._table if not head.is_disabled]
        # Nothing is optimized while all is disarmed, so that no breakpoint gets into a jump.
        self._breakpoints.set(*[head for head in enabled if not head.is_ftrace])
        if self._sites is not None:
            self._sites.arm_all([head for head in enabled if head.is_ftrace])
        if self._optimizer is not None:
            for head in enabled:
                if not head.is_ftrace:
                    self._optimizer.optimize(head)
        self._log("kprobes: Kprobes globally enabled")

    def disarm_all(self) -> None:
        """Disarm every probe. Mirrors: kernel/kprobes.c:disarm_all_kprobes (v6.1)."""
        if self._table.all_disarmed:
            return
        self._table.all_disarmed = True
        enabled = [head for head in self._table if not head.is_disabled]
        if self._sites is not None:
            self._sites.disarm_all([head for head in enabled if head.is_ftrace])
        if self._optimizer is not None:
            for head in enabled:
                if not head.is_ftrace:
                    self._optimizer.unoptimize(head, force=True)
        self._breakpoints.clear(*[head for head in enabled if not head.is_ftrace])
        if self._optimizer is not None:
            self._optimizer.flush()
        self._log("kprobes: Kprobes globally disabled")
