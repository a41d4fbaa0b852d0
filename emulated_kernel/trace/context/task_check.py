"""TaskCheck: per-CPU memory from which guest code learns whether the lists of pids exclude a task."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.machine.memory.record_memory import CELL_UNIT, RecordMemory
from emulated_kernel.trace.context.probe_hit import Tasks

PID_SIZE = 4
"""Size of a pid in bytes."""
_NO_PID = 0xFFFFFFFF


class TaskCheck:
    """Two pids for each CPU: that of the last task that the lists allow, and of the last that they exclude.

    For all other tasks, guest code asks the host, so the code does not depend on the members of the lists.
    Linux checks the lists when a CPU switches to another task, and stores only the result for this task.
    Mirrors: kernel/trace/trace.h:struct trace_array_cpu, ignore_pid,
    kernel/trace/trace_events.c:ignore_task_cpu (v6.1).
    """

    def __init__(self, cells: RecordMemory, tasks: Tasks, ignores: Callable[[int], bool]) -> None:
        """Allocate the two pids of each CPU.

        `ignores`: returns True for the pid of a task whose events are not recorded.

        Raises: HardwareError (the per-CPU memory is used up).
        """
        self._tasks = tasks
        self._ignores = ignores
        self._cells = cells
        offset = cells.alloc_percpu(CELL_UNIT)
        self.recorded = offset
        """Per-CPU offset of the pid of the last task whose events were found to be recorded."""
        self.excluded = offset + PID_SIZE
        """Per-CPU offset of the pid of the last task that the lists were found to exclude."""
        self._pids = [cell.cast("I") for cell in cells.cells(offset, CELL_UNIT)]
        self.forget()

    def forget(self) -> None:
        """Forget the host's answers, because the lists have changed. Guest code then asks the host again."""
        for pids in self._pids:
            pids[0] = pids[1] = _NO_PID

    def release(self) -> None:
        """Free the memory of the pids. Precondition: guest code no longer uses them."""
        self._cells.free_percpu(self.recorded)

    def is_recorded(self) -> bool:
        """Return True if the current task's events are recorded, and store the answer for guest code."""
        pid = self._tasks.pid()
        is_excluded = self._ignores(pid)
        self._pids[self._tasks.cpu()][is_excluded] = pid
        return not is_excluded
