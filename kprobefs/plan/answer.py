"""The answers of a kernel to lines of a definitions file, and the warnings about them."""

from __future__ import annotations

from emulated_kernel.trace.probes.trace_kprobe import TraceKprobe
from emulated_kernel.util.fast_dataclass import dataclass, field
from kprobefs.definitions.syntax import Line

PENDING = "pending"
"""Outcome of a probe whose module is not loaded."""
UNCHECKED = "unchecked"
"""Outcome of a line that cannot be checked fully.

Such a line defines an event of another kind than kprobe events, probes a module that cannot be read, or sets
a value.
"""
ACCEPTED = "accepted"
"""Outcome of a setting whose value the kernel takes."""
REMOVED = "removed"
"""Outcome of a line that removes events."""
WARNINGS = {
    "type-size": "A fetch argument reads fewer or more bits than the value has.",
    "type-sign": "A fetch argument shows a signed value as unsigned, or an unsigned value as signed.",
    "no-parameter": "A fetch argument $argN reads a register or stack word that no parameter takes.",
    "no-result": "A fetch argument $retval reads the result of a function that has none.",
    "no-member": "A fetch argument reads a structure at an offset at which no member begins.",
    "no-pointer": "A fetch argument dereferences a value whose type is no pointer.",
    "no-place": "A definition has no place, or a source line as its place.",
    "other-function": "The offset leads out of the named function, into another one.",
    "not-unique": "The symbol names several functions, and the kernel probes only the first of them.",
    "boot-address": "The place is an address, and KASLR moves the kernel at each boot.",
    "name-cut": "The event's name is cut at the kernel's limit.",
    "changed-parameters": "A fetch argument $argN reads a parameter that the compiler may have changed.",
    "other-calls": "Callers may call functions that the compiler made from the probed one instead.",
    "no-event": "A setting names an event that neither the kernel nor a line before has.",
    "no-function": "A setting names a function that the kernel does not have, or that ftrace cannot trace.",
    "needs-module": "The kernel refuses the definition while the module of its place is not loaded.",
    "no-module": "A definition waits for a module that does not come with the kernel.",
    "never-returns": "The function of a return probe never returns.",
    "no-records": "The kernel counts the probe's hits, but records none of them.",
    "other-instruction": "The same symbol and offset is another instruction in some of the kernels.",
    "other-parameter": "A parameter or result has another name or type in some of the kernels.",
    "other-member": "The same offset is another member in some of the kernels.",
    "patched-by-ftrace": "The kernel accepts the probe at an instruction that ftrace patches.",
    "takes-jump": "A probe lies in the instructions that the jump of another probe would replace.",
}
"""Name of each warning -> its meaning."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An error or a warning about a line of a definitions file."""

    rule: str
    """Name of the rule that was violated: a name in error_log's table, an errno, or a key of WARNINGS."""
    is_error: bool
    message: str
    column: int | None = None
    """Column in the line's text, from 0 on; None if the finding is about the whole line."""


@dataclass(frozen=True, slots=True)
class Read:
    """The parameter and the members that a fetch argument reads, for a comparison with other kernels."""

    arg: str
    """Name of the fetch argument."""
    column: int
    """Column of the fetch argument in the line, from 0 on."""
    base: str
    """The parameter or result from which the argument starts, as the argument names it, such as `$arg1`."""
    declared: str
    """Declaration of the parameter or result in C."""
    kind: tuple[str, str]
    """(name of the parameter, name of its type), for a comparison with other kernels; see type_kind()."""
    members: tuple[frozenset[str], ...]
    """For each dereference, as far as types are known, the names of the members that begin at its offset."""
    size: int
    """Number of bytes that the argument reads; 0 if it reads a text or an array."""
    value_size: int
    """Size in bytes of the parameter, result or last member; 0 if it is unknown."""


@dataclass(slots=True)
class Answer:
    """A kernel's answer to a line that is written to kprobe_events, with errors and warnings."""

    line: Line
    outcome: str
    """Value of ProbeOutcome, PENDING, UNCHECKED, ACCEPTED or REMOVED.

    If the kernel refuses the line, the name of the errno.
    """
    reason: str = ""
    """Reason why the probe is not optimized, or why it is pending; "" if there is nothing to explain."""
    findings: list[Finding] = field(default_factory=list)
    region: range = range(0)
    """Addresses of the instructions that the probe's jump replaces; empty if there is no jump."""
    breakpoint_kind: str | None = None
    """How a breakpoint at the place executes the instruction: a value of BreakpointKind.

    An optimized probe has one, too, for the time before its jump is written. None if there is no breakpoint.
    """
    traps_at_return: bool = False
    """Whether the probe is a return probe whose trampoline has a breakpoint, so that returns trap."""
    address: int = 0
    """The probed address; 0 if there is no probe."""
    insn: str = ""
    """The probed instruction as text; "" if the place is a symbol without offset, or if there is no probe."""
    probe: TraceKprobe | None = None
    """The probe that the line has created; None if it has created none."""
    reads: list[Read] = field(default_factory=list)
    """One Read for each fetch argument that starts from a known parameter or the result, in their order."""
    unloaded: str = ""
    """Outcome while the modules of the file's places (MODULE:SYMBOL) are not loaded.

    "" if it equals `outcome`.
    """
    extended: str | None = None
    """Outcome under the policy PlannedKernel.strategy; None if there is no such policy or no probe."""
    extended_reason: str = ""
    """The tactics that the jump needs under PlannedKernel.strategy, or the rule by which it is refused.

    A tactic is a way to place a jump that Linux refuses. "" if there is nothing to explain.
    """

    @property
    def is_error(self) -> bool:
        """Whether the kernel refuses the line."""
        return any(finding.is_error for finding in self.findings)
