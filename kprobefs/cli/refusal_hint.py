"""Hints at the end of `run`: what the kernel refused to a command that has failed, and why."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from errno import EINVAL
from pathlib import Path
from typing import TYPE_CHECKING

from emulated_kernel.util.lazy_pattern import lazy_pattern
from emulated_kernel.util.similar_names import similar_names_hint
from kprobefs.cli.ended_hint import last_logged_line
from kprobefs.common.daemon_registry import running
from kprobefs.common.similar_symbols import nearest_listed
from kprobefs.definitions.syntax import DEFINITION
from kprobefs.definitions.tracefs_files import HostFiles, control_root
from kprobefs.mount_options import ARCHITECTURES, KPROBES

if TYPE_CHECKING:
    from kprobefs.cli.nothing_hint import Past

LOGGED = '{log} ends with "{error}" for "{command}"{place}'
REMOVED = "error_log of the removed instance {instance}"
UNLOGGED = '{file} has refused "{command}": {reason}'
MISSING = "this kernel has no file {file}, and no command can create it"
DEFAULTS = {("--arch", ARCHITECTURES[0]), ("--kprobes", KPROBES[0])}
"""(option, value) pairs that a hint omits from `kprobefs explain`, because the values are the defaults."""
NO_SUCH_KIND = "this kernel has no events of kind "
HINT_LINE = lazy_pattern(
    r"kprobefs: ((?:tracing/\S*error_log|error_log of the removed instance .*) ends with .*"
    r'|\S+ has refused ".*|this kernel has no file .*)'
)
"""Pattern of the line with a hint that `run` prints; its group is the hint."""
_ENTRY = lazy_pattern(r"^\[ *[0-9.]+\] (.*)\n  Command: (.*)\n {11}( *)\^", re.MULTILINE)
"""Pattern for an entry of error_log; its groups: the error, the command, and blanks before the caret."""
_INSTANCE = lazy_pattern(r"(?:/tracing)?/instances/([^/]+)/")
"""Pattern for the path in the mount of a file of an instance; its group is the instance's name."""
_LOADED = lazy_pattern(r"load (?:.*/)?([^/\s]+?)(?:\.ko)?\s*$")
"""Pattern for a write that loads a module; its group is the module's name."""
_LOADER = lazy_pattern(r"module\b|.*\bELF\b")
"""Pattern for a line of the kernel log that reports a refused module without naming it."""
_WORD = lazy_pattern(r"[^\s,:()=]+")
"""Pattern for the part of a command at which a caret points."""


def refusals(directory: str, past: Past) -> Iterator[str]:
    """Yield hints about the last file that the mount refused to create, and the last write that it refused.

    `past`: history of the mount at `directory`. If error_log has an entry for the write, the hint contains
    the entry. Linux logs nothing, for example, about a kind of event that it does not have. The hints help
    because a shell may report only that a write failed: dash says "I/O error" for each errno, and each shell
    "Permission denied" if there is no such file.
    """
    if past.missing is not None:
        yield MISSING.format(file=past.missing.lstrip("/"))
    tracefs = Path(directory, HostFiles(directory).tracefs())
    kallsyms = control_root(directory) / "machine" / "kallsyms"
    lines = None if past.refused is None else past.refused[1].splitlines() or [""]
    for log, entry in _logged(tracefs, past):
        if lines is None or entry[2].split() in map(str.split, lines):
            yield logged_refusal(entry, kallsyms.read_text, options_of_mount(directory), log)
            return
    if past.refused is not None and lines:
        file, text, reason = past.refused
        command = lines[0].strip() + "..." * (len(lines) > 1)
        why = _no_such_kind(text, reason, tracefs) or _no_such_trigger(Path(directory), file, text)
        logged = _logged_by_loader(directory, file, text)
        if logged and logged not in reason:
            reason += f'; machine/dmesg says "{logged}"'
        yield UNLOGGED.format(file=file.lstrip("/"), command=command, reason=why or reason)


def _logged(tracefs: Path, past: Past) -> Iterator[tuple[str, re.Match[str]]]:
    """Yield (name of the log, last entry) for each error_log that may report the last refused write.

    The logs are that of the file's trace array, and that of a removed instance of the same name.
    """
    instance = _INSTANCE.match(past.refused[0]) if past.refused is not None else None
    file = f"instances/{instance[1]}/error_log" if instance else "error_log"
    logs = {}
    with suppress(OSError):
        logs[f"tracing/{file}"] = (tracefs / file).read_text(errors="replace")
    if instance:
        logs[REMOVED.format(instance=instance[1])] = past.removed_errors.get(instance[1], "")
    for log, text in logs.items():
        if entry := last_logged(text):
            yield log, entry


