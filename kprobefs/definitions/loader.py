"""`kprobefs apply`: applies the lines of definition files to a tracefs.

If a line names an instance that does not exist, the instance is created.
"""

from __future__ import annotations

import errno
import re
import stat
from collections.abc import Generator, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from emulated_kernel.util.lazy_pattern import lazy_pattern
from kprobefs.common.errors import escape_for_terminal
from kprobefs.definitions.syntax import (
    DEFINING,
    DEFINITION,
    LISTS,
    NOT_A_LINE,
    SETTING,
    Definition,
    Line,
    advice,
    chosen_word,
    is_definition,
    is_trigger,
    parse_definition,
    refused_path,
    saved_triggers,
    saved_words,
    unescaped,
    without_count,
)
from kprobefs.definitions.tracefs_files import OUTSIDE, Files
from kprobefs.definitions.trigger_order import by_need

LINES_PER_STEP = 16
"""Number of lines that are applied in one step of a reboot; requests wait during a step."""
CURSOR = lazy_pattern(r"^ *\^$")
"""Matches the line of an error_log that points at the position of the error."""
DYNAMIC_EVENTS = "dynamic_events"
"""Name of the file to which definitions are written."""
TRIAL = "kprobefs_trial"
"""Name of an event that exists while a new definition of another event is tried."""
SPELLINGS = {"key": "keys", "val": "vals", "values": "vals", "NOHC": "nohitcount"}
"""Other name of a hist trigger's parameter -> the name that the kernel shows."""
LAGGING_FILES = ("enable", "optimized")
"""Names of files that show the current state, which may lag behind the value that was written."""


class DefinitionError(Exception):
    """Exception for a line that cannot be applied. The message names neither the file nor the line."""

    def __init__(self, message: str, cursor: int | None = None, number: int | None = None) -> None:
        """Create the error.

        `cursor`: index in the line at which the kernel's error_log marks the error; None: it marks nothing.
        `number`: errno, or None if unknown.
        """
        super().__init__(message)
        self.cursor = cursor
        self.number = number


