"""`kprobefs apply` and `save`: the mount and the files that they use."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from emulated_kernel.regular import read_given, read_named
from kprobefs import dropins, mount
from kprobefs.failure import Exit, Failure, shown

log = logging.getLogger("kprobefs")

PIPE_SIZE = 1 << 16
"""Bytes that a pipe holds. Mirrors: pipe(7)."""
TOLD, WIDTH = 20, 1024
"""Lines of a file that failed, and characters of each, that are told."""
END_TIMEOUT = 1.0
"""Seconds."""


def which_mount(named: str | None, way: str = "--mount DIR") -> str:
    """The mount that a command is for: the named one, $KPROBEFS, or the only one. Raises: Failure.

    `way`: in which the command has it named.
    """
    chosen = named or os.environ.get("KPROBEFS")
    if chosen:
        directory = mount.resolve(chosen)
        point = mount.mounted_on(directory)
        if point is None or point.fstype != mount.FSTYPE:
            raise Failure(f"{chosen}: kprobefs isn't mounted there", Exit.NOT_MOUNTED)
    else:
        found = sorted({point.directory for point in mount.our_mounts()})
        if len(found) != 1:
            raise Failure(f"which mount? {way}" if found else "nothing is mounted", Exit.NOT_MOUNTED)
        [directory] = found
    mount.check_answers(directory)
    return directory


def apply(directory: str, files: Sequence[str]) -> list[str]:
    """Apply files to a mount; if none are named, those of the probes.d directories.

    Returns a message for each line and file that failed, made fit for a terminal.
    """
    chosen = files or list(map(str, dropins.files()))
    if not chosen:
        return []
    from kprobefs import definitions
    from kprobefs.files import HostFiles

    loader, failed = definitions.Loader(HostFiles(directory)), []
    for file in chosen:
        try:
            text = _read(file) if files else dropins.read(Path(file))
        except OSError as error:
            failed.append(shown(f"{file}: {error.strerror}"))
        except Failure as failure:
            failed.append(shown(str(failure)))
        else:
            if "\0" in text:
                failed.append(shown(f"{file}: no file of definitions: it has a NUL"))
                continue
            failed += _first(file, loader.apply(list(definitions.read_lines(file, text))))
    return failed


def _first(file: str, failed: list[str]) -> list[str]:
    """What to tell of a file's lines: of many that failed the first ones, none wider than some screens."""
    told = ["\n".join(line[:WIDTH] for line in each.split("\n")) for each in failed[:TOLD]]
    more = len(failed) - len(told)
    return [*told, shown(f"{file}: {more} more lines failed")] if more > 0 else told


def _read(file: str) -> str:
    data = read_given(sys.stdin.fileno(), dropins.LIMIT) if file == "-" else read_named(file, dropins.LIMIT)
    return data.decode("utf-8", "surrogateescape")


class ApplyProcess:
    """A process that applies the definitions that a mount begins with; it logs what fails.

    Not the daemon itself: one that waits for an answer of its own process couldn't be killed.
    """

    def __init__(self, directory: str) -> None:
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        paths = filter(None, (package, os.environ.get("PYTHONPATH")))
        # -P: nothing is imported from the working directory.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kprobefs", "apply", "--mount", directory],
            env={**os.environ, "PYTHONPATH": ":".join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert self._process.stderr is not None
        self._messages = self._process.stderr
        self._unfinished = b""

    @property
    def descriptor(self) -> int:
        """Can be read when there is something for read()."""
        return self._messages.fileno()

    def read(self) -> str | None:
        """Log what it has to tell; when it has ended how: "" where all was applied."""
        data = os.read(self.descriptor, PIPE_SIZE)
        *lines, self._unfinished = (self._unfinished + (data or b"\n")).split(b"\n")
        for line in filter(None, lines):
            log.warning("%s", shown(line.decode("utf-8", "replace").removeprefix("kprobefs: ")))
        if data:
            return None
        with suppress(subprocess.TimeoutExpired):
            # Behind its last word it only closes files.
            if self._process.wait(END_TIMEOUT) == Exit.OK:
                return ""
        how = "not all definitions were applied"
        log.error("%s", how)
        return how

    def end(self) -> None:
        """Kill it, if it still runs: where a request of its hangs, it ends with the mount."""
        self._process.kill()
        self._messages.close()


def saved(directory: str) -> bytes:
    """What `save` writes."""
    from kprobefs.definitions import saved
    from kprobefs.files import HostFiles, beside

    with suppress(FileNotFoundError):
        return (beside(directory) / "machine" / "definitions").read_bytes()
    return "".join(f"{line}\n" for line in saved(HostFiles(directory))).encode("utf-8", "surrogateescape")