def last_logged(error_log: str) -> re.Match[str] | None:
    """Return the last entry of error_log as a match of _ENTRY, or None if there is no entry."""
    last = None
    for entry in _ENTRY.finditer(error_log):
        last = entry
    return last


def options_of_mount(directory: str) -> Sequence[str]:
    """Return the command-line options that select the kernel of the mount at `directory`.

    The list is empty if the mount's daemon is unknown.
    """
    daemon = running(directory)
    return daemon.options if daemon else ()


def place_advice(place: str, message: str, options: Sequence[str]) -> str:
    """Return advice to run `kprobefs explain` about a refused probe at `place`; "" for other errors.

    `message`: text that contains the kernel's error. `options`: names and values that select the kernel.
    """
    from emulated_kernel.trace.text.probe_errors import ProbeError

    at_place = (ProbeError.BAD_INSN_BNDRY, ProbeError.FAIL_REG_PROBE)
    if not any(text in message for error in at_place for text in error.texts):
        return ""
    words = ["kprobefs", "explain"]
    for name, value in zip(options[::2], options[1::2], strict=True):
        if name != "--clock" and (name, value) not in DEFAULTS:
            words += [name, value]
    return f"`{shlex.join([*words, place])}` says why"


def logged_refusal(
    entry: re.Match[str],
    kallsyms: Callable[[], str],
    options: Sequence[str],
    log: str = "tracing/error_log",
) -> str:
    """Return the hint about an entry of error_log, which last_logged() returned.

    If the entry says that a symbol is unknown, the hint names similar symbols. If the place is refused, the
    hint names the command that explains the place. `kallsyms` returns the kernel's symbols. `options`: names
    and values that select the kernel. `log`: name of the log that the hint shows.
    """
    from emulated_kernel.trace.text.probe_errors import ProbeError

    word = _WORD.match(entry[2], len(entry[3]))
    place = f', at "{word[0]}"' if word and word[0] != entry[2] else ""
    if word and any(entry[1].endswith(text) for text in ProbeError.BAD_PROBE_ADDR.texts):
        with suppress(OSError):
            near = nearest_listed(re.split(r"[+%]", word[0], maxsplit=1)[0], kallsyms())
            place += similar_names_hint(near)
    if word and (advice := place_advice(word[0], entry[1], options)):
        place += f"; {advice}"
    return LOGGED.format(log=log, error=entry[1], command=entry[2].strip(), place=place)


def no_such_kind(past: Past, definition: str, tracefs: Path) -> str:
    """Return the message that the kernel has no such kind of event, if `definition` was refused for that.

    `past`: history of the mount with its last refused write. `tracefs`: path of the mount's tracefs. Return
    "" if the reason was another one, or if the kernel has refused another write since.
    """
    if past.refused is None or past.refused[1].strip() != definition:
        return ""
    return _no_such_kind(definition, past.refused[2], tracefs)


def _no_such_kind(text: str, reason: str, tracefs: Path) -> str:
    """Return the message that the kernel has no such kind of event; "" if this is not the reason.

    `text`: the refused write. `reason`: the kernel's reason. If the reason is only the text of EINVAL, as
    from a kernel with its own kprobes, check whether the README of `tracefs` lists the kind of event.
    """
    found = DEFINITION.match(text)
    if reason.startswith(NO_SUCH_KIND) or found is None:
        return reason if reason.startswith(NO_SUCH_KIND) else ""
    with suppress(OSError):
        readme = (tracefs / "README").read_text()
        kind = found["kind"]
        if reason == os.strerror(EINVAL) and not re.search(rf"\s{kind}:?\[", readme):
            return f"{NO_SUCH_KIND}{kind}"
    return ""


def _logged_by_loader(directory: str, file: str, text: str) -> str:
    """Return the last line of the kernel log if it is about the module that a refused write names, else "".

    `file`: path in the mount of the file to which `text` was written. `text`: the refused write.
    """
    name = _LOADED.match(text)
    if not file.endswith("/machine/modules") or name is None:
        return ""
    with suppress(OSError):
        line = last_logged_line(directory)
        if _LOADER.match(line) or line.startswith(f"{name[1].replace('-', '_')}: "):
            return line
    return ""


def _no_such_trigger(directory: Path, file: str, text: str) -> str:
    """Return the message that the kernel has no such trigger; "" if this is not the reason.

    `file`: path, relative to `directory`, of the file to which `text` was written. `text`: the refused write.
    Only a trigger file without triggers lists the names of all kinds of triggers, so return "" if a trigger
    is set.
    """
    name = re.match(r"\s*!?(\w+)", text)
    if not file.endswith("/trigger") or name is None:
        return ""
    with suppress(OSError):
        shown = (directory / file.lstrip("/")).read_text()
        if shown.startswith("# Available triggers:") and name[1] not in shown.split():
            return f"this kernel has no trigger {name[1]}"
    return ""
