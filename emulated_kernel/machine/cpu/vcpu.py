"""VCpu: a virtual CPU. The engine has the registers of the current CPU; all others are in saved contexts."""

from __future__ import annotations

from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.unicorn_engine import Engine


class VCpu:
    """A virtual CPU, whose state is saved in a context of Unicorn.

    All CPUs share one engine and run in turns.
    """

    def __init__(self, engine: Engine, cpu: CpuModel, number: int) -> None:
        self.number = number
        self._model = cpu
        self._engine = engine
        self._context = engine.context_alloc()

    def save(self) -> None:
        """Save the engine's CPU state in the context of this CPU."""
        self._engine.context_save(self._context)

    def restore(self) -> None:
        """Load the CPU state in this CPU's context into the engine."""
        self._engine.context_restore(self._context)

    def saved(self, name: str) -> int:
        """Return the saved value of the register called `name` in pt_regs.

        The value is only valid while another CPU is current.
        Raises: KeyError (no such register).
        """
        return self._engine.context_read(self._context, self._model.registers[name])

    def saved_register(self, register: int) -> int:
        """Return the saved value of the register with Unicorn's id `register`.

        The value is only valid while another CPU is current.
        """
        return self._engine.context_read(self._context, register)

    def put(self, name: str, value: int) -> None:
        """Set the register called `name` in the saved state of this CPU.

        The CPU must not be the current one.
        """
        self._engine.context_write(self._context, self._model.registers[name], value)

    @property
    def per_cpu_base(self) -> int:
        """Address of the per-CPU area; only valid while this CPU is current."""
        return self._engine.reg_read(self._model.per_cpu_register)

    @per_cpu_base.setter
    def per_cpu_base(self, address: int) -> None:
        self._engine.reg_write(self._model.per_cpu_register, address)
