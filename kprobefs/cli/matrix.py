"""`kprobefs matrix`: runs a command on each of several kernels, and reports on which ones it passes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from signal import SIG_IGN, SIGINT, SIGTERM, getsignal, signal
from types import FrameType
from typing import IO
from xml.etree import ElementTree

from emulated_kernel.util.fast_dataclass import dataclass
from kprobefs.cli import duration_hint, ended_hint, nothing_hint, refusal_hint, unmatched_hint
from kprobefs.cli.run import end_with_parent, in_foreground
from kprobefs.common.errors import CliError, ExitStatus, escape_for_terminal
from kprobefs.common.output_file import OutputFile
from kprobefs.common.terminal import lines_of

BLAMED = re.compile(
    r"error|fail|not found|no such|cannot|can't|invalid|traceback|assert|exception|panic|denied|"
    # The prefix of a shell's own messages: of bash, of dash, and of both for the text of -c.
    r"^[^\s:+][^:]*: line \d+: |^\S*(?:/\S+|sh): \d+: |^(?:\S*/)?(?:ba|da|a)?sh: ",
    re.IGNORECASE,
)
"""Pattern for a line of a log that probably contains the reason why the command failed."""
_TRACEBACK_HEAD = "Traceback (most recent call last):"
_TRACEBACK = re.compile(rf"{re.escape(_TRACEBACK_HEAD)}|Exception (?:in thread|ignored in).*")
"""Pattern for the first line of a Python traceback; the next line that is not indented has the exception."""
_FAILURES = re.compile(r"=+ (?:FAILURES|ERRORS) =+")
"""Pattern for the line of pytest before the reports of failed tests."""
_FAILED_TEST = re.compile(r"_+ (?!_)(.+?) _+")
"""Pattern for the first line of a failed test's report; its group is the name of the test."""
_REASON = re.compile(r"E( {3,}.*)")
"""Pattern for a line of a failed test's report that shows the exception; its group is the text after "E"."""
_REFUSALS = re.compile(r"-+ kprobefs -+")
"""Pattern for the line of a failed test's report before the hints about requests that the kernel refused."""
COLUMNS = 80
"""Maximum length in characters of a row of the table."""
MIN_SHOWN = 20
"""Minimum number of characters of the failure's text in a row of the table.

With long names, the row may therefore exceed COLUMNS.
"""
LOG_BYTES = 1 << 20
"""Number of bytes at the end of a log that are searched for the reason, and copied to the JUnit report."""
_OUTPUT_BYTES = 64 << 20
"""Maximum number of bytes of a command's output that a worker of a cluster returns."""
ADVICE_LINES = (duration_hint.HINT_LINE, nothing_hint.HINT_LINE, unmatched_hint.HINT_LINE)
"""Patterns for the lines with hints that the table repeats below its rows."""
HINT_LINES = (*ADVICE_LINES, ended_hint.HINT_LINE, refusal_hint.HINT_LINE)
"""Patterns for the lines with hints that `kprobefs run` adds to the command's output."""
INTERRUPTED = 128 + SIGINT
"""Exit status of a command that SIGINT ends, as in shells."""
_STOPPED = (INTERRUPTED, 128 + SIGTERM)
SKIPPED = 77
"""Exit status of a command that cannot run on a kernel, as in Automake's tests."""
_NO_TESTS_COLLECTED = 5
"""Exit status of pytest if it has collected no test, for example because each module skips itself."""
_NO_TEST_RAN = re.compile(
    r"(?:=+ )?((?:(?:\d+ (?:skipped|deselected|warnings?)(?:, |(?= in )))+|no tests ran) in \d.*?s)(?:\s.*)?"
)
"""Pattern for the last line of pytest's output if no test ran; its group is the line without decoration."""
MOUNT = re.compile(r"/[^\s'\":]*/kprobefs-[a-z0-9_]{8}/mnt")
"""Pattern for the path of a mount that `run` has made."""
_NAME = re.compile(r"\b[^\W\d]\w*")
"""Pattern for a name in a hint; _without_numbers() replaces the digits in it."""
NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Case:
    """A kernel of the matrix, as options of `kprobefs run`."""

    name: str
    options: tuple[str, ...]

    @property
    def log_name(self) -> str:
        """Name of the file with the command's output on this kernel."""
        return re.sub(r"[^\w.+-]+", "_", self.name) + ".log"


