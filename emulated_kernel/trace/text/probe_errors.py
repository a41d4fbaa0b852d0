"""Errors in the definition of a probe, and their entries in error_log."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from emulated_kernel.trace.text.error_log import CommandError, ErrorLog
from emulated_kernel.util.errors import KernelError


class ProbeError(CommandError):
    """Errors of probe definitions.

    Mirrors: kernel/trace/trace_probe.h ERRORS (v6.1, v6.12, v7.2, v7.3).
    """

    FILE_NOT_FOUND = "Failed to find the given file"
    NO_REGULAR_FILE = "Not a regular file"
    BAD_REFCNT = "Invalid reference counter offset"
    REFCNT_OPEN_BRACE = "Reference counter brace is not closed"
    BAD_REFCNT_SUFFIX = "Reference counter has wrong suffix"
    BAD_UPROBE_OFFS = "Invalid uprobe offset"
    BAD_FILE_OFFS = "Invalid file offset value"
    SYM_ON_UPROBE = "Symbol is not available with uprobe"
    MAXACT_NO_KPROBE = "Maxactive is not for kprobe"
    BAD_MAXACT_TYPE = "Maxactive is only for function exit"
    BAD_MAXACT = "Invalid maxactive number"
    MAXACT_TOO_BIG = "Maxactive is too big"
    BAD_PROBE_ADDR = "Invalid probed address or symbol"
    NON_UNIQ_SYMBOL = "The symbol is not unique"
    BAD_RETPROBE = "Retprobe address must be an function entry"
    NO_TRACEPOINT = "Tracepoint is not found"
    BAD_TP_NAME = "Invalid character in tracepoint name"
    BAD_ADDR_SUFFIX = "Invalid probed address suffix"
    NO_GROUP_NAME = "Group name is not specified"
    GROUP_TOO_LONG = "Group name is too long"
    BAD_GROUP_NAME = "Group name must follow the same rules as C identifiers"
    NO_EVENT_NAME = "Event name is not specified"
    EVENT_TOO_LONG = "Event name is too long"
    BAD_EVENT_NAME = "Event name must follow the same rules as C identifiers"
    EVENT_EXIST = "Given group/event name is already used by another event"
    RETVAL_ON_PROBE = "$retval is not available on probe"
    NO_RETVAL = "This function returns 'void' type"
    BAD_STACK_NUM = "Invalid stack number"
    BAD_ARG_NUM = "Invalid argument number"
    BAD_VAR = "Invalid $-variable specified", "Invalid $-valiable specified"
    BAD_REG_NAME = "Invalid register name"
    BAD_MEM_ADDR = "Invalid memory address"
    BAD_IMM = "Invalid immediate value"
    IMMSTR_NO_CLOSE = "String is not closed with '\"'"
    FILE_ON_KPROBE = (
        "File offset is not available with kprobe",
        "File offset is not available for kernel probes",
    )
    TOO_MANY_OPS = "Dereference is too much nested"
    DEREF_NEED_BRACE = "Dereference needs a brace"
    BAD_DEREF_OFFS = "Invalid dereference offset"
    DEREF_OPEN_BRACE = "Dereference brace is not closed"
    COMM_CANT_DEREF = "$comm can not be dereferenced"
    BAD_FETCH_ARG = "Invalid fetch argument"
    ARRAY_NO_CLOSE = "Array is not closed"
    BAD_ARRAY_SUFFIX = "Array has wrong suffix"
    BAD_ARRAY_NUM = "Invalid array size"
    ARRAY_TOO_BIG = "Array number is too big"
    BAD_TYPE = "Unknown type is specified"
    BAD_STRING = "String accepts only memory argument"
    BAD_SYMSTRING = "Symbol String doesn't accept data/userdata"
    BAD_BITFIELD = "Invalid bitfield"
    ARG_NAME_TOO_LONG = "Argument name is too long"
    NO_ARG_NAME = "Argument name is not specified"
    BAD_ARG_NAME = "Argument name must follow the same rules as C identifiers"
    USED_ARG_NAME = "This argument name is already used"
    ARG_TOO_LONG = "Argument expression is too long"
    NO_ARG_BODY = "No argument expression"
    BAD_INSN_BNDRY = "Probe point is not an instruction boundary"
    FAIL_REG_PROBE = "Failed to register probe event"
    DIFF_PROBE_TYPE = "Probe type is different from existing probe"
    DIFF_ARG_TYPE = "Argument type or name is different from existing probe"
    SAME_PROBE = "There is already the exact same probe event"
    EVENT_TOO_BIG = "Event too big (too many fields?)"
    NO_EVENT_INFO = "This requires both group and event name to attach"
    BAD_ATTACH_EVENT = "Attached event does not exist"
    BAD_ATTACH_ARG = "Attached event does not have this field"
    NO_EP_FILTER = "No filter rule after 'if'"
    NOSUP_BTFARG = "BTF is not available or not supported"
    NO_BTFARG = "This variable is not found at this probe point"
    NO_BTF_ENTRY = "No BTF entry for this probe point"
    NOFENTRY_ARGS = "$arg* can be used only on function entry or exit"
    DOUBLE_ARGS = "$arg* can be used only once in the parameters"
    ARGS_2LONG = "$arg* failed because the argument list is too long"
    NO_PTR_STRCT = "This is not a pointer to union/structure."
    NOSUP_DAT_ARG = "Non pointer structure/union argument is not supported."
    BAD_HYPHEN = "Failed to parse single hyphen. Forgot '>'?"
    NO_BTF_FIELD = "This field is not found."
    BAD_BTF_TID = "Failed to get BTF type info."
    BAD_TYPE4STR = "This type does not fit for string."
    NEED_STRING_TYPE = "$comm and immediate-string only accepts string type"
    TOO_MANY_ARGS = "Too many arguments are specified"
    TOO_MANY_EARGS = "Too many entry arguments specified"
    TYPECAST_NOT_EVENT = "Typecasts are only for eprobe fields"
    TYPECAST_REQ_FIELD = "Typecast requires a field access"
    TYPECAST_BAD_ARROW = "Typecast field option does not support -> operator"
    TYPECAST_NOT_ALIGNED = "Typecast field option is not byte-aligned"
    TYPECAST_SYM_OFFSET = "@SYM+/-OFFSET with typecast needs parentheses"
    TOO_MANY_NESTED = "Too many nested typecasts/dereferences"
    NOSUP_PERCPU = "Per-cpu variable access is only for kernel probes"
    NO_EVENT_FIELD = "This event field is not found."


class TraceProbeLog:
    """Log of the errors of a probe definition that is being parsed.

    The parser sets the attribute `index`: the index of the current word in the constructor's `argv`, the
    words of the command.

    Mirrors: kernel/trace/trace_probe.c:trace_probe_log (v6.1).
    """

    def __init__(self, error_log: ErrorLog, subsystem: str, argv: Sequence[str]) -> None:
        self._error_log = error_log
        self._subsystem = subsystem
        self._argv = argv
        self.index = 0

    def replace_arguments(self, words: Sequence[str]) -> None:
        """Replace the words of the command from the third word on, so that error_log shows the new words."""
        self._argv = [*self._argv[:2], *words]

    def error(self, offset: int, error: ProbeError, code: int = errno.EINVAL) -> KernelError:
        """Log `error` at byte `offset` of the current word, and return the exception that the caller raises.

        The current word is the one at self.index. If there is no such word, the caret points after the
        command. `code`: errno of the exception.
        """
        column = sum(len(word) + 1 for word in self._argv[: self.index])
        if self.index < len(self._argv):
            column += offset
        self._error_log.add(self._subsystem, " ".join(self._argv), error, column)
        return KernelError(code, self._error_log.text_of(error))
