"""Detour regions: the instructions that a jump replaces, and the registers that are live or free at them."""

from __future__ import annotations

from emulated_kernel.arch.analysis.reject_reason import Rejection
from emulated_kernel.arch.analysis.tactic import Tactics
from emulated_kernel.util.fast_dataclass import ADDRESS, dataclass, field


@dataclass(frozen=True, slots=True)
class LiveRegisters:
    """Registers that the instruction at an address, or code that runs after it, may still read."""

    registers: frozenset[str]
    """pt_regs names of the live registers."""
    flags: bool
    """Whether any of the status flags is live."""


@dataclass(frozen=True, slots=True)
class ScratchRegisters:
    """Registers that the jumps of an optimized probe may overwrite, by pt_regs name."""

    entry: str
    """Register that is dead before the replaced instructions; the jump to the detour may overwrite it."""
    exit: str
    """Register that is dead after the replaced instructions, so that the jump back may overwrite it."""


@dataclass(frozen=True, slots=True)
class Region:
    """The detoured region (DCR) of a probe: the bytes that its jump covers.

    The region consists of whole instructions and, after them, of `kept` further bytes, which may end within
    an instruction.
    """

    addr: int = field(metadata=ADDRESS)
    code: bytes
    """Machine code of the region, with original bytes in place of those that probes have patched."""
    scratch: ScratchRegisters | None = None
    """Registers that the jumps to and from the detour overwrite; None if they overwrite no register."""
    padding: int = 0
    """Number of bytes before `end` that are never executed; the detour has no copy of them."""
    kept: int = 0
    """Number of bytes from `end` on that the jump includes unchanged, because other code leads to `end`."""
    tactics: Tactics = ()
    """The tactics that the jump needs; empty if Linux's rule allows the jump."""
    linux: Rejection | None = None
    """Linux's rejection of the jump, if the jump needs tactics; otherwise None."""

    @property
    def length(self) -> int:
        """Number of bytes from `addr` on that no other probe may patch while the jump is in place."""
        return len(self.code)

    @property
    def end(self) -> int:
        """The address after the replaced instructions, to which the detour buffer jumps back."""
        return self.addr + len(self.code) - self.kept
