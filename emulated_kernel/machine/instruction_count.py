"""InstructionCount: the number of instructions that a machine executes."""

from __future__ import annotations

from emulated_kernel.machine.unicorn_engine import CODE_CALLBACK, HOOK_CODE, Engine


class InstructionCount:
    """Counts the instructions of all later runs, breakpoints included. Counting slows these runs down."""

    def __init__(self, engine: Engine) -> None:
        self.value = 0
        """Number of instructions that were executed since the constructor."""
        engine.add_hook(HOOK_CODE, CODE_CALLBACK(self._count))
        # Translated code calls the hook only if it was translated after the hook was added.
        engine.flush_code()

    def _count(self, _engine: int, _address: int, _size: int, _data: int) -> None:
        self.value += 1
