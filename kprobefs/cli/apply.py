"""`kprobefs apply` and `kprobefs save`: select a mount, and apply or print definitions of its probes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from emulated_kernel.util.safe_read import read_descriptor
from kprobefs.common import mountpoints
from kprobefs.common.errors import CliError, ExitStatus, escape_for_terminal
from kprobefs.definitions import dropins

MAX_MESSAGES = 20
"""Maximum number of failures that are reported for each file."""
MAX_WIDTH = 1024
"""Maximum length of a line of a message, in characters."""


def which_mount(named: str | None) -> str:
    """Return the directory of the mount on `named`; None: of that on $KPROBEFS, or else of the only mount.

    Raises: CliError (there is no mount, the mount does not answer, or none is selected and there are
    several).
    """
    chosen = named or os.environ.get("KPROBEFS")
    if chosen:
        directory = mountpoints.resolve(chosen)
        point = mountpoints.mounted_on(directory)
        if point is None or point.fstype != mountpoints.FSTYPE:
            raise mountpoints.not_mounted(chosen)
    else:
        found = sorted({point.directory for point in mountpoints.our_mounts()})
        if len(found) > 1:
            states = mountpoints.conditions(found)
            found = [each for each in found if states[each] is not mountpoints.MountState.STALE] or found
        if len(found) != 1:
            several = f"several mounts are active ({', '.join(found)}); select one with --mount DIR"
            none = "no mount is active; run kprobefs mount DIR"
            raise CliError(several if found else none, ExitStatus.NOT_MOUNTED)
        [directory] = found
    mountpoints.check_answers(directory)
    return directory


def apply(directory: str, files: Sequence[str]) -> list[str]:
    """Apply `files` of definitions to a mount; if `files` is empty, apply those in the probes.d directories.

    Return a message for each line and each file that failed, escaped for a terminal. The file name - stands
    for standard input.
    """
    chosen = files or [str(file) for file in dropins.files()]
    if not chosen:
        return []
    from kprobefs.definitions.loader import Loader
    from kprobefs.definitions.syntax import read_lines
    from kprobefs.definitions.tracefs_files import HostFiles

    loader = Loader(HostFiles(directory))
    failed = []
    for file in chosen:
        try:
            found = _read(file) if files else dropins.read(Path(file))
        except OSError as error:
            remedy = "; to select a mount, use -m DIR" if os.path.isdir(file) else ""
            failed.append(escape_for_terminal(f"{file}: {error.strerror}{remedy}"))
        except CliError as failure:
            failed.append(escape_for_terminal(str(failure)))
        else:
            if "\0" in found.text:
                failed.append(escape_for_terminal(f"{file}: not a file of definitions; it contains a NUL"))
                continue
            try:
                lines = list(read_lines(file, found.text))
            except CliError as failure:
                failed.append(escape_for_terminal(str(failure)))
                continue
            refused = loader.apply(lines)
            failed += _first(file, refused) if found.is_shown else _number(file, refused)
    return failed


def _first(file: str, failed: list[str]) -> list[str]:
    """Return the first MAX_MESSAGES of the messages `failed` about a file.

    If there are more, add a message with the number of omitted ones. Lines of a message are cut to MAX_WIDTH.
    """
    told = ["\n".join(line[:MAX_WIDTH] for line in each.split("\n")) for each in failed[:MAX_MESSAGES]]
    more = len(failed) - len(told)
    return [*told, escape_for_terminal(f"{file}: {more} more lines failed")] if more > 0 else told


def _number(file: str, failed: list[str]) -> list[str]:
    """Return a list with one message that tells how many lines of a file failed, or [] if none failed.

    The message contains no text of the file, because not all users may read it.
    """
    if not failed:
        return []
    lines = "1 line" if len(failed) == 1 else f"{len(failed)} lines"
    return [escape_for_terminal(f"{file}: {lines} failed; it is a link, so name the private file itself")]


def _read(file: str) -> dropins.Text:
    if file == "-":
        data = read_descriptor(sys.stdin.fileno(), dropins.LIMIT)
        return dropins.Text(data.decode("utf-8", "surrogateescape"))
    return dropins.read_definitions(file)


def saved(directory: str) -> bytes:
    """Return the output of `kprobefs save` for a mount: lines that define its current probes and settings."""
    from kprobefs.definitions.saver import saved
    from kprobefs.definitions.tracefs_files import HostFiles, control_root

    machine = control_root(directory) / "machine"
    with suppress(FileNotFoundError):
        return (machine / "definitions").read_bytes()
    # Without machine/, the kernel is unknown.
    lines = saved(HostFiles(directory), lambda: _default_maxactive(machine) if machine.is_dir() else 0)
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")


def _default_maxactive(machine: Path) -> int:
    """Return the default maxactive of return probes in a distribution's kernel, whose machine has one CPU.

    `machine`: directory machine/ of its mount.
    """
    from emulated_kernel.arch.analysis.probe_rules import ProbeRule
    from emulated_kernel.kprobes.kinds.kretprobe import default_maxactive
    from emulated_kernel.util.linux_rule import series_of

    banner = (machine / "version").read_text("utf-8", "replace")
    rules = ProbeRule.of(series_of(banner.removeprefix("Linux version ")))
    # Mirrors: init/Makefile:preempt-flag (v6.1), which is set with CONFIG_PREEMPTION.
    is_preemptible = " PREEMPT" in banner
    return default_maxactive(1, has_minimum=is_preemptible or ProbeRule.MAXACTIVE_TEN in rules)