@dataclass(frozen=True)
class Result:
    """Result of the command on one kernel."""

    case: Case
    status: int
    """Exit status of `kprobefs run`: that of the command, or RUN_FAILED if the kernel could not be mounted.

    The status is INTERRUPTED if a signal prevented the run or cut it short, even if the command handled the
    signal.
    """
    seconds: float
    log: Path
    line: str
    """Reason why the kernel was lost, or else the first line of the log that says why the command failed.

    The line is "" if the run has passed, or if it was stopped and no line of the log names an error. If the
    run is skipped, it is the last line of the command's output.
    """
    hint: str = ""
    """The first line of the log that matches ADVICE_LINES, without its prefix; "" if there is none."""
    is_skipped: bool = False
    """Whether the command has exited with SKIPPED, or was a pytest that has skipped all of its tests."""
    has_lost_kernel: bool = False
    """Whether the kernel has panicked or the mount was gone at the command's end."""

    @property
    def verdict(self) -> str:
        """Result in one word: passed, failed, skipped, stopped (by a signal), or error (the mount failed).

        If the kernel was lost, the result is failed even if the command's status is 0 or SKIPPED. Only
        stopped and error take precedence.
        """
        if self.status in _STOPPED:
            return "stopped"
        if self.status == ExitStatus.RUN_FAILED:
            return "error"
        if self.is_skipped and not self.has_lost_kernel:
            return "skipped"
        return "failed" if self.status or self.line else "passed"

    @property
    def is_good(self) -> bool:
        """Whether the run has passed or was skipped."""
        return self.verdict in ("passed", "skipped")


def cases(
    images: Iterable[tuple[str, str | None]],
    archs: Sequence[str],
    profiles: Sequence[str],
    kprobes: Sequence[str],
    clock: str | None,
) -> list[Case]:
    """Return the kernels of the matrix: each combination of the options that a kernel can have.

    `images`: (file, value of --cpu or None) of each distribution's kernel. `kprobes`: values of --kprobes for
    these kernels. `archs` and `profiles`: values of --arch and --profile for kprobefs's own kernels. If
    `images`, `archs` and `profiles` are empty, the matrix contains kprobefs's default kernel. `clock`: value
    of --clock for all kernels, or None.
    """
    found = []
    for (image, cpu), way in product(images, kprobes or (None,)):
        options = {"--image": image, "--kprobes": way, "--cpu": cpu, "--clock": clock}
        found.append(_case((_short(image), way, cpu and os.path.basename(cpu)), options))
    if archs or profiles or not found:
        for arch, profile in product(archs or ("x86_64",), profiles or (None,)):
            options = {"--arch": arch, "--profile": profile, "--clock": clock}
            found.append(_case((arch, profile), options))
    return _distinct(found)


def _case(names: Iterable[str | None], options: Mapping[str, str | None]) -> Case:
    """Return the kernel with the name `names`, joined by blanks, and with those `options` that have a value.

    Items of `names` that are None are left out.
    """
    given = [(option, value) for option, value in options.items() if value is not None]
    return Case(" ".join(filter(None, names)), tuple(word for pair in given for word in pair))


def _short(image: str) -> str:
    """Return a name for the kernel in the file `image`: the release in the file's name.

    If the file's name contains no release, return the file's name, followed by the release of the kernel in
    it.
    """
    name = os.path.basename(image)
    found = re.match(r"(?:linux-(?:image|binary|modules)-|vmlinuz-|kernel-(?:core-)?)(\d[^_]*)", name)
    if found:
        return found[1]
    from emulated_kernel.guests.linux.table_cache import kernel_from_file

    # The run reports a file that cannot be read.
    with suppress(OSError):
        return f"{name} ({kernel_from_file(image).release})"
    return name


def _distinct(found: Sequence[Case]) -> list[Case]:
    """Return the cases. Append a number to the name of a case if an earlier case has the same name."""
    names: dict[str, int] = {}
    distinct = []
    for case in found:
        names[case.name] = names.get(case.name, 0) + 1
        number = names[case.name]
        distinct.append(Case(f"{case.name} #{number}" if number > 1 else case.name, case.options))
    return distinct


def clear_logs(found: Sequence[Case], logs: Path) -> None:
    """Make the directory `logs`, remove the kernels' old logs, and check that new ones can be written.

    Afterwards, a kernel whose run does not begin has no log. Raises: OSError, CliError (a log cannot be
    written).
    """
    logs.mkdir(parents=True, exist_ok=True)
    for case in found:
        log = logs / case.log_name
        log.unlink(missing_ok=True)
        with OutputFile(log):
            pass