class Loader:
    """Applies lines of definitions to a tracefs. A line whose effect is already present changes nothing."""

    def __init__(self, files: Files, *, is_new: bool = False) -> None:
        """Prepare to write to `files`.

        `is_new`: whether the kernel has no dynamic events yet, and each definition is a line that
        dynamic_events showed. If False, definitions may exist already.
        Raises: CliError (there is no tracefs), DefinitionError (error_log cannot be read).
        """
        self._files = files
        self._is_new = is_new
        self._tracefs = files.tracefs()
        self._defined: set[str] = set()
        """Events, as GROUP/NAME, that earlier lines have defined.

        Another line for one of these events adds a probe to it. "" is in the set if the kernel has chosen the
        name of such an event.
        """
        self._error_logs = {"": self._read("error_log")}
        """Directory of a trace array ("" or instances/NAME/) -> text of its error_log, as last read."""
        self._known: _ExistingDefinitions | None = None
        """Definitions in dynamic_events, or None if the file must be read again."""
        self._triggers: dict[str, _ExistingTriggers] = {}
        """Path of a trigger file -> its triggers. A file is read once, not once for each line."""

    def apply(self, lines: Sequence[Line]) -> list[str]:
        """Apply all lines; return a message for each line that failed."""
        steps = self.steps(lines)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                failed: list[str] = end.value
                return failed

    def steps(self, lines: Sequence[Line]) -> Generator[None, None, list[str]]:
        """Apply all lines in steps of LINES_PER_STEP lines, and yield after each step.

        Return a message for each line that failed.
        """
        applied = 0
        failed: list[str] = []
        failed_triggers: list[str] = []
        later = list(lines)
        while later:
            now = later
            later = []
            failed_triggers = []
            for line in now:
                try:
                    self._do(line.text)
                except DefinitionError as refused:
                    report = _report(line, refused)
                    # A trigger may need a variable that a later trigger defines, so it is tried again.
                    if is_trigger(line.text):
                        later.append(line)
                        failed_triggers.append(report)
                    else:
                        failed.append(report)
                applied += 1
                if not applied % LINES_PER_STEP:
                    yield
            if len(later) == len(now):
                break
            later = [later[index] for index in by_need([line.text for line in later])]
        return failed + failed_triggers

    def _do(self, text: str) -> None:
        if text.startswith("#"):
            return
        if setting := SETTING.match(text):
            self._set(setting["file"], setting["value"] or "", setting.start("value"))
        elif not is_definition(text):
            raise DefinitionError(advice(text) or NOT_A_LINE)
        else:
            try:
                self._define(text)
            except DefinitionError as refused:
                remedy = advice(text)
                raise DefinitionError(
                    f"{refused}; {remedy}" if remedy else str(refused), refused.cursor
                ) from None

    def _define(self, text: str) -> None:
        self._triggers.clear()
        if self._is_new:
            # No event exists twice, and there may be thousands of them.
            self._write(DYNAMIC_EVENTS, text, 0)
            return
        definition = parse_definition(text)
        if definition is None:
            self._known = None
            self._write(DYNAMIC_EVENTS, text, 0)
            return
        known = self._known
        if known is None or known.is_unsure(definition):
            known = _ExistingDefinitions(self._read(DYNAMIC_EVENTS).splitlines())
            self._known = known
        if not known.has(definition):
            if definition.event in known.events and definition.event not in self._defined:
                self._replace(text, definition.event)
                self._known = None
            else:
                self._write(DYNAMIC_EVENTS, text, 0)
            known.add(definition)
        self._defined.add(definition.event)

    def _replace(self, text: str, event: str) -> None:
        """Remove an event and define it by the line `text`.

        An event whose new definition fails stays as it is, because the definition is first tried under
        another name.
        """
        self._try(text, event)
        self._remove(event)
        try:
            self._write(DYNAMIC_EVENTS, text, 0)
        except DefinitionError as refused:
            self._known = None
            raise DefinitionError(f"{refused}; the old definition was removed", refused.cursor) from None

    def _try(self, text: str, event: str) -> None:
        """Test the definition `text` of `event`: define another event by it, and remove that event again.

        If there is no space for another event, return without a test. Raises: DefinitionError (the kernel
        refuses the definition).
        """
        found = DEFINITION.match(text)
        assert found is not None
        trial = f"{event.partition('/')[0]}/{TRIAL}"
        start, end = found.span("name")
        try:
            self._write(DYNAMIC_EVENTS, f"{text[:start]}{trial}{text[end:]}", 0)
        except DefinitionError as refused:
            if refused.number == errno.ENOSPC:
                # Only the removal of the old event makes room for the new one.
                return
            cursor = refused.cursor
            if cursor is not None and cursor > start:
                cursor = max(start, cursor - len(trial) + end - start)
            raise DefinitionError(str(refused), cursor) from None
        self._write(DYNAMIC_EVENTS, f"-:{trial}", None)

    def _remove(self, event: str) -> None:
        """Disable an event in all trace arrays, and remove its definition."""
        instances = self._files.directories(f"{self._tracefs}instances")
        for place in ("", *(f"instances/{name}/" for name in sorted(instances))):
            switch = f"{place}events/{event}/enable"
            if self._files.exists(self._path(switch)):
                self._write(switch, "0", None)
        try:
            self._write(DYNAMIC_EVENTS, f"-:{event}", None)
        except DefinitionError as refused:
            # Linux: an event that a hist trigger uses cannot be removed (EBUSY).
            triggers = list(self._triggers_of(event))
            raise DefinitionError(f"{refused}: {'; '.join(triggers)}" if triggers else str(refused)) from None

    def _triggers_of(self, event: str) -> Iterator[str]:
        """Yield the triggers of an event in all trace arrays, each as `FILE has TRIGGER`."""
        instances = self._files.directories(f"{self._tracefs}instances")
        for place in ("", *(f"instances/{name}/" for name in sorted(instances))):
            file = f"{place}events/{event}/trigger"
            if self._files.exists(self._path(file)):
                yield from (f"{file} has {each}" for each in saved_triggers(self._read(file)))

    def _set(self, name: str, value: str, column: int) -> None:
        path = unescaped(name)
        parts = path.split("/")
        if parts[-1] in DEFINING:
            self._known = None
            self._triggers.clear()
        if why := refused_path(path):
            raise DefinitionError(why)
        if parts[0] == "instances" and len(parts) > 1 and parts[1]:
            self._make(f"instances/{parts[1]}")
        self._check_mode(path)
        if parts[-1] == "trace_options":
            present = set(self._read(path).split())
            for word in value.split():
                if word not in present:
                    self._write(path, word, column + value.index(word))
        elif parts[-1] in LISTS:
            self._add(path, value, column)
        elif parts[-1] == "trigger":
            self._set_trigger(path, value, column)
        # The loader's own requests may be traced, so it skips needless ones.
        elif parts[-1] in LAGGING_FILES or value not in (text := self._read(path).strip(), chosen_word(text)):
            self._write(path, value, column)

    def _set_trigger(self, path: str, value: str, column: int) -> None:
        """Write a trigger to the trigger file at `path`, unless the file has the trigger already.

        `column`: index of `value` in the line that is applied.
        """
        known = self._triggers.get(path)
        if known is None or known.is_unsure(value):
            known = _ExistingTriggers(saved_triggers(self._read(path)))
            self._triggers[path] = known
        if known.has(value):
            return
        self._write(path, value, column)
        if _makes_others(value):
            self._triggers.clear()
        else:
            known.written(value)

    def _check_mode(self, name: str) -> None:
        """Check that a file is regular and writable; call this before reading it.

        A read of another file, such as a pipe, may block for ever. Raises: DefinitionError (the file is not
        regular or not writable).
        """
        try:
            mode = self._files.mode(self._path(name))
        except OSError:
            # The read or the write reports the error.
            return
        if not stat.S_ISREG(mode) or not mode & stat.S_IWUSR:
            raise DefinitionError("not a setting")

    def _make(self, instance: str) -> None:
        """Create an instance if it does not exist, and remember its current error_log.

        `instance`: path of the instance, as instances/NAME.
        """
        log = f"{instance}/"
        if log in self._error_logs:
            return
        try:
            self._files.mkdir(f"{self._tracefs}{instance}")
        except FileExistsError:
            self._error_logs[log] = self._read(f"{instance}/error_log")
        except OSError as error:
            raise DefinitionError(f"{instance}: {error.strerror}") from None
        else:
            self._error_logs[log] = ""

    def _add(self, path: str, value: str, column: int) -> None:
        """Write to the file at `path` the words of `value` that the list in the file does not contain yet.

        `column`: index of `value` in the line that is applied.
        """
        missing = self._missing(path, value)
        if len(missing) > 1:
            # Write all words at once: each close of a filter file changes the guest's text, and each write to
            # a list of pids copies the list.
            try:
                self._files.write(self._path(path), f"{' '.join(word[0] for word in missing)}\n")
            except OSError:
                # The loop below finds the word that failed.
                missing = self._missing(path, value)
            else:
                return
        for word in missing:
            try:
                self._write(path, word[0], column + word.start())
            except DefinitionError:
                # Linux: EINVAL if all functions that match a pattern have the command already.
                pattern, colon, command = without_count(word[0]).partition(":")
                if not colon or not _has_command(self._present(path), pattern, command):
                    raise

    def _present(self, path: str) -> set[str]:
        return {without_count(word) for word in saved_words(path, self._read(path))}

    def _missing(self, path: str, value: str) -> list[re.Match[str]]:
        present = self._present(path)
        return [word for word in re.finditer(r"\S+", value) if without_count(word[0]) not in present]

    def _path(self, name: str) -> str:
        return name if name.partition("/")[0] in OUTSIDE else f"{self._tracefs}{name}"

    def _read(self, name: str) -> str:
        try:
            return self._files.read(self._path(name))
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EACCES):
                # The file is write-only.
                return ""
            raise DefinitionError(f"{name}: {error.strerror}") from None

    def _write(self, name: str, value: str, column: int | None) -> None:
        """Write `value` and a newline to the file `name`.

        `column`: index of `value` in the line that is applied, or None if that line does not contain `value`.
        Raises: DefinitionError (the write failed; the message includes that of the error_log).
        """
        write = self._files.define if name == DYNAMIC_EVENTS else self._files.write
        try:
            write(self._path(name), f"{value}\n")
        except OSError as error:
            array = "/".join([*name.split("/")[:2], ""]) if name.startswith("instances/") else ""
            before = self._error_logs.get(array)
            now = self._read(f"{array}error_log")
            self._error_logs[array] = now
            message, cursor = _last_error(now, value) if now != before else ("", None)
            # The C library's text for EILSEQ is about characters.
            why = "EILSEQ" if error.errno == errno.EILSEQ else str(error.strerror)
            reason = f"{message}: {why}" if message else why
            at = None if cursor is None or column is None else column + cursor
            raise DefinitionError(reason, at, error.errno) from None


