"""Why a probe is refused, or isn't in the best mode: a rule, and the address where it bites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from enum import Enum
from errno import EILSEQ, EINVAL, ENOENT, ENOSPC, EOPNOTSUPP

from emulated_kernel.dataclass import dataclass


class Reason(Enum):
    """The rules, in the words of the `reason` file."""

    # An enum's own is Python: millions of instructions are counted by reason.
    __hash__ = object.__hash__

    NO_SYMBOL = "no symbol contains the address"
    NOTRACE = "notrace function: no kprobe event may be placed in it"
    NOT_TEXT = "not kernel text"
    BLACKLISTED = "in the kprobe blacklist"
    JUMP_LABEL = "overlaps a jump label"
    STATIC_CALL = "overlaps a static call site"
    BUG = "the ud2 of a BUG() or WARN()"
    WITHIN_FENTRY = "within an fentry site"
    NOT_A_BOUNDARY = "not an instruction boundary"
    NOT_COPYABLE = "instruction can't be copied"
    NOT_EMULATED = "control transfer that can be neither stepped nor emulated"
    TOO_LONG = "no room for the breakpoint behind the instruction's copy"

    NOT_BUILT = "this kernel is built without jump optimization"
    FTRACE = "fentry site: ftrace calls the probe"
    ENTRY_TEXT = "entry text is never optimized: its stack isn't reliable"
    NO_ROOM = "less than a jump's length is left of the function"
    EXCEPTION_TABLE = "function has an exception table entry here: a fixup may jump into it"
    UNDECODABLE = "function isn't decodable from here on"
    INDIRECT_JUMP = "function has an indirect jump here"
    THUNK_JUMP = "function jumps into the indirect- or return-thunks here"
    JUMP_INTO_RANGE = "a jump here leads into the bytes to be replaced"
    JUMP_LABEL_INTO_RANGE = "a jump label here leads into the bytes to be replaced"
    FOREIGN_BRANCH = "a branch here, in another function, leads into the bytes to be replaced"
    FIXUP_INTO_RANGE = "an exception fixup leads from here into the bytes to be replaced"
    POINTER_INTO_RANGE = "a pointer here, as of a jump table, leads into the bytes to be replaced"
    NOT_BOOSTABLE = "instruction can't be executed in the detour buffer"
    NO_FREE_REGISTER = "no register is free for the jump to the detour"
    NO_FREE_REGISTER_BEHIND = "no register is free for the jump back from the detour"
    NOT_COPYABLE_TO_DETOUR = "instruction can't be copied into the detour buffer"
    RESERVED_BY_FTRACE = "the bytes to be replaced hold an fentry site"
    RESERVED_BY_JUMP_LABEL = "the bytes to be replaced hold a jump label"
    RESERVED_BY_STATIC_CALL = "the bytes to be replaced hold a static call site"

    BEYOND_FUNCTION = "no instruction of the function follows the detoured region"
    RELATIVE_IN_DCR = "detoured region holds an instruction that needs its address"
    PROHIBITED_IN_DCR = "detoured region holds a call or trap"


ERRNO = {
    Reason.NO_SYMBOL: ENOENT,
    Reason.NOTRACE: EINVAL,
    Reason.NOT_TEXT: EINVAL,
    Reason.BLACKLISTED: EINVAL,
    Reason.JUMP_LABEL: EINVAL,
    Reason.STATIC_CALL: EINVAL,
    Reason.BUG: EINVAL,
    Reason.WITHIN_FENTRY: EILSEQ,
    Reason.NOT_A_BOUNDARY: EILSEQ,
    Reason.NOT_COPYABLE: EINVAL,
    Reason.NOT_EMULATED: EOPNOTSUPP,
    Reason.TOO_LONG: ENOSPC,
}
"""What registering a probe returns; the other reasons leave it registered."""

OF_AN_INSTRUCTION = frozenset(
    {
        Reason.NOT_COPYABLE,
        Reason.NOT_EMULATED,
        Reason.TOO_LONG,
        Reason.EXCEPTION_TABLE,
        Reason.INDIRECT_JUMP,
        Reason.THUNK_JUMP,
        Reason.JUMP_INTO_RANGE,
        Reason.FOREIGN_BRANCH,
        Reason.NOT_BOOSTABLE,
        Reason.NOT_COPYABLE_TO_DETOUR,
        Reason.RELATIVE_IN_DCR,
        Reason.PROHIBITED_IN_DCR,
        Reason.NO_ROOM,
        Reason.UNDECODABLE,
        Reason.FIXUP_INTO_RANGE,
        Reason.JUMP_LABEL_INTO_RANGE,
        Reason.RESERVED_BY_FTRACE,
        Reason.RESERVED_BY_JUMP_LABEL,
        Reason.RESERVED_BY_STATIC_CALL,
    }
)
"""Those whose address is that of an instruction to blame."""
OF_REGISTERS = frozenset({Reason.NO_FREE_REGISTER, Reason.NO_FREE_REGISTER_BEHIND})
"""Those whose address is where none is free."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that holds, and where."""

    reason: Reason
    addr: int
    blamed: Callable[[int], str] | None = field(default=None, compare=False, repr=False)
    """Tells what is to blame at an address, where that is an instruction or a register."""

    @property
    def errno(self) -> int:
        """0 if the probe is registered all the same."""
        return ERRNO.get(self.reason, 0)

    @property
    def text(self) -> str:
        """One line, as in the `reason` file."""
        told = f"{self.addr:#x}: {self.reason.value}"
        return told if self.blamed is None else f"{told}: {self.blamed(self.addr)}"

    def __str__(self) -> str:
        return self.text
