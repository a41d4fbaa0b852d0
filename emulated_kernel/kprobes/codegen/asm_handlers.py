"""A probe's handlers in assembly: their machine code, and cells, which Python reads and writes by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from enum import Enum
from errno import EINVAL, ENOMEM
from typing import ClassVar

from emulated_kernel.arch.program.asm_source import CELL_SIZE, Assembler, SourceText
from emulated_kernel.arch.program.ir import AddToPerCpu, Jump, RunAssembly
from emulated_kernel.arch.program.ir_builder import ProgramBuilder
from emulated_kernel.machine.memory.record_memory import RecordMemory
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.util.errors import KernelError

_MASK = (1 << 8 * CELL_SIZE) - 1


class PerCpuVars(MutableMapping[str, int]):
    """The cells of one probe, by name: unsigned numbers of 64 bits, of each CPU one.

    Read as the sum of all CPUs', modulo 2**64; what is written is the first CPU's, and the others become 0.
    They can be set before the probe is registered, and keep their values when it isn't any more.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[int]] = {}
        self._live: dict[str, list[memoryview]] | None = None
        """Guest memory, while the probe is registered."""

    def per_cpu(self, name: str) -> list[int]:
        """Each CPU's. Raises: KeyError."""
        return list(self._values[name]) if self._live is None else [view[0] for view in self._live[name]]

    def __getitem__(self, name: str) -> int:
        return sum(self.per_cpu(name)) & _MASK

    def __setitem__(self, name: str, value: int) -> None:
        """Raises: KeyError (the code of a registered probe has no such cell)."""
        if self._live is None:
            self._values[name] = [value & _MASK]
            return
        for number, view in enumerate(self._live[name]):
            view[0] = 0 if number else value & _MASK

    def __delitem__(self, name: str) -> None:
        """Raises: KeyError, ValueError (the probe is registered)."""
        if self._live is not None:
            raise ValueError("the cells of a registered probe are in use")
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values if self._live is None else self._live)

    def __len__(self) -> int:
        return len(self._values if self._live is None else self._live)

    def attach(self, live: dict[str, list[memoryview]]) -> None:
        """Let them be guest memory, with the values that they have.

        Raises: KernelError EINVAL (one that isn't in the code).
        """
        for name in self._values:
            if name not in live:
                raise KernelError(EINVAL, f"the code has no cell {name}")
        for name, values in self._values.items():
            for view, value in zip(live[name], values, strict=False):
                view[0] = value
        self._live = live

    def detach(self) -> None:
        """Keep the values without the memory."""
        self._values = {name: self.per_cpu(name) for name in self}
        self._live = None


class HandlerPoint(Enum):
    """When a handler in assembly runs: the name of what has its text."""

    PRE = "code"
    POST = "post_code"
    RETURN = "return_code"


class AssembledHandlers:
    """The handlers in assembly of one registered probe, and the guest memory that is their cells'."""

    def __init__(
        self,
        texts: Mapping[HandlerPoint, str],
        assembler: Assembler,
        records: RecordMemory,
        cells: PerCpuVars,
    ) -> None:
        """Cells of one name are one cell.

        Raises: KernelError EINVAL (where a text is wrong, and why), ENOMEM (no room for cells).
        """
        sources = {moment: SourceText.parse(text, moment.value) for moment, text in texts.items()}
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
            cells.attach({name: self._views(at) for name, at in offsets.items()})
        except KernelError:
            self.free()
            raise

    def _views(self, offset: int) -> list[memoryview]:
        return [cell.cast("Q") for cell in self._records.cells(offset, CELL_SIZE)]

    def __contains__(self, moment: HandlerPoint) -> bool:
        return moment in self._assemblies

    @property
    def faults(self) -> int:
        """Hits whose code has ended at an instruction that faulted."""
        return sum(view[0] for view in self._views(self._faults))

    def reads(self, moment: HandlerPoint) -> frozenset[str]:
        """The registers whose values a handler needs; pt_regs names."""
        return self._assemblies[moment].reads

    def emit(self, builder: ProgramBuilder, moment: HandlerPoint) -> None:
        """Add what there is of a moment to a program. Where it faults, the rest of it isn't run."""
        assembly = self._assemblies.get(moment)
        if assembly is None:
            return
        done = builder.label()
        with builder.out_of_line() as on_fault:
            builder.emit(AddToPerCpu(self._faults, 1), Jump(done))
        builder.emit(RunAssembly(assembly, on_fault))
        builder.place(done)

    def detach(self) -> None:
        """The probe isn't registered any more; its cells keep their values."""
        self._cells.detach()

    def free(self) -> None:
        """Give the memory back, when no CPU runs the code any more."""
        self._records.free_percpu(self._faults)


class AssemblyOwner:
    """Has handlers in assembly, while it is registered."""

    __slots__ = ()

    handler_points: ClassVar[tuple[HandlerPoint, ...]] = ()
    """Those that it may have handlers in assembly for."""
    raised: int
    assembled: AssembledHandlers | None
    miss: Callable[[], None]
    """Counts a hit that isn't handled."""

    @property
    def failures(self) -> int:
        """Hits one of whose handlers raised or faulted, since it was registered."""
        return self.raised + (0 if self.assembled is None else self.assembled.faults)

    @property
    def texts(self) -> dict[HandlerPoint, str]:
        """Its handlers in assembly."""
        given = {moment: getattr(self, moment.value) for moment in self.handler_points}
        return {moment: text for moment, text in given.items() if text is not None}

    def emit_assembly(self, builder: ProgramBuilder, moment: HandlerPoint) -> None:
        """Add those of a moment, and nothing else, to a program."""
        if self.assembled is not None:
            self.assembled.emit(builder, moment)

    def miss_assembly(self, moment: HandlerPoint) -> None:
        """Count a hit without those of a moment."""
        if self.assembled is not None and moment in self.assembled:
            self.miss()
