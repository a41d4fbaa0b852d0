"""Djprobe: jumps that users request by a probe's `length`, and that commit_kprobes() writes.

Source: "Djprobe" (Ottawa Linux Symposium 2007), section 3. Unlike the optimizer, Djprobes
writes no jump by itself: a tool computes the length, and the user decides when commit_kprobes() is called.
"""

from __future__ import annotations

import errno
from contextlib import AbstractContextManager, nullcontext

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.analysis.reject_reason import Rejection
from emulated_kernel.kprobes.aggr_kprobe import AggrKprobe
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.optimizer.optimizer import Optimizer
from emulated_kernel.kprobes.profile import QuiesceMethod
from emulated_kernel.util.errors import KernelError


class Djprobes(Optimizer):
    """Optimizer that follows the rules of the djprobe paper: commit() writes the jumps.

    `optimizing` is the paper's registering_list, `freeing` its unregistering_list.
    """

    queued = "waits for commit_kprobes()"

    def wants(self, kprobe: Kprobe) -> bool:
        """Return True if the probe has a length; only such a probe is a djprobe."""
        return bool(kprobe.length)

    def ask(self, kprobe: Kprobe) -> str:
        """Request a jump: set the probe's length from the static analysis, as users of the paper's tool do.

        If the region already contains another probed address, clear the length, and return this as the reason
        why the probe gets no jump. Otherwise, return an empty string.

        Raises: KernelError EOPNOTSUPP (the analysis rejects a jump at the address), and the errors of
        resolve_region().
        """
        found = self._verdict.optimized_region(kprobe.address)
        if isinstance(found, Rejection):
            raise KernelError(errno.EOPNOTSUPP, found.text)
        kprobe.length = found.length
        return self.settle_length(kprobe)

    def settle_length(self, kprobe: Kprobe) -> str:
        """Clear the `length` of a probe that is about to be registered, if it gets no jump.

        It gets no jump if its region already contains another probed address. Return this as the reason, or
        an empty string if the probe gets a jump or has no `length`.

        Raises: KernelError (as resolve_region()).
        """
        region = self.resolve_region(kprobe)
        inner = None if region is None else self._probe_inside(region)
        if inner is None:
            return ""
        kprobe.length = 0
        place = self._verdict.place_text
        return f"{place(kprobe.address)}: a probe at {place(inner)} was in its region before"

    def resolve_region(self, kprobe: Kprobe) -> Region | None:
        """Return the region that a probe's jump would replace; None if the probe has no `length`.

        Deviates: the `length` is checked. The paper's kernel has no disassembler, so it cannot check it.
        Source: section 3.3.1.

        Raises: KernelError EEXIST (another djprobe's region covers the address), EINVAL (the static analysis
        allows no jump, or finds another length).
        """
        addr = kprobe.address
        if any(self.covering(addr)):
            raise KernelError(errno.EEXIST, f"{addr:#x} is in the detoured region of a djprobe")
        if not kprobe.length:
            return None
        found = self._verdict.optimized_region(addr)
        if isinstance(found, Rejection):
            raise KernelError(errno.EINVAL, f"length {kprobe.length}: {found.text}")
        if found.length != kprobe.length:
            told = f"the detoured region at {addr:#x} has {found.length} bytes"
            raise KernelError(errno.EINVAL, f"length {kprobe.length}: {told}")
        return found

    def _probe_inside(self, region: Region) -> int | None:
        """Return the last probed address in the region, or None if no probe is in the region.

        A probe at the region's first byte is not considered.
        """
        inner = range(region.end - 1, region.addr, -1)
        return next((addr for addr in inner if self._table.get(addr) is not None), None)

    def unoptimize(self, head: AggrKprobe, *, force: bool) -> None:
        """Remove the probe's jump at once, regardless of `force`. Source: section 3.6.2."""
        del force
        super().unoptimize(head, force=True)

    def free(self, head: AggrKprobe) -> None:
        """Free the resources of an AggrKprobe that has no registered probes left.

        If it has a detour, the resources are freed at the next commit, because CPUs may be in the detour.
        """
        if head.detour is not None and head not in self.freeing:
            self.freeing[head] = None
        else:
            super().free(head)

    def commit(self) -> None:
        """Write the jumps of registered djprobes and free the detours of unregistered ones.

        Raises: KernelError EBUSY (a task stays in a region or does not freeze; no text was changed).
        Source: section 3.4.
        """
        with self._all_at_known_places() as all_frozen:
            if not all_frozen:
                raise KernelError(errno.EBUSY, "not all tasks freeze; see machine/dmesg")
            if not self._write_if_quiescent():
                raise KernelError(errno.EBUSY, "a task stands in a detoured region or an out-of-line buffer")

    def _all_at_known_places(self) -> AbstractContextManager[bool]:
        """Return a context manager that brings all tasks to safe points.

        The context manager yields False if a task does not reach a safe point. Without preemption, one pass
        of each CPU through the scheduler is enough.
        Source: section 2.2.
        """
        if self._profile.djprobe is QuiesceMethod.FREEZE_PROCESSES:
            return self._scheduler.frozen()
        self._scheduler.yield_to_tasks()
        return nullcontext(True)

    def _write_if_quiescent(self) -> bool:
        """Write the queued jumps, free unused detours, and return True.

        Return False, with nothing done, if a CPU or task may be in the text that jumps replace, or in a
        detour.
        Deviates: the paper doesn't check this, but threads that don't freeze may be there.
        """
        if not self._scheduler.is_quiescent(self._affected()):
            return False
        self._optimize_all()
        self._free_all()
        return True

    def flush(self) -> None:
        """If jumps are queued, write them and free unused detours.

        If a CPU or task may be in the replaced text or in a detour, do nothing. Control files use this
        method in place of commit_kprobes(), because the tasks that write to them can't be frozen.
        """
        if self.optimizing:
            self._write_if_quiescent()

    def _kick(self) -> None:
        """Do nothing, because no delayed work writes the jumps; commit() and flush() do."""