def _has_command(words: Iterable[str], pattern: str, command: str) -> bool:
    """Return True if one of `words` is FUNCTION:COMMAND with the command `command` and a matching function.

    `pattern`: shell pattern that the word's function must match.
    """
    for word in words:
        function, _, present = word.partition(":")
        if present == command and fnmatchcase(function, pattern):
            return True
    return False


class _ExistingDefinitions:
    """The definitions that dynamic_events listed, and definitions that were written afterwards."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.events: set[str] = set()
        self._counts: dict[tuple[str, str, str], set[str]] = {}
        """(kind, event, rest) of a definition -> the values of maxactive of all definitions with this key.

        Each definition is also under a key with "" as the event, to find it for a new line that names no
        event.
        """
        for line in lines:
            definition = parse_definition(line)
            if definition is not None:
                self.add(definition)

    def add(self, definition: Definition) -> None:
        self.events.add(definition.event)
        for event in {definition.event, ""}:
            self._of(definition, event).add(definition.count)

    def has(self, wanted: Definition) -> bool:
        """Return True if the definition `wanted` exists.

        If `wanted` has no maxactive, a definition with any maxactive counts.
        """
        counts = self._of(wanted, wanted.event)
        return wanted.count in counts or (not wanted.count and bool(counts))

    def is_unsure(self, wanted: Definition) -> bool:
        """Return True if dynamic_events must be read again to know whether the definition `wanted` exists.

        If a new definition has no name or no maxactive, the kernel chooses a value. It may be the value that
        `wanted` has.
        """
        return (bool(wanted.event) and "" in self.events) or (
            bool(wanted.count) and "" in self._of(wanted, wanted.event)
        )

    def _of(self, definition: Definition, event: str) -> set[str]:
        return self._counts.setdefault((definition.kind, event, definition.rest), set())


def _last_error(log: str, value: str) -> tuple[str, int | None]:
    """Return the message of the newest entry of an error_log, and the index in `value` that it marks.

    The message is "" if there is no entry. The index is None if the entry marks nothing in `value`.
    """
    lines = log.splitlines()
    heads = [number for number, line in enumerate(lines) if line.startswith("[")]
    if not heads:
        return "", None
    entry = lines[heads[-1] :]
    message = entry[0].rpartition("error: ")[2]
    command = entry[1] if len(entry) > 1 else ""
    at = command.rfind(value) if value else -1
    if at < 0 or len(entry) < 3 or not CURSOR.match(entry[2]):
        return message, None
    return message, len(entry[2]) - 1 - at


class _ExistingTriggers:
    """The triggers that a trigger file listed, and triggers that were written afterwards."""

    def __init__(self, triggers: Iterable[str]) -> None:
        self._listed: dict[tuple[str, ...], list[_Trigger]] = {}
        """Key of a trigger -> triggers of the file with this key.

        A named histogram is listed under two keys: with its name and without it.
        """
        self._written: set[tuple[str, ...]] = set()
        """Keys of the triggers that the loader has written since it read the trigger file."""
        for text in triggers:
            trigger = _Trigger(text)
            for key in {trigger.key(), trigger.key(is_named=False)}:
                self._listed.setdefault(key, []).append(trigger)

    def has(self, text: str) -> bool:
        """Return True if the trigger file has listed the trigger that the command `text` sets."""
        wanted = _Trigger(text)
        return any(each.covers(wanted) for each in self._listed.get(wanted.key(), ()))

    def is_unsure(self, text: str) -> bool:
        """Return True if the file must be read again to know whether it has the trigger that `text` sets.

        The kernel adds default parameters to a trigger that was written. The trigger may therefore now equal
        the one in `text`.
        """
        return _Trigger(text).key() in self._written

    def written(self, text: str) -> None:
        trigger = _Trigger(text)
        self._written |= {trigger.key(), trigger.key(is_named=False)}


class _Trigger:
    """The parts of a trigger, from a line of a trigger file or from a command that sets the trigger."""

    def __init__(self, text: str) -> None:
        without_limit = re.sub(r"^([a-z_:\w]+?):\d+(?= |$)", r"\1", text)
        self._head, _, self._condition = without_limit.partition(" if ")
        self._parts = [_canonical(part) for part in self._head.split(":")]
        self._is_hist = self._parts[0] == "hist"

    def key(self, *, is_named: bool = True) -> tuple[str, ...]:
        """Return a tuple that is equal for a trigger and each trigger that covers it.

        For a histogram, it contains the condition, the keys and the name; otherwise, the command and the
        condition. `is_named`: include the name of a histogram. If False, leave the name out, to find the
        histogram for a command that gives no name.
        """
        if not self._is_hist:
            return (self._head, self._condition)
        prefixes = ("keys=", "name=") if is_named else ("keys=",)
        return (self._condition, *sorted(part for part in self._parts if part.startswith(prefixes)))

    def covers(self, wanted: _Trigger) -> bool:
        """Return True if this trigger, as the kernel shows it, is the one that the command `wanted` sets.

        The kernel also shows parameters that were not written, and the remaining count. The comparison
        ignores both.
        """
        if not wanted._is_hist:
            return (self._head, self._condition) == (wanted._head, wanted._condition)
        return set(wanted._parts) <= set(self._parts) and self._condition == wanted._condition


def _canonical(part: str) -> str:
    """Return the normal spelling of a part of a hist trigger: one spelling for all parts with one meaning."""
    name, equals, value = part.partition("=")
    name = SPELLINGS.get(name, name)
    match name:
        case "vals":
            value = ",".join(each for each in value.split(",") if each != "hitcount")
        case "sort":
            value = value.replace(".ascending", "")
        case "size" if value.isdecimal():
            # Linux: the size of a map is a power of two.
            value = str(1 << max(int(value) - 1, 0).bit_length())
    return f"{name}{equals}{value}"


def _makes_others(trigger: str) -> bool:
    """Return True if the kernel may create triggers on other events when `trigger` is set.

    It does so for a histogram with actions, to record the fields that the actions use.
    """
    return ":on" in trigger


def _report(line: Line, refused: DefinitionError) -> str:
    place = f"{line.file}:{line.number}" if line.number else line.file
    text = line.typed or line.text
    report = f"{place}: {refused}\n    {text}"
    cursor = -1 if refused.cursor is None else refused.cursor - len(line.text) + len(text)
    if cursor >= 0:
        # Linux: if the value at the end of a filter is missing, its position is after the end of the text.
        report += f"\n    {' ' * min(cursor, len(text))}^"
    return "\n".join(map(escape_for_terminal, report.split("\n")))
