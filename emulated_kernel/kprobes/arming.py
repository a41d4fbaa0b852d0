"""Arming: writes a probe's breakpoint, call or jump into the text, and removes it.

When text is freed, the module marks the probes in it as gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from emulated_kernel.kprobes.aggr_kprobe import AggrKprobe
from emulated_kernel.kprobes.hit.breakpoint_dispatch import BreakpointDispatch
from emulated_kernel.kprobes.hit.ftrace import FtraceSites
from emulated_kernel.kprobes.hit.insn_copy import Breakpoints, InsnCopier
from emulated_kernel.kprobes.kprobe import KprobeFlag
from emulated_kernel.kprobes.optimizer.optimizer import Optimizer
from emulated_kernel.kprobes.table import ProbeTable
from emulated_kernel.util.fast_dataclass import dataclass


@dataclass(frozen=True, eq=False)
class Arming:
    """Arms and disarms one probe or all probes, and releases the resources of probes in freed text.

    Mirrors: kernel/kprobes.c (v6.1).
    """

    _table: ProbeTable
    _routes: BreakpointDispatch
    _breakpoints: Breakpoints
    _sites: FtraceSites | None
    _optimizer: Optimizer | None
    _copies: InsnCopier
    _log: Callable[[str], None]

    def arm(self, head: AggrKprobe) -> None:
        """Arm the probes of one address. Mirrors: kernel/kprobes.c:arm_kprobe, __arm_kprobe (v6.1)."""
        if self._sites is not None and head.is_ftrace:
            self._sites.arm([head])
            return
        self._routes.install(head)
        self._uncover(head)
        # Linux: a jump that is queued for removal is overwritten with a breakpoint, which stays. The probe
        # counts as optimized.
        # Deviates: the jump stays.
        optimizer = self._optimizer
        is_stopped = optimizer is not None and head in optimizer.stages
        if not head.is_patched and not is_stopped:
            self._breakpoints.set(head)
        if optimizer is not None:
            optimizer.optimize(head)

    def _uncover(self, head: AggrKprobe) -> None:
        """Remove other probes' jumps that cover the probed address, and cancel such jumps that are queued."""
        if self._optimizer is not None:
            for covering in self._optimizer.covering(head.address):
                self._optimizer.unoptimize(covering, force=True)

    def disarm(self, head: AggrKprobe) -> None:
        """Disarm the probes of one address.

        Mirrors: kernel/kprobes.c:disarm_kprobe, __disarm_kprobe (v6.1).
        """
        optimizer = self._optimizer
        if self._sites is not None and head.is_ftrace:
            self._sites.disarm([head])
        elif optimizer is None:
            self._breakpoints.clear(head)
        else:
            optimizer.unoptimize(head, force=False)
            # If the probe is queued, the worker disarms it.
            # Linux: another probe whose jump this probe has prevented stays without a jump, because this
            # probe is not marked as disabled yet at the check for a jump.
            if not optimizer.is_queued(head):
                self._breakpoints.clear(head)

    def arm_all(self) -> None:
        """Undo disarm_all(): arm every probe that is not disabled.

        Do nothing if disarm_all() was not called before.

        Mirrors: kernel/kprobes.c:arm_all_kprobes (v6.1).
        """
        if not self._table.all_disarmed:
            return
        self._table.all_disarmed = False
        called, trapping = self._enabled()
        for head in trapping:
            self._routes.install(head)
        # Nothing is optimized while all probes are disarmed, so no breakpoint is written into a jump.
        self._breakpoints.set(*trapping)
        if self._sites is not None:
            self._sites.arm(called)
        if self._optimizer is not None:
            for head in trapping:
                self._optimizer.optimize(head)
        self._log("kprobes: Kprobes globally enabled")

    def disarm_all(self) -> None:
        """Disarm every probe. Until arm_all() is called, no probe is armed.

        Mirrors: kernel/kprobes.c:disarm_all_kprobes (v6.1).
        """
        if self._table.all_disarmed:
            return
        self._table.all_disarmed = True
        called, trapping = self._enabled()
        if self._sites is not None:
            self._sites.disarm(called)
        if self._optimizer is not None:
            for head in trapping:
                self._optimizer.unoptimize(head, force=True)
        if trapping:
            self._breakpoints.clear(*trapping)
        if self._optimizer is not None:
            self._optimizer.stages.finish()
            self._optimizer.flush()
            # Linux: probes that wait to be freed keep their breakpoints until the worker runs.
            # Deviates: a hit would call the handlers of a probe that is registered there meanwhile.
            waiting = [head for head in self._optimizer.freeing if head.is_disabled and not head.is_gone]
            if waiting:
                self._breakpoints.clear(*waiting)
        self._log("kprobes: Kprobes globally disabled")

    def _enabled(self) -> tuple[list[AggrKprobe], list[AggrKprobe]]:
        """Return two lists of the enabled entries: first those that fentry sites call, then all others."""
        called: list[AggrKprobe] = []
        trapping: list[AggrKprobe] = []
        for head in self._table:
            if not head.is_disabled:
                (called if head.is_ftrace else trapping).append(head)
        return called, trapping

    # Text of unloaded modules

    def kill_within(self, spans: Sequence[tuple[int, int]]) -> None:
        """Mark as gone the probes in the address ranges `spans`, because the code is about to be freed.

        Each range has a start and an exclusive end.
        Mirrors: kernel/kprobes.c:kprobes_module_callback (v6.1).
        """
        for head in list(self._table):
            if any(start <= head.address < end for start, end in spans):
                self._kill(head)
        if self._optimizer is not None:
            self._optimizer.leave_text(spans)

    def _kill(self, head: AggrKprobe) -> None:
        """Mark the probes of one address as gone. As in Linux, restore only the text of an fentry site.

        Mirrors: kernel/kprobes.c:kill_kprobe (v6.1).
        """
        if head.is_ftrace and not head.is_disabled and not self._table.all_disarmed:
            self.disarm(head)
        head.flags |= KprobeFlag.GONE
        for kprobe in head.members:
            kprobe.flags |= KprobeFlag.GONE
        head.enabled_members = 0
        head.refresh_handlers()
        head.has_post_handler = False
        if self._optimizer is not None:
            self._optimizer.kill(head)
        self._copies.release(head)

    def revive(self, head: AggrKprobe) -> None:
        """Prepare the entry of gone probes for new code at their address; the entry becomes disabled.

        Raises: the errors of InsnCopier.prepare().
        Mirrors: the part of kernel/kprobes.c:register_aggr_kprobe (v6.1) for gone probes.
        """
        if not head.is_ftrace:
            self._copies.prepare(head)
            if self._optimizer is not None and head.detour is None:
                self._optimizer.prepare(head)
        head.flags = head.flags & ~KprobeFlag.GONE | KprobeFlag.DISABLED
