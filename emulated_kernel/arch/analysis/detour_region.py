"""What is found out about a place in the text: what a jump would replace, and what is live there."""

from __future__ import annotations

from emulated_kernel.util.fast_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class LiveRegisters:
    """What the probed code may still read from an address on."""

    registers: frozenset[str]
    """pt_regs names."""
    flags: bool
    """Whether any of the status flags is live."""


@dataclass(frozen=True, slots=True)
class ScratchRegisters:
    """Registers that the jumps of an optimized probe may overwrite, by pt_regs name."""

    entry: str
    """Dead in front of the replaced instructions."""
    exit: str
    """Dead behind them."""


@dataclass(frozen=True, slots=True)
class Region:
    """The detoured region (DCR) of a probe: the whole instructions that its jump replaces."""

    addr: int
    code: bytes
    """Its instructions as they are without probes."""
    scratch: ScratchRegisters | None = None
    """None where the jumps overwrite nothing."""

    @property
    def length(self) -> int:
        """Bytes."""
        return len(self.code)

    @property
    def end(self) -> int:
        """Where the detour buffer jumps back to."""
        return self.addr + len(self.code)
