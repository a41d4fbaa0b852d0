"""Checks, without a mount, of settings: lines of a definitions file that write a value to a file.

The checks are about the events and functions that a line names, the filters of events, and the names of
triggers. Other values are not checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from functools import cached_property

from emulated_kernel.trace.filter.filter_errors import FilterParseError
from emulated_kernel.trace.filter.parse import parse_event_filter
from emulated_kernel.trace.filter.words import FilterWords
from emulated_kernel.trace.text.chars import SPACES, decode_command
from emulated_kernel.util.lazy_pattern import lazy_pattern
from emulated_kernel.util.similar_names import similar_names, similar_names_hint
from kprobefs.common.similar_symbols import nearest_symbols
from kprobefs.definitions.syntax import (
    DEFINING,
    SETTING,
    Line,
    parse_definition,
    refused_path,
    unescaped,
)
from kprobefs.plan.answer import ACCEPTED, UNCHECKED, Answer, Finding
from kprobefs.plan.offline_engine import OfflineEngine
from kprobefs.plan.planned_kernel import PlannedKernel

_EVENT_FILE = lazy_pattern(r"(?:instances/[^/]+/)?events/(?P<group>[^/]+)/(?P<name>[^/]+)/(?P<file>[^/]+)")
_SWITCHED = lazy_pattern(r"!?(?:enable|disable)_(?:event|hist):(?P<group>[^:\s]+):(?P<name>[^:\s]+)")
"""Pattern for the start of a trigger that enables or disables another event or its histogram."""
_FUNCTION_LISTS = frozenset(
    {"set_ftrace_filter", "set_ftrace_notrace", "set_graph_function", "set_graph_notrace"}
)
_FUNCTION = lazy_pattern(r"[A-Za-z_][\w.]*")
_ANY_CPUS = 8192
"""Number of CPUs that the checks assume, because the kernel does not run: the largest CONFIG_NR_CPUS."""


class SettingChecks:
    """Checks of the settings in one file of definitions, for one kernel."""

    def __init__(self, kernel: PlannedKernel, engine: OfflineEngine) -> None:
        """Prepare checks for `kernel`. `engine` holds the events that the lines before a setting define."""
        self._kernel = kernel
        self._engine = engine
        self._others: set[str] = set()
        """GROUP/NAME of the events whose definitions the engine has refused or does not check.

        "" is in the set if the kernel chooses the name of such an event.
        """
        self._words = FilterWords(
            kernel.interface, _ANY_CPUS, kernel.whole.judge.arch.word_size, self._function_range
        )

    def named(self, text: str) -> None:
        """Remember the name of the event that the definition `text` defines, so that it counts as known.

        Call this for definitions that the engine has refused or does not check.
        """
        definition = parse_definition(text)
        if definition is not None:
            self._others.add(definition.event)

    def answer(self, line: Line) -> Answer:
        """Return the answer to a setting; its outcome is an errno's name, ACCEPTED or UNCHECKED."""
        setting = SETTING.match(line.text)
        assert setting is not None
        path = unescaped(setting["file"])
        value = setting["value"] or ""
        if why := refused_path(path):
            return Answer(line, "EINVAL", findings=[Finding("EINVAL", True, f"EINVAL: {why}", 0)])
        column = setting.start("value")
        name = path.rpartition("/")[2]
        if name in DEFINING:
            self.named(value)
        if name in _FUNCTION_LISTS:
            return Answer(line, UNCHECKED, findings=[*self._no_function(value, column)])
        found = _EVENT_FILE.fullmatch(path)
        if found is None:
            return Answer(line, UNCHECKED)
        findings = [*self._no_event(found["group"], found["name"], 0)]
        if found["file"] == "trigger":
            return self._trigger(line, value, column, findings)
        if found["file"] == "filter" and not findings:
            return self._filter(line, found["group"], found["name"], value, column)
        return Answer(line, UNCHECKED, findings=findings)

    def _filter(self, line: Line, group: str, name: str, value: str, column: int) -> Answer:
        event = self._engine.registry.find(group, name)
        if event is None or not event.fields:
            return Answer(line, UNCHECKED)
        text = decode_command(value.encode("utf-8", "surrogateescape")).rstrip(SPACES)
        try:
            if text != "0":
                parse_event_filter(text, event.fields, self._words)
        except FilterParseError as error:
            told = error.strerror if error.error is None else self._engine.error_log.text_of(error.error)
            rule = error.name if error.error is None else error.error.name
            at = min(column + error.column, len(line.text))
            return Answer(line, error.name, findings=[Finding(rule, True, f"{error.name}: {told}", at)])
        return Answer(line, ACCEPTED)

    def _trigger(self, line: Line, value: str, column: int, findings: list[Finding]) -> Answer:
        name = re.split(r"[:\s]", value.removeprefix("!"), maxsplit=1)[0]
        if name not in self._kernel.triggers:
            message = f"EINVAL: this kernel has no trigger {name}"
            return Answer(line, "EINVAL", findings=[*findings, Finding("EINVAL", True, message, column)])
        if switched := _SWITCHED.match(value):
            at = column + switched.start("group")
            findings += self._no_event(switched["group"], switched["name"], at)
        return Answer(line, UNCHECKED, findings=findings)

    def _no_event(self, group: str, name: str, column: int) -> Iterator[Finding]:
        """Yield a warning if neither the kernel nor an earlier line has the event `group`/`name`.

        `column`: column of the event in its line. This is not an error, because a module or another file may
        define the event.
        """
        registry = self._engine.registry
        is_known = registry.find(group, name) is not None or not self._others.isdisjoint(
            (f"{group}/{name}", "")
        )
        if is_known or (not self._kernel.has_event_names and not registry.has_group(group)):
            return
        if registry.has_group(group):
            near = [f"{group}/{each}" for each in similar_names(name, registry.in_group(group))]
        else:
            near = similar_names(group, registry.groups())
        message = (
            f"neither the kernel nor a line before has the event {group}/{name}{similar_names_hint(near)}"
        )
        yield Finding("no-event", False, message, column)

    def _no_function(self, value: str, column: int) -> Iterator[Finding]:
        """Yield a warning for each word of the list `value` that names a function which ftrace cannot trace.

        `column`: column of the list in its line. Patterns, numbers and words with `:mod:` are not checked.
        """
        for word in re.finditer(r"\S+", value):
            name, _, after = word[0].removeprefix("!").partition(":")
            if after.startswith("mod:") or not _FUNCTION.fullmatch(name):
                continue
            kallsyms = self._kernel.tables.kallsyms
            found = kallsyms.by_name(name)
            if any(each.address in self._traced for each in found):
                continue
            why = "is not a function that ftrace can trace"
            if not found:
                near = nearest_symbols(name, kallsyms)
                why = f"is no symbol of this kernel{similar_names_hint(near)}"
            yield Finding("no-function", False, f"{name} {why}", column + word.start())

    @cached_property
    def _traced(self) -> Set[int]:
        """Return the addresses of the functions that ftrace can trace."""
        tables = self._kernel.tables
        places = (tables.kallsyms.lookup(site) for site in tables.mcount)
        return {place.symbol.address for place in places if place is not None}

    def _function_range(self, place: str | int) -> range | None:
        kallsyms = self._kernel.tables.kallsyms
        address = kallsyms.lookup_name(place) if isinstance(place, str) else place
        found = kallsyms.lookup(address) if address else None
        if found is None:
            return None
        return range(found.symbol.address, found.symbol.address + found.symbol.size)