def run_all(
    found: Sequence[Case], command: Sequence[str], logs: Path, jobs: int, ended: Callable[[Result], None]
) -> list[Result]:
    """Run the command on each kernel, `jobs` at a time; return the results in the order of the kernels.

    `logs`: directory for the logs. `ended` is called after each run. SIGINT and SIGTERM end the runs that
    have begun, and no other run begins. The result of a kernel whose run has not begun has the status
    INTERRUPTED. Raises: OSError (a log cannot be written).
    """
    runs = _Runs()
    with ThreadPoolExecutor(jobs) as pool, runs.stopped_by_signals():
        futures: list[Future[Result]] = [
            pool.submit(_run, case, command, logs, ended, runs) for case in found
        ]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        except KeyboardInterrupt:
            pass
        finally:
            for future in futures:
                future.cancel()
    return [
        Result(case, INTERRUPTED, 0, logs / case.log_name, "") if future.cancelled() else future.result()
        for case, future in zip(found, futures, strict=True)
    ]


def run_on_workers(
    found: Sequence[Case],
    command: Sequence[str],
    logs: Path,
    scheduler: str,
    ended: Callable[[Result], None],
) -> list[Result]:
    """Run the command on each kernel, on the workers of a Dask cluster.

    Return the results in the order of the kernels.

    `logs`: directory for the logs. `scheduler`: address of the cluster's scheduler. `ended` is called after
    each run. On the workers, the kernels' and the command's files must have the same paths as here. The
    current directory must exist there too. If a worker is lost, another worker runs the command again.
    Raises: CliError (the cluster fails), OSError (a log cannot be written).
    """
    from kprobefs.measure.cluster import run_on_cluster

    arguments = [(case.options, tuple(command), os.getcwd()) for case in found]
    results: dict[int, Result] = {}
    for number, (status, seconds, output) in run_on_cluster(scheduler, run_on_worker, arguments):
        log = logs / found[number].log_name
        log.write_bytes(output)
        results[number] = result(found[number], status, seconds, log)
        ended(results[number])
    return [results[number] for number in range(len(found))]


def run_on_worker(options: Sequence[str], command: Sequence[str], directory: str) -> tuple[int, float, bytes]:
    """Run the command on one kernel, in the working directory `directory`.

    Return (exit status, duration in seconds, output); only the end of a long output is returned. `options`:
    options of `kprobefs run` that select the kernel.
    Raises: CliError (there is no such directory).
    """
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        try:
            status = _run_once(options, command, output, directory)
        except OSError as error:
            why = f"{error.strerror}; share the directory with all workers"
            raise CliError(f"{directory}: {why}") from error
        output.seek(max(0, output.seek(0, os.SEEK_END) - _OUTPUT_BYTES))
        return status, time.monotonic() - start, output.read()


class _Runs:
    """The processes of the runs that have begun. SIGINT and SIGTERM end these processes."""

    def __init__(self) -> None:
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._stopped: set[subprocess.Popen[bytes]] = set()
        """The processes that were running when SIGINT or SIGTERM came."""

    @contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """During the `with` block, end the runs and raise KeyboardInterrupt if SIGINT or SIGTERM comes.

        An ignored signal stays ignored, as in the runs.
        """
        handled = [number for number in (SIGINT, SIGTERM) if getsignal(number) != SIG_IGN]
        before = {number: signal(number, self._stop) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal(number, handler)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        self._stopped |= self._processes
        # A terminal has sent its interrupt to all processes. A shell that gets SIGINT alone waits for its
        # child.
        if number != SIGINT or not in_foreground():
            for process in list(self._processes):
                process.send_signal(SIGTERM)
        raise KeyboardInterrupt

    def call(self, process: subprocess.Popen[bytes]) -> int:
        """Wait until a process has ended, and return its exit status.

        Within stopped_by_signals(), SIGINT and SIGTERM end the process. Return INTERRUPTED if one of them
        came during the wait.
        """
        self._processes.add(process)
        try:
            status = process.wait()
        finally:
            self._processes.discard(process)
        return INTERRUPTED if process in self._stopped else status


def _run(
    case: Case, command: Sequence[str], logs: Path, ended: Callable[[Result], None], runs: _Runs
) -> Result:
    log = logs / case.log_name
    start = time.monotonic()
    with log.open("wb") as output:
        status = _run_once(case.options, command, output, runs=runs)
    found = result(case, status, time.monotonic() - start, log)
    ended(found)
    return found


def _run_once(
    options: Sequence[str],
    command: Sequence[str],
    output: IO[bytes],
    directory: str | None = None,
    runs: _Runs | None = None,
) -> int:
    """Run the command on a kernel; return the exit status, or 128 + number if a signal ended the run.

    `options`: options of `kprobefs run` that select the kernel. `output`: file for the command's output.
    `directory`: the command's working directory; None: that of this process. `runs`: runs to which this run
    is added, so that signals end it. If this process is killed, the run ends too.
    """
    words = [sys.executable, "-m", "kprobefs", "run", *options, "--", *command]
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=directory,
        preexec_fn=end_with_parent,  # noqa: PLW1509 - it makes only one system call
    )
    status = (runs or _Runs()).call(process)
    return 128 - status if status < 0 else status


