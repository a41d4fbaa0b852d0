"""CurrentKprobe: the per-CPU variable by which compiled handlers find that a hit is within another hit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from emulated_kernel.arch.program.ir import BranchPerCpu, Condition, Label
from emulated_kernel.arch.program.ir_builder import ProgramBuilder
from emulated_kernel.machine.memory.record_memory import CELL_UNIT, RecordMemory
from emulated_kernel.machine.traps.trap import HardwareError

_TESTED_SIZE = 4
"""Number of bytes of the variable that guest code tests: the size of the smallest word of any guest."""


class CurrentKprobe:
    """A per-CPU variable in guest memory: 1 while the CPU runs guest code within a hit, else 0.

    Only hits of some probes run guest code in which other probes can be hit: handlers in C, and functions of
    jprobes. While there are no such probes, compiled handlers contain no check of the variable.
    Mirrors: kernel/kprobes.c:current_kprobe, include/linux/kprobes.h:kprobe_running (v6.1).
    """

    def __init__(self, records: RecordMemory) -> None:
        self._records = records
        self._owners: set[object] = set()
        self._offset: int | None = None
        self.words: Sequence[memoryview] = ()
        """CPU number -> view of the CPU's variable.

        Empty until a probe is registered whose hits run guest code.
        """

    @property
    def is_checked(self) -> bool:
        """Whether handlers must be compiled with a check of the variable."""
        return bool(self._owners)

    def set_owner(self, owner: object, runs_guest: bool) -> bool:
        """Set whether hits of `owner` run guest code in which other probes can be hit.

        `owner`: a probe, or an object that has several probes. Return True if `is_checked` has changed.
        """
        before = self.is_checked
        (self._owners.add if runs_guest else self._owners.discard)(owner)
        if self._owners and self._offset is None:
            self._allocate()
        return self.is_checked != before

    def _allocate(self) -> None:
        try:
            self._offset = self._records.alloc_percpu(CELL_UNIT)
        except HardwareError:
            return
        self.words = [cell.cast("Q") for cell in self._records.cells(self._offset, CELL_UNIT)]

    def emit_check(self, builder: ProgramBuilder, miss: Callable[[], object], done: Label) -> bool:
        """Emit code that, if the CPU is within a hit, calls `miss` in the host and then goes to `done`.

        Return False, with nothing emitted, if there is no memory for the variable. Then Python must handle
        the hits.
        """
        if self._offset is None:
            return False

        def missed() -> bool:
            miss()
            return False

        with builder.out_of_line() as within:
            # The action returns False, so that the host call continues at `done`.
            builder.call_host(missed, done)
        builder.emit(BranchPerCpu(Condition.NE, self._offset, _TESTED_SIZE, 0, within))
        return True
