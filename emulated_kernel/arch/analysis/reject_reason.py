"""Rejections: which rule refuses a probe or its optimization, and which address breaks the rule."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from errno import EILSEQ, EINVAL, ENOENT, ENOSPC, EOPNOTSUPP
from typing import Self

from emulated_kernel.util.fast_dataclass import ADDRESS, dataclass, field


class RejectSubject(Enum):
    """The item that a rejection's text names in addition to the rule: the instruction, or a register."""

    INSN = auto()
    REGISTER = auto()
    """The rejection names a register that isn't free at the address."""


class RejectReason(Enum):
    """Rules that forbid a probe or its jump; the values are texts of the `reason` file."""

    # Enum's own __hash__ is Python code and too slow: coverage counts millions of instructions by reason.
    __hash__ = object.__hash__
    errno: int
    """Errno with which registering the probe fails; 0 if the probe can be registered, but not optimized."""
    about: RejectSubject | None

    def __new__(cls, text: str, errno: int = 0, about: RejectSubject | None = None) -> Self:
        reason = object.__new__(cls)
        reason._value_ = text
        reason.errno = errno
        reason.about = about
        return reason

    NO_SYMBOL = "no symbol contains the address", ENOENT
    NOTRACE = "notrace function: no kprobe event may be placed in it", EINVAL
    NOT_TEXT = "not kernel text", EINVAL
    BLACKLISTED = "in the kprobe blacklist", EINVAL
    JUMP_LABEL = "overlaps a jump label", EINVAL
    STATIC_CALL = "overlaps a static call site", EINVAL
    BUG = "the ud2 of a BUG() or WARN()", EINVAL
    WITHIN_FENTRY = "within an fentry site", EILSEQ
    NOT_A_BOUNDARY = "not an instruction boundary", EILSEQ
    AT_FENTRY = "fentry site: only ftrace patches it on this architecture", EINVAL
    NOT_ALIGNED = "not aligned to an instruction", EINVAL
    HAS_FIXUP = "instruction has an exception table entry", EINVAL, RejectSubject.INSN
    IN_EXCLUSIVE = "between an exclusive load and its store", EINVAL, RejectSubject.INSN
    EXCEPTION_INSN = "instruction only raises an exception", EILSEQ, RejectSubject.INSN
    NOT_COPYABLE = "instruction can't be copied", EINVAL, RejectSubject.INSN
    NOT_EMULATED = "control transfer that can be neither stepped nor emulated", EOPNOTSUPP, RejectSubject.INSN
    TOO_LONG = "no room for the breakpoint after the instruction's copy", ENOSPC, RejectSubject.INSN

    NOT_BUILT = "this kernel is built without jump optimization"
    FTRACE = "fentry site: ftrace calls the probe"
    ENTRY_TEXT = "entry text is never optimized: its stack isn't reliable"
    REGION_TOO_SHORT = "less than a jump's length is left of the function", 0, RejectSubject.INSN
    EXCEPTION_TABLE = (
        "function has an exception table entry here: a fixup may jump into it",
        0,
        RejectSubject.INSN,
    )
    UNDECODABLE = "function isn't decodable from here on", 0, RejectSubject.INSN
    INDIRECT_JUMP = "function has an indirect jump here", 0, RejectSubject.INSN
    THUNK_JUMP = "function jumps into the indirect- or return-thunks here", 0, RejectSubject.INSN
    JUMP_INTO_RANGE = "a jump here leads into the bytes to be replaced", 0, RejectSubject.INSN
    JUMP_LABEL_INTO_RANGE = "a jump label here leads into the bytes to be replaced", 0, RejectSubject.INSN
    FOREIGN_BRANCH = (
        "a branch here, in another function, leads into the bytes to be replaced",
        0,
        RejectSubject.INSN,
    )
    FIXUP_INTO_RANGE = (
        "an exception fixup leads from here into the bytes to be replaced",
        0,
        RejectSubject.INSN,
    )
    POINTER_INTO_RANGE = "a pointer here, as of a jump table, leads into the bytes to be replaced"
    ADDRESS_INTO_RANGE = (
        "an instruction may take the address of one of the bytes to be replaced here",
        0,
        RejectSubject.INSN,
    )
    NOT_BOOSTABLE = "instruction can't be executed in the detour buffer", 0, RejectSubject.INSN
    NO_FREE_REGISTER = "no register is free for the jump to the detour", 0, RejectSubject.REGISTER
    NO_FREE_REGISTER_AFTER = (
        "no register is free for the jump back from the detour",
        0,
        RejectSubject.REGISTER,
    )
    NOT_COPYABLE_TO_DETOUR = "instruction can't be copied into the detour buffer", 0, RejectSubject.INSN
    RESERVED_BY_FTRACE = "the bytes to be replaced hold an fentry site", 0, RejectSubject.INSN
    RESERVED_BY_JUMP_LABEL = "the bytes to be replaced hold a jump label", 0, RejectSubject.INSN
    RESERVED_BY_STATIC_CALL = "the bytes to be replaced hold a static call site", 0, RejectSubject.INSN
    EXCEPTION_ENTRY = (
        "the bytes to be replaced hold an instruction with an exception table entry",
        0,
        RejectSubject.INSN,
    )
    CALL_BEFORE_END = "a call that isn't the last of the replaced instructions", 0, RejectSubject.INSN
    JUMP_TO_START = "a replaced jump leads back to the probe", 0, RejectSubject.INSN
    CODE_AFTER_JUMP = (
        "the bytes to be replaced hold code that follows a jump or return",
        0,
        RejectSubject.INSN,
    )
    DELAYS_INTERRUPTS = (
        "the instruction after this one must follow it, and would not be in the detour",
        0,
        RejectSubject.INSN,
    )

    LANDING_PAD = (
        "an indirect branch may lead to this landing pad, and must not lead to a jump",
        0,
        RejectSubject.INSN,
    )
    NO_PUN = "code leads here, and the bytes here leave no address for the detour", 0, RejectSubject.INSN

    BEYOND_FUNCTION = "no instruction of the function follows the detoured region"
    RELATIVE_IN_DCR = "detoured region holds an instruction that needs its address", 0, RejectSubject.INSN
    PROHIBITED_IN_DCR = "detoured region holds a call or trap", 0, RejectSubject.INSN


@dataclass(frozen=True, slots=True)
class Rejection:
    """A rule that refuses a probe or its optimization, and the address that breaks the rule."""

    reason: RejectReason
    addr: int = field(metadata=ADDRESS)
    describe: Callable[[Rejection], str] | None = field(default=None, compare=False, repr=False)
    """Function that returns the text of the rejection, with symbols in place of numbers.

    The value is None if the text can show only the number of the address.
    """

    @property
    def errno(self) -> int:
        """Errno with which registration fails; 0 if the probe can be registered, but not optimized."""
        return self.reason.errno

    @property
    def text(self) -> str:
        """The rejection in one line, as in the `reason` file."""
        return f"{self.addr:#x}: {self.reason.value}" if self.describe is None else self.describe(self)

    def __str__(self) -> str:
        return self.text
