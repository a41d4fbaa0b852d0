"""Handlers in assembly: their machine code, and their variables (cells), which Python accesses by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping
from enum import Enum
from errno import EINVAL, ENOMEM

from emulated_kernel.arch.program.asm_source import CELL_SIZE, Assembler, SourceText
from emulated_kernel.arch.program.ir import AddToPerCpu, Jump, RunAssembly
from emulated_kernel.arch.program.ir_builder import ProgramBuilder
from emulated_kernel.machine.memory.record_memory import RecordMemory
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.util.errors import KernelError

_MASK = (1 << 8 * CELL_SIZE) - 1


class PerCpuVars(MutableMapping[str, int]):
    """Map: name -> cell of a probe. Each cell has one unsigned 64-bit number per CPU.

    Reading a cell returns the sum over all CPUs modulo 2**64. Writing sets the first CPU's number to the
    value, and the other CPUs' numbers to 0. Cells can be set before the probe is registered, and keep their
    values after it is unregistered.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[int]] = {}
        self._live: dict[str, list[memoryview]] | None = None
        """Cell name -> a view of the cell in guest memory for each CPU. None: the probe isn't registered."""

    def per_cpu(self, name: str) -> list[int]:
        """Return the numbers in the cell `name`, one for each CPU. Raises: KeyError (no such cell).

        A cell that was set while the probe wasn't registered has one number until the probe is registered.
        """
        return list(self._values[name]) if self._live is None else [view[0] for view in self._live[name]]

    def __getitem__(self, name: str) -> int:
        return sum(self.per_cpu(name)) & _MASK

    def __setitem__(self, name: str, value: int) -> None:
        """Set the sum of the cell `name` to `value`.

        Raises: KeyError (the probe is registered, and its code has no such cell).
        """
        if self._live is None:
            self._values[name] = [value & _MASK]
            return
        for number, view in enumerate(self._live[name]):
            view[0] = 0 if number else value & _MASK

    def __delitem__(self, name: str) -> None:
        """Delete the cell `name`. Raises: KeyError (no such cell), ValueError (the probe is registered)."""
        if self._live is not None:
            raise ValueError("the cells of a registered probe are in use")
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values if self._live is None else self._live)

    def __len__(self) -> int:
        return len(self._values if self._live is None else self._live)

    def _attach(self, live: dict[str, list[memoryview]]) -> None:
        """Move the cells to guest memory, with their current values.

        `live`: name of a cell that the code uses -> for each CPU, a view of the cell's value in guest memory.
        Raises: KernelError EINVAL (the code doesn't use a cell that was set).
        """
        for name in self._values:
            if name not in live:
                raise KernelError(EINVAL, f"the code has no cell {name}")
        for name, values in self._values.items():
            for view, value in zip(live[name], values, strict=False):
                view[0] = value
        self._live = live

    def _detach(self) -> None:
        """Move the values of the cells from guest memory to Python, before the guest memory is freed."""
        self._values = {name: self.per_cpu(name) for name in self}
        self._live = None


class HandlerPoint(Enum):
    """Point of a hit at which a handler in assembly runs.

    The value is the name of the probe's attribute that has the handler's text.
    """

    PRE = "code"
    POST = "post_code"
    RETURN = "return_code"


_ATTRIBUTES = {point: point.value for point in HandlerPoint}


class AssembledHandlers:
    """The assembled handlers of one registered probe, and the guest memory of their per-CPU cells."""

    def __init__(
        self,
        texts: Mapping[HandlerPoint, str],
        assembler: Assembler,
        records: RecordMemory,
        cells: PerCpuVars,
    ) -> None:
        """Assemble `texts`: point of a hit -> text. Texts that name the same cell share the cell.

        `records` allocates the guest memory of the cells. `cells` holds the cells' initial values, and reads
        and writes the cells afterwards.
        Raises: KernelError EINVAL (an error in a text, with its position, or a cell that was set and that no
        text uses), ENOMEM (no room for cells).
        """
        sources = {
            moment: SourceText.parse(text, moment.value, assembler.comment) for moment, text in texts.items()
        }
        names = dict.fromkeys(name for source in sources.values() for name in assembler.cells(source))
        try:
            offset = records.alloc_percpu(CELL_SIZE * (1 + len(names)))
        except HardwareError as error:
            raise KernelError(ENOMEM, "no room for the cells of a handler") from error
        self._records = records
        self._cells = cells
        self._faults = offset
        offsets = {name: offset + CELL_SIZE * number for number, name in enumerate(names, 1)}
        try:
            self._assemblies = {
                moment: assembler.assemble(source, offsets) for moment, source in sources.items()
            }
            cells._attach({name: self._views(at) for name, at in offsets.items()})
        except KernelError:
            self.free()
            raise

    def _views(self, offset: int) -> list[memoryview]:
        return [cell.cast("Q") for cell in self._records.cells(offset, CELL_SIZE)]

    def __contains__(self, moment: HandlerPoint) -> bool:
        return moment in self._assemblies

    @property
    def faults(self) -> int:
        """Number of hits at which a handler in assembly ended at an instruction that faulted."""
        return sum(view[0] for view in self._views(self._faults))

    def reads(self, moment: HandlerPoint) -> frozenset[str]:
        """Return the pt_regs names of the registers that the probe's handler for `moment` reads.

        The probe must have such a handler.
        """
        return self._assemblies[moment].reads

    def emit(self, builder: ProgramBuilder, moment: HandlerPoint) -> None:
        """Add the handler in assembly for `moment` to a program, if the probe has such a handler.

        A fault skips the rest of the handler.
        """
        assembly = self._assemblies.get(moment)
        if assembly is None:
            return
        done = builder.label()
        with builder.out_of_line() as on_fault:
            builder.emit(AddToPerCpu(self._faults, 1), Jump(done))
        builder.emit(RunAssembly(assembly, on_fault))
        builder.place(done)

    def detach(self) -> None:
        """Copy the values of the cells to Python, because the probe was unregistered."""
        self._cells._detach()

    def free(self) -> None:
        """Free the guest memory of the cells and of the count of faults. No CPU may be in the handlers."""
        self._records.free_percpu(self._faults)


class FailureCount:
    """Base class of Kprobe and Fprobe that counts the failures of their handlers.

    A handler in Python fails if it raises an exception. A handler in assembly fails if it faults.
    """

    __slots__ = ()

    raised: int
    _assembled: AssembledHandlers | None

    @property
    def failures(self) -> int:
        """Number of hits since registration in which a handler raised or faulted."""
        return self.raised + (0 if self._assembled is None else self._assembled.faults)


class AssemblyOwner(ABC):
    """Interface of the engine's objects that have handlers in assembly."""

    __slots__ = ()

    @abstractmethod
    def emit_assembly(self, builder: ProgramBuilder, point: HandlerPoint) -> None:
        """Add the handlers in assembly for `point` to a program, and no other code."""

    @abstractmethod
    def miss_assembly(self, point: HandlerPoint) -> None:
        """Count a missed hit if the owner has a handler in assembly for `point`."""


def handler_texts(probe: object) -> dict[HandlerPoint, str]:
    """Return a probe's handlers in assembly: point of a hit -> text of the handler that runs there."""
    found = {}
    for point, name in _ATTRIBUTES.items():
        text = getattr(probe, name, None)
        if text is not None:
            found[point] = text
    return found
