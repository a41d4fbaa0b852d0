"""Expansion of arguments before their parsing: `$arg*`, `$argN`, and the types `%pd` and `%pD`."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from typing import Protocol

from emulated_kernel.trace.interface import Interface, InterfaceRule
from emulated_kernel.trace.text.numbers import is_digit
from emulated_kernel.trace.text.probe_errors import ProbeError, TraceProbeLog
from emulated_kernel.util.errors import KernelError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from emulated_kernel.image.linux.btf import Btf
    from emulated_kernel.trace.fetch.btf_args import ProbedFunction

MAX_BTF_ARGS_LEN = 128
"""Size in bytes of Linux's buffer for the names that replace `$arg*` and `$argN`.

Each name takes a NUL in addition.
"""
MAX_DENTRY_ARGS_LEN = 256
"""Size in bytes of Linux's buffer for arguments of the types %pd and %pD; each takes a NUL in addition."""
_META = "$arg"
_DENTRY_TYPES = (":%pd", ":%pD")


class ExpansionContext(Protocol):
    """Interface of the data about a probe that the expansion of its arguments needs."""

    @property
    def log(self) -> TraceProbeLog: ...
    @property
    def interface(self) -> Interface: ...
    @property
    def btf(self) -> Btf | None: ...
    @property
    def in_kernel(self) -> bool: ...
    @property
    def on_event(self) -> bool: ...
    @property
    def has_parameters(self) -> bool: ...
    @property
    def prototype(self) -> ProbedFunction | None: ...


def expand_meta_args(words: Sequence[str], context: ExpansionContext) -> Sequence[str]:
    """Replace the word `$arg*` by all parameters' names, and a leading `$argN` by the name of parameter N.

    Return the new words. Without BTF for the function, `$argN` stays.
    Raises: KernelError EINVAL or ENOENT (a wrong word, or no such parameter), EOPNOTSUPP (`$arg*` without
    BTF), E2BIG (the names are too long); all are logged.
    Mirrors: kernel/trace/trace_probe.c:traceprobe_expand_meta_args (v6.12).
    """
    log = context.log
    star = _star(words, context)
    if star is None:
        return words
    function = context.prototype
    if function is None or not function.parameters:
        if star >= 0:
            raise log.error(0, ProbeError.NOSUP_BTFARG, errno.EOPNOTSUPP)
        return words
    names = _Names(function, log)
    expanded: list[str] = []
    for number, word in enumerate(words):
        log.index = number + 2
        if number == star:
            expanded += [names.take(index, "") for index in range(len(function.parameters))]
        elif word.startswith(_META):
            expanded.append(_one(word, names, log))
        else:
            expanded.append(word)
    return expanded


def _star(words: Sequence[str], context: ExpansionContext) -> int | None:
    """Return the index of the word `$arg*`, -1 if only `$argN` occurs, or None if neither does.

    Raises: KernelError EINVAL (the probe cannot have parameters, or a wrong or second `$arg*`; logged).
    Mirrors: kernel/trace/trace_probe.c:argv_has_var_arg (v6.12).
    """
    found: int | None = None
    for number, word in enumerate(words):
        if not word.startswith(_META):
            continue
        context.log.index = number + 2
        if not context.has_parameters:
            raise context.log.error(0, ProbeError.NOFENTRY_ARGS)
        if is_digit(word, len(_META)):
            found = -1 if found is None else found
        elif word[len(_META) :][:1] != "*":
            raise context.log.error(0, ProbeError.BAD_VAR)
        elif found is not None and found >= 0:
            raise context.log.error(0, ProbeError.DOUBLE_ARGS)
        else:
            found = number
    return found


