"""Djprobe: jumps that the user asks for by a probe's `length`, and that commit_kprobes() writes.

Source: "Djprobe" (Ottawa Linux Symposium 2007), section 3. Unlike the optimizer, nothing is done later or by
itself: the length comes from a tool, and the user says when everybody may wait for the jumps.
"""

from __future__ import annotations

import errno
from contextlib import AbstractContextManager, nullcontext

from emulated_kernel.arch.analysis.reject_reason import Rejection
from emulated_kernel.kprobes.kprobe import AggrKprobe, Kprobe
from emulated_kernel.kprobes.optimizer.optimizer import Optimizer
from emulated_kernel.kprobes.profile import QuiesceMethod
from emulated_kernel.util.errors import KernelError


class Djprobes(Optimizer):
    """The optimizer's lists under the paper's rules: `optimizing` is its registering_list, `freeing` its
    unregistering_list.
    """

    queued = "waits for commit_kprobes()"

    def wants(self, kprobe: Kprobe) -> bool:
        """See Optimizer.wants: a probe without a length is no djprobe."""
        return bool(kprobe.length)

    def ask(self, kprobe: Kprobe) -> None:
        """See Optimizer.ask: what the paper's user does, who takes the length from the static analysis.

        Raises: KernelError EOPNOTSUPP (that says 0).
        """
        found = self._verdict.optimized_region(kprobe.address)
        if isinstance(found, Rejection):
            raise KernelError(errno.EOPNOTSUPP, found.text)
        kprobe.length = found.length
        self.check_conflicts(kprobe)

    def check_conflicts(self, kprobe: Kprobe) -> None:
        """What other probes mean for one that is about to be registered; its `length` may be cleared.

        Raises: KernelError EEXIST (another djprobe's region covers it), EINVAL (the length isn't what the
        static analysis says). Source: section 3.3.1. Deviates: there the length is believed, as that kernel
        has no disassembler.
        """
        addr = kprobe.address
        if any(self.covering(addr)):
            raise KernelError(errno.EEXIST, f"{addr:#x} is in the detoured region of a djprobe")
        kprobe.rejection = ""
        if not kprobe.length:
            return
        found = self._verdict.optimized_region(addr)
        if isinstance(found, Rejection):
            raise KernelError(errno.EINVAL, f"length {kprobe.length}: {found.text}")
        if found.length != kprobe.length:
            told = f"the detoured region at {addr:#x} has {found.length} bytes"
            raise KernelError(errno.EINVAL, f"length {kprobe.length}: {told}")
        for inner in range(addr + 1, found.end):
            if self._table.get(inner) is not None:
                kprobe.length = 0
                kprobe.rejection = f"0x{addr:x}: a probe at 0x{inner:x} was in its region before"

    def unoptimize(self, head: Kprobe, *, force: bool) -> None:
        """See Optimizer.unoptimize; always at once. Source: section 3.6.2."""
        del force
        super().unoptimize(head, force=True)

    def free(self, head: AggrKprobe) -> None:
        """Give back what a probe without members holds: at the next commit, for CPUs may be in its detour."""
        if head.detour is not None and head not in self.freeing:
            self.freeing[head] = None
        else:
            super().free(head)

    def commit(self) -> None:
        """Write the jumps of registered djprobes and free the detours of unregistered ones.

        Raises: KernelError EBUSY (a task stays where it is in the way, or doesn't freeze; nothing was done).
        Source: section 3.4.
        """
        with self._all_at_known_places() as all_frozen:
            if not all_frozen:
                raise KernelError(errno.EBUSY, "not all tasks freeze; see machine/dmesg")
            if not self._write_if_quiescent():
                raise KernelError(errno.EBUSY, "a task stands in a detoured region or an out-of-line buffer")

    def _all_at_known_places(self) -> AbstractContextManager[bool]:
        """Section 2.2: without preemption every CPU's trip through the scheduler is enough."""
        if self._profile.djprobe is QuiesceMethod.FREEZE_PROCESSES:
            return self._scheduler.frozen()
        self._scheduler.yield_to_tasks()
        return nullcontext(True)

    def _write_if_quiescent(self) -> bool:
        """Deviates: looks as well whether anybody is in the way, as threads that don't freeze may be."""
        if not self._scheduler.is_quiescent(self._affected()):
            return False
        self._optimize_all()
        self._free_all()
        return True

    def flush(self) -> None:
        """See Optimizer.flush: the files have no commit_kprobes(), and can't freeze who writes to them."""
        if self.optimizing:
            self._write_if_quiescent()

    def _kick(self) -> None:
        """Nothing happens before the commit."""
