"""Results files: the finished parts of a long analysis. The next run computes only the missing parts."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, Self

from kprobefs.common.errors import CliError, ExitStatus

_VERSION = 1
"""Version of the format. If the lines or the form of a result change, the number must be increased."""
_HEAD = '{"kprobefs": "results", "version": %d}\n'
"""Format of the first line of a results file, for the operator %. Its argument is the version."""
_FIRST_LINE = re.compile(r'\{"kprobefs": "results", "version": ([0-9]{1,9})\}\n')
_LIMIT = 1 << 30
"""Maximum size of a results file in bytes."""


class ResultsFile:
    """A file of results. Each line has the key of an analysis, the number of a part, and the part's result.

    A file can contain the results of several analyses. A line that was not written completely is dropped.
    """

    def __init__(self, path: str) -> None:
        """Open the file `path`, or make it. Raises: CliError (the file cannot be used)."""
        self._path = path
        try:
            # O_NONBLOCK: opening a FIFO must not wait.
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
            self._file: IO[str] = os.fdopen(os.open(path, flags, 0o666), "r+", encoding="utf-8", newline="\n")
        except OSError as error:
            raise CliError(f"--results {path}: {error.strerror}", ExitStatus.USAGE) from error
        try:
            self._results = self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def results(self, key: str) -> dict[int, Any]:
        """Return a map: number of a finished part of the analysis `key` -> result of the part."""
        return dict(self._results.get(key, {}))

    def add(self, key: str, number: int, result: object) -> None:
        """Append the result of part `number` of the analysis `key` to the file.

        Raises: CliError (for example, the disk is full).
        """
        try:
            self._file.write(json.dumps([key, number, result], separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            raise CliError(f"--results {self._path}: {error.strerror}") from error

    def _read(self) -> dict[str, dict[int, Any]]:
        found: dict[str, dict[int, Any]] = {}
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._file.fileno()).st_size > _LIMIT:
                raise self._unusable(f"larger than {_LIMIT >> 20} MiB; choose another file")
            text = self._file.read()
            whole = text[: text.rfind("\n") + 1]
            head = _HEAD % _VERSION
            first = _FIRST_LINE.match(whole)
            if first is None and (whole or not head.startswith(text)):
                raise self._unusable("not a file of results; choose another file")
            if first is not None and int(first[1]) != _VERSION:
                why = f"version {first[1]} of the format, but this kprobefs has {_VERSION}"
                raise self._unusable(f"{why}; choose another file")
            for line in whole[len(head) :].splitlines():
                key, number, result = json.loads(line)
                found.setdefault(key, {})[int(number)] = result
            os.truncate(self._file.fileno(), len(whole.encode()))
            if not whole:
                self._file.write(head)
        except BlockingIOError as error:
            raise self._unusable("another run uses the file; wait for it, or choose another") from error
        except OSError as error:
            raise self._unusable(f"{error.strerror}; choose a regular file") from error
        except (ValueError, TypeError, RecursionError) as error:
            raise self._unusable("damaged; remove it, or choose another file") from error
        return found

    def _unusable(self, why: str) -> CliError:
        return CliError(f"--results {self._path}: {why}", ExitStatus.USAGE)


def finish(
    number_of_parts: int,
    run: Callable[[list[int]], Iterable[tuple[int, Any]]],
    key: str = "",
    file: ResultsFile | None = None,
) -> Iterator[tuple[int, Any]]:
    """Yield (number, result) of each part of an analysis. Parts in a results file are not computed again.

    `run` computes the parts with the given numbers, in any order. `key`: key of the analysis in the file.
    `file`: results file to which new results are added; None: all parts are computed.
    """
    known = {} if file is None else file.results(key)
    yield from ((number, result) for number, result in known.items() if number < number_of_parts)
    missing = [number for number in range(number_of_parts) if number not in known]
    for number, result in run(missing) if missing else ():
        if file is not None:
            file.add(key, number, result)
        yield number, result