class _Names:
    """The names of a function's parameters, and the number of bytes left for them in Linux's buffer."""

    def __init__(self, function: ProbedFunction, log: TraceProbeLog) -> None:
        self._function = function
        self._log = log
        self._room = MAX_BTF_ARGS_LEN

    def take(self, index: int, type_name: str) -> str:
        """Return the name of parameter `index`, from 0, followed by `type_name` (`:TYPE` or "").

        Subtract the length of the result from the bytes left in Linux's buffer.
        Raises: KernelError ENOENT (no such parameter), E2BIG (no room); both are logged.
        """
        parameters = self._function.parameters
        if index >= len(parameters):
            raise self._log.error(0, ProbeError.NO_BTFARG, errno.ENOENT)
        name, _ = parameters[index]
        text = name + type_name
        if len(text) >= self._room:
            raise self._log.error(0, ProbeError.ARGS_2LONG, errno.E2BIG)
        self._room -= len(text) + 1
        return text


def _one(word: str, names: _Names, log: TraceProbeLog) -> str:
    """Return the replacement of `word`, which is `$argN[:TYPE]`: the name of parameter N with `:TYPE`.

    Raises: KernelError EINVAL (N is 0), ENOENT (a wrong word, or no such parameter), E2BIG (the names are too
    long); all are logged.
    """
    digits = re.match("[0-9]*", word[len(_META) :])
    assert digits is not None, "it may match nothing"
    number = int(digits[0] or "0")
    type_name = word[len(_META) + digits.end() :]
    if type_name[:1] not in ("", ":"):
        raise log.error(0, ProbeError.BAD_VAR, errno.ENOENT)
    if not number:
        raise log.error(0, ProbeError.BAD_ARG_NUM)
    return names.take(number - 1, type_name)


def expand_dentry_args(words: Sequence[str], btf: Btf | None) -> Sequence[str]:
    """Replace each `[NAME=]ARG:%pd` or `[NAME=]ARG:%pD` by dereferences that read a file's name.

    Return the new words.

    Raises: KernelError ENOMEM (the new words are too long for Linux's buffer), EOPNOTSUPP (the kernel has
    no BTF, so the fields' offsets are unknown).
    Mirrors: kernel/trace/trace_probe.c:traceprobe_expand_dentry_args (v6.12).
    """
    room = MAX_DENTRY_ARGS_LEN
    expanded: list[str] = []
    for word in words:
        if word.endswith(_DENTRY_TYPES):
            if btf is None:
                raise KernelError(
                    errno.EOPNOTSUPP, f"{word}: the kernel has no BTF; dereference with offsets"
                )
            text = _dentry(word, btf)
            if len(text) >= room:
                raise KernelError(errno.ENOMEM, f"{word}: the arguments with %pd and %pD are too long")
            room -= len(text) + 1
            expanded.append(text)
        else:
            expanded.append(word)
    return expanded


def _dentry(word: str, btf: Btf) -> str:
    body = word[: -len(_DENTRY_TYPES[0])]
    name, equals, arg = body.partition("=")
    if not equals:
        name = ""
        arg = body
    if word.endswith("D"):
        arg = f"+{btf.offset('file.f_path.dentry'):#x}({arg})"
    return f"{name}{equals}+0x0(+{btf.offset('dentry.d_name.name'):#x}({arg})):string"


def expand_args(words: Sequence[str], context: ExpansionContext, limit: int) -> Sequence[str]:
    """Return the arguments `words` of a probe's definition after the expansions that the kernel makes.

    Raises: KernelError E2BIG (more than `limit` arguments), errors of expand_meta_args() and
    expand_dentry_args().
    """
    interface = context.interface
    on_function = context.in_kernel and not context.on_event
    given = words
    if on_function and InterfaceRule.META_ARGS in interface:
        words = expand_meta_args(words, context)
    if len(words) > limit and InterfaceRule.ARGS_LIMITED in interface:
        context.log.index = limit + 2
        if InterfaceRule.ARGS_LIMIT_LOGGED in interface:
            raise context.log.error(0, ProbeError.TOO_MANY_ARGS, errno.E2BIG)
        raise KernelError(errno.E2BIG, f"more than {limit} arguments")
    if on_function and InterfaceRule.DENTRY_TYPES in interface:
        is_given = words is given
        words = expand_dentry_args(words, context.btf)
        if is_given:
            # Linux: these words are replaced in the command itself, which error_log shows.
            context.log.replace_arguments(words)
    return words
