"""How a probed instruction is replaced: the breakpoint that overwrites it, and its out-of-line copy."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

from emulated_kernel.arch.analysis.probe_rules import ProbeRules
from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.probe_checks import ProbeChecker
from emulated_kernel.image.text_tables import ProbedTables
from emulated_kernel.kprobes.aggr_kprobe import AggrKprobe
from emulated_kernel.kprobes.codegen.deferred_free import DeferredFree
from emulated_kernel.kprobes.codegen.guest_code import BreakpointKind, OutOfLine, breakpoint_kind
from emulated_kernel.kprobes.hit.breakpoint_dispatch import BreakpointDispatch
from emulated_kernel.kprobes.hit.insn_slots import InsnSlots
from emulated_kernel.kprobes.profile import Profile, Stepper
from emulated_kernel.machine.text.text import Text
from emulated_kernel.machine.text.text_poke import TextPoker
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass


@dataclass(frozen=True, eq=False)
class Breakpoints:
    """Writes and removes the breakpoints at probed addresses.

    Linux: on RISC-V, stop_machine() stops all CPUs during the write. Deviates: a breakpoint that CPUs may
    fetch in two parts is written in steps, like a jump.
    Mirrors: arch/*/kernel/**/kprobes.c:arch_arm_kprobe, arch_disarm_kprobe (v6.1).
    """

    _text: Text
    _arch: Arch
    _poker: TextPoker

    def set(self, *probes: AggrKprobe) -> None:
        self._write({probe.address: self._breakpoint(probe) for probe in probes})

    def clear(self, *probes: AggrKprobe) -> None:
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

    def _breakpoint(self, probe: AggrKprobe) -> bytes:
        insn = probe.insn
        return self._arch.breakpoint if insn is None else self._arch.breakpoint_for(insn.prepared.length)


class InsnCopier:
    """Copies probed instructions into insn slots.

    Mirrors: arch/x86/kernel/kprobes/core.c:arch_prepare_kprobe, arch_remove_kprobe (v6.1).
    """

    def __init__(
        self,
        text: Text,
        image: ProbedTables,
        verdict: ProbeChecker[Any],
        arch: Arch,
        routes: BreakpointDispatch,
        profile: Profile,
        rules: ProbeRules,
        garbage: DeferredFree,
    ) -> None:
        self._rules = rules
        self._text = text
        self._image = image
        self._verdict = verdict
        self._arch = arch
        self._routes = routes
        self._profile = profile
        lead = arch.trap_flag_lead if profile.stepper is Stepper.TRAP_FLAG else b""
        self._lead = len(lead)
        self.slots = InsnSlots(text, arch.max_insn_size, arch.breakpoint, garbage, lead)

    def prepare(self, head: AggrKprobe) -> None:
        """Check the probed instruction and make its out-of-line copy.

        Raises: KernelError ENOMEM (no memory for a slot), EILSEQ (not at an instruction, or at one that only
        raises an exception), EINVAL (the instruction cannot be copied, or another debugger has patched it),
        EOPNOTSUPP (it can be neither stepped nor emulated), ENOSPC (no room for the breakpoint after its
        copy).
        """
        addr = head.address
        where = self._image.kallsyms.lookup(addr)
        assert where is not None, "a registration has looked for the symbol"
        refused = self._verdict.check_prepare(where, addr)
        if refused is not None:
            raise KernelError(refused.errno, refused.text)
        code = self._text.original(addr, self._verdict.insn_size(where))
        slot = self.slots.get()
        try:
            prepared = self._arch.prepare(
                code, addr, slot, rules=self._rules, may_fault=addr in self._verdict.may_fault
            )
            self.check_unpatched(addr, prepared.length, code[: prepared.length])
        except KernelError:
            self.slots.give_back(slot)
            raise
        if prepared.emulate is not None:
            self.slots.give_back(slot)
            head.insn = OutOfLine(prepared, None)
        else:
            self._text.poke(slot, prepared.slot_bytes)
            head.insn = OutOfLine(prepared, slot, self._lead)
        self.boost_or_step(head)

    def check_unpatched(self, addr: int, size: int, code: bytes | None = None) -> None:
        """Check that no other debugger has patched the `size` bytes of text at `addr`.

        If a probe were armed there, disarming it would restore the other debugger's bytes. `code`: the text
        at `addr` without kprobefs's own patches; None if the caller has not read it.
        Raises: KernelError EINVAL (the text is patched).
        """
        if self._text.is_foreign(addr, size, code):
            raise KernelError(errno.EINVAL, f"{addr:#x}: another debugger has patched the instruction")

    def boost_or_step(self, head: AggrKprobe) -> None:
        """Write after the probe's copy: a jump back if it is boosted, else the breakpoint ending the step."""
        insn = head.insn
        if insn is None or insn.slot is None:
            return
        kind = breakpoint_kind(insn.prepared, self._profile, has_post_handler=head.has_post_handler)
        boosted = kind is BreakpointKind.BOOSTED
        if boosted == insn.boosted:
            return
        if self._routes.hits.is_underway:
            # A CPU in the middle of a step still needs the breakpoint that ends it.
            self._text.sync()
        end = insn.prepared.length
        tail = insn.prepared.slot_bytes[end:]
        if boosted:
            tail = self._arch.relative_jump(insn.slot + end, head.address + end)
        self._text.poke(insn.slot + end, tail)
        insn.boosted = boosted

    def release(self, head: AggrKprobe) -> None:
        """Free the probe's slot, and stop handling the probe's breakpoints."""
        self._routes.remove(head)
        insn = head.insn
        head.insn = None
        if insn is not None and insn.slot is not None:
            # A boosted copy is left without a trap, so that no state tells whether a task is preempted in it.
            dirty = insn.boosted or self._routes.hits.is_underway
            self.slots.free(insn.slot, dirty=dirty, on_free=lambda: self._routes.remove_step_end(insn))
