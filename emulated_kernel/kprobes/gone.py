"""GoneCode: probes whose text is freed with its module, and new ones where they were."""

from __future__ import annotations

from collections.abc import Sequence

from emulated_kernel.kprobes.arming import Arming
from emulated_kernel.kprobes.kprobe import AggregatorProbe, Kprobe, KprobeFlag
from emulated_kernel.kprobes.optimizer import Optimizer
from emulated_kernel.kprobes.out_of_line import Copies
from emulated_kernel.kprobes.table import ProbeTable


class GoneCode:
    """Marks probes as gone, and takes from them what they held."""

    def __init__(
        self, table: ProbeTable, arming: Arming, copies: Copies, optimizer: Optimizer | None
    ) -> None:
        self._table = table
        self._arming = arming
        self._copies = copies
        self._optimizer = optimizer

    def kill_within(self, spans: Sequence[tuple[int, int]]) -> None:
        """Code is about to be freed: what is probed in the ranges [start, end) is gone.

        Mirrors: kernel/kprobes.c:kprobes_module_callback (v6.1).
        """
        for head in list(self._table):
            if any(start <= head.address < end for start, end in spans):
                self._kill(head)
        if self._optimizer is not None:
            self._optimizer.leave_text(spans)

    def _kill(self, head: Kprobe) -> None:
        """Linux: the text is left as it is. Mirrors: kernel/kprobes.c:kill_kprobe (v6.1)."""
        if head.is_ftrace and not head.is_disabled and not self._table.all_disarmed:
            self._arming.disarm(head)
        head.flags |= KprobeFlag.GONE
        if isinstance(head, AggregatorProbe):
            for member in head.members:
                member.flags |= KprobeFlag.GONE
                member.insn = None
            head.refresh_handlers()
            head.post_handler = None
            if self._optimizer is not None:
                self._optimizer.kill(head)
        self._copies.release(head)

    def revive(self, head: AggregatorProbe) -> None:
        """New code stands at the address of a gone probe, and is probed again.

        Raises: KernelError EILSEQ, ENOMEM, EINVAL, EOPNOTSUPP (as Copies.prepare). Mirrors: the part of
        kernel/kprobes.c:register_aggr_kprobe (v6.1) for gone ones.
        """
        if not head.is_ftrace:
            self._copies.prepare(head)
            if self._optimizer is not None and head.detour is None:
                self._optimizer.prepare(head)
        head.flags = head.flags & ~KprobeFlag.GONE | KprobeFlag.DISABLED