def result(case: Case, status: int, seconds: float, log: Path) -> Result:
    """Return the result of a run with this exit status and log. Raises: OSError."""
    text = _text(log)
    line = _blamed(text) or f"status {status}" if status else ""
    last = next((line for line in reversed(text.splitlines()) if line.strip() and not _is_hint(line)), "")
    is_skipped = status == SKIPPED
    if status in (ExitStatus.OK, _NO_TESTS_COLLECTED) and (found := _NO_TEST_RAN.fullmatch(last)):
        last = found[1]
        line = last if status else ""
        is_skipped = " skipped" in last
    ended = _printed(ended_hint.HINT_LINE, text)
    if ended:
        line = ended
    elif status in _STOPPED:
        # The first line of the output is no reason: a signal has ended the run.
        line = line if BLAMED.search(line) else ""
    elif is_skipped:
        line = last
    elif status and (refusal := _printed(refusal_hint.HINT_LINE, text)):
        line = f"{line.rstrip(':')}; {refusal}"
    return Result(case, status, seconds, log, line, _hint(text), is_skipped, has_lost_kernel=bool(ended))


def _printed(pattern: re.Pattern[str], text: str) -> str:
    """Return the first hint of `run` in the log `text` that matches `pattern`, without its prefix, or ""."""
    found = map(pattern.fullmatch, text.splitlines())
    return next((hint[1] for hint in found if hint), "")


