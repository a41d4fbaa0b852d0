"""CpuWords: the per-CPU offsets by which guest code finds the running task, CPU number and preempt count."""

from __future__ import annotations

from collections.abc import Mapping

from emulated_kernel.arch.program.ir import (
    Arithmetic,
    BranchImmediate,
    BranchPerCpu,
    ComputeImmediate,
    Condition,
    GetRegister,
    Label,
    Load,
    LoadPerCpu,
    Op,
    SetImmediate,
)
from emulated_kernel.util.fast_dataclass import dataclass

_SIZE = 4
"""Size in bytes of the CPU's number and of the preempt count."""
_OF_TASK = "task_struct.thread_info"


@dataclass(frozen=True)
class CpuWords:
    """Locations of the running task, of the CPU's number and of the preempt count, as offsets in bytes.

    If a register holds the address of the running task_struct, the offsets are in task_struct. Otherwise they
    are in the CPU's per-CPU data.
    """

    word: int
    """Size of a pointer in bytes."""
    current_task: int | str
    """Per-CPU offset of the pointer to the running task_struct, or name of the register that holds it."""
    cpu_number: int
    preempt_count: int

    @classmethod
    def of(cls, abi: Mapping[str, int], register: str | None, word: int) -> CpuWords | None:
        """Return the locations in a kernel; None if `abi` lacks one of them.

        `abi`: name -> offset in bytes, for the kernel's structures and per-CPU variables. `register`: name of
        the register that holds the running task's address; None if a per-CPU variable holds it. `word`: size
        of a pointer in bytes.
        """
        if register is not None:
            current: int | str | None = register
            names = f"{_OF_TASK}.cpu", f"{_OF_TASK}.preempt_count"
        else:
            current = abi.get("percpu.current_task")
            names = "percpu.cpu_number", "percpu.preempt_count"
        number, count = map(abi.get, names)
        if current is None or number is None or count is None:
            return None
        return cls(word, current, number, count)

    @property
    def is_per_cpu(self) -> bool:
        """Whether the CPU's number and the preempt count are per-CPU data.

        Otherwise they are in the running task_struct, whose address is in a register.
        """
        return isinstance(self.current_task, int)

    def load_task(self, dst: int) -> Op:
        """Return an op that loads the address of the running task_struct into `dst`."""
        if isinstance(self.current_task, str):
            return GetRegister(dst, self.current_task)
        return LoadPerCpu(dst, self.current_task, self.word)

    def load_number(self, dst: int) -> tuple[Op, ...]:
        """Return ops that load the CPU's number into `dst`."""
        return self._load(dst, self.cpu_number)

    def load_count(self, dst: int) -> tuple[Op, ...]:
        """Return ops that load the preempt count into `dst`."""
        return self._load(dst, self.preempt_count)

    def _load(self, dst: int, offset: int) -> tuple[Op, ...]:
        if self.is_per_cpu:
            return (LoadPerCpu(dst, offset, _SIZE),)
        return self.load_task(dst), Load(dst, dst, offset, _SIZE)

    def branch_if_count(self, condition: Condition, value: int, label: Label, spare: int) -> tuple[Op, ...]:
        """Return ops that go to `label` if `condition` holds for the preempt count and `value`.

        The preempt count is the left operand. The ops may overwrite the virtual register `spare`.
        """
        if self.is_per_cpu:
            return (BranchPerCpu(condition, self.preempt_count, _SIZE, value, label),)
        return *self.load_count(spare), BranchImmediate(condition, spare, value, label)


def load_base(dst: int, own_offset: int | None, offset: int, word: int) -> tuple[Op, ...]:
    """Return ops that set `dst` to the address of the running CPU's per-CPU data at `offset`.

    `own_offset`: offset of the per-CPU word that contains the address of this CPU's per-CPU area. None: there
    is one CPU, and `offset` is an absolute address. `word`: size of a pointer in bytes.
    """
    if own_offset is None:
        return (SetImmediate(dst, offset),)
    return LoadPerCpu(dst, own_offset, word), ComputeImmediate(Arithmetic.ADD, dst, offset)