def _text(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
        return file.read().decode(errors="replace")


def _is_hint(line: str) -> bool:
    """Return True if `run` has added the line as a hint."""
    return any(hint.fullmatch(line) for hint in HINT_LINES)


def _hint(text: str) -> str:
    """Return the first hint in the log `text` that matches ADVICE_LINES, without its prefix, or ""."""
    lines = (line.strip() for line in text.splitlines())
    advice = (line for line in lines if any(hint.fullmatch(line) for hint in ADVICE_LINES))
    return next((line.removeprefix("kprobefs: ") for line in advice), "")


def _blamed(text: str) -> str:
    """Return the first line of `text` that probably names an error, or else the first that is not empty.

    Hints of `kprobefs run` are ignored; return "" if `text` has no other line. If the line begins a
    traceback, return the traceback's exception instead. If it begins pytest's reports, return a text about
    the first failed test. In the returned line, the path of the mount is replaced by $KPROBEFS.
    """
    written = [line for line in text.splitlines() if line.strip() and not _is_hint(line.strip())]
    at = next((number for number, line in enumerate(written) if BLAMED.search(line)), 0)
    blamed = written[at].strip() if written else ""
    rest = written[at + 1 :]
    if _TRACEBACK.fullmatch(blamed):
        unindented = (line.strip() for line in rest if line[0] != " " and not _TRACEBACK.fullmatch(line))
        blamed = next(unindented, blamed)
    elif _FAILURES.fullmatch(blamed):
        blamed = _first_failed_test(rest) or blamed
    return MOUNT.sub("$KPROBEFS", blamed)


def _first_failed_test(report: Sequence[str]) -> str:
    """Return a text about the first failed test in pytest's report, or "" if the report has no reason.

    The text: name, reason, and the hint about a refused request if there is one.
    """
    name = refusal = ""
    exception = []
    for line, following in zip(report, [*report[1:], ""], strict=True):
        if line.startswith("==") or (name and _FAILED_TEST.fullmatch(line)):
            break
        if found := _FAILED_TEST.fullmatch(line):
            name = f"{found[1]}: "
        elif found := _REASON.match(line):
            exception.append(found[1])
        elif _REFUSALS.fullmatch(line):
            refusal = f"; {following.strip()}"
    return f"{name}{_reason(exception)}{refusal}" if exception else ""


def _reason(exception: Sequence[str]) -> str:
    """Return the first line of an exception's text, which is given as the lines `exception`.

    If the text begins with a traceback of another program, return that traceback's exception in its place.
    """
    first, *rest = map(str.rstrip, exception)
    if rest and first.endswith(_TRACEBACK_HEAD):
        # The frames are indented, and the exception after them is not.
        frame = _indentation(rest[0])
        ended = next((line for line in rest if _indentation(line) < frame), "")
        first = first.removesuffix(_TRACEBACK_HEAD) + (ended.strip() or _TRACEBACK_HEAD)
    return first.strip()


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def table(results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of a table: kernel, result, time, and the reason of a failure (Result.line).

    A reason that does not fit into its column follows the row. If a kernel has not passed, a line after the
    table names the directory of the logs. Last comes each hint of `run`, with the names of the kernels for
    which it was printed. Hints that differ only in numbers in names count as one hint.
    """
    width = max(len("kernel"), *(len(escape_for_terminal(result.case.name)) for result in results))
    room = max(COLUMNS - width - len("  result   seconds  "), MIN_SHOWN)
    yield f"{'kernel':<{width}}  result   seconds  first line of what failed"
    for result in results:
        line = escape_for_terminal(result.line)
        has_room = len(line) <= room
        name = escape_for_terminal(result.case.name)
        shown = line if has_room else ""
        yield f"{name:<{width}}  {result.verdict:<7}{result.seconds:>9.1f}  {shown}".rstrip()
        if not has_room:
            yield from lines_of(line, COLUMNS, "    ", "    ")
    if failed := [result for result in results if not result.is_good]:
        yield f"logs: {escape_for_terminal(str(failed[0].log.parent))}"
    hints: dict[str, list[Result]] = {}
    for result in results:
        if result.hint:
            hints.setdefault(_without_numbers(result.hint), []).append(result)
    for given in hints.values():
        names = ", ".join(result.case.name for result in given)
        differ = "; numbers in names differ" if len({result.hint for result in given}) > 1 else ""
        which = f"{len(given)} of {len(results)} kernels ({names}{differ})"
        yield from lines_of(escape_for_terminal(f"hint of {which}: {given[0].hint}"), COLUMNS)


def _without_numbers(hint: str) -> str:
    """Return a hint in which 0 replaces each number within a name, such as the pid of a tool."""
    return _NAME.sub(lambda name: re.sub(r"\d+", "0", name[0]), hint)


def as_json(results: Sequence[Result]) -> str:
    """Return the results as a JSON array."""
    found = [
        {
            "kernel": result.case.name,
            "options": list(result.case.options),
            "result": result.verdict,
            "status": result.status,
            "seconds": round(result.seconds, 3),
            "line": result.line,
            "log": str(result.log),
        }
        for result in results
    ]
    return json.dumps(found, indent=2)


def as_junit(results: Sequence[Result], command: Sequence[str]) -> bytes:
    """Return a JUnit report with a test case for each kernel. Raises: OSError (a log cannot be read)."""
    verdicts = [result.verdict for result in results]
    suite = ElementTree.Element(
        "testsuite",
        name="kprobefs matrix",
        tests=str(len(results)),
        failures=str(verdicts.count("failed")),
        errors=str(verdicts.count("error")),
        skipped=str(verdicts.count("stopped") + verdicts.count("skipped")),
        time=f"{sum(result.seconds for result in results):.3f}",
    )
    for result in results:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=_for_xml(shlex.join(command)),
            name=_for_xml(result.case.name),
            time=f"{result.seconds:.3f}",
        )
        if result.verdict == "stopped":
            ElementTree.SubElement(case, "skipped", message="stopped by a signal")
        elif result.verdict == "skipped":
            ElementTree.SubElement(case, "skipped", message=_for_xml(result.line))
        elif not result.is_good:
            kind = "error" if result.verdict == "error" else "failure"
            problem = ElementTree.SubElement(case, kind, message=_for_xml(result.line))
            problem.text = f"status {result.status}"
        if result.log.exists():
            ElementTree.SubElement(case, "system-out").text = _for_xml(_text(result.log))
    report: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return report


def _for_xml(text: str) -> str:
    """Return `text` with a replacement for each character that XML cannot contain."""
    return NOT_XML.sub("\ufffd", text)
