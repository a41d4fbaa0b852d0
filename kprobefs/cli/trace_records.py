"""The records of `kprobefs trace`: lines of trace_pipe, which are shown as text or as objects for JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

from kprobefs.common import terminal
from kprobefs.common.errors import escape_for_terminal

HEAD = (
    r"\s*(?P<comm>.{0,15})-(?P<pid>\d+)\s+(?:\(\s*\S+\)\s+)?\[(?P<cpu>\d+)\]\s+(?P<flags>\S+)\s+"
    r"(?P<time>[\d.]+): "
)
"""Regular expression of the head of a line of trace_pipe, with the default options.

Hazard: a command's name and an event's text may contain any characters, even some that look like a head.
"""
LINE = re.compile(rf"{HEAD}(?P<event>\w+): (?P<text>.*)$")
FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')
CALL = re.compile(
    rf"(?P<before>{HEAD})sys_(?P<name>\w+)(?P<text>\((?P<arguments>.*)\)| -> (?P<result>0x[0-9a-f]+))$"
)
"""Matches a line of an event sys_enter_NAME or sys_exit_NAME: `sys_NAME(...)` or `sys_NAME -> 0x...`."""
PRINT_FMT = re.compile(r'^print fmt: "((?:[^"\\]|\\.)*)"(.*)', re.MULTILINE)
STACK = re.compile(rf"{HEAD}<stack trace>$")
FRAME = re.compile(r" => (.*)$")
GRAPH = re.compile(
    r"\s*(?P<time>\d+\.\d+) \|\s+(?P<cpu>\d+)\)\s+(?P<comm>.{1,15}?)-(?P<pid>\d+)\s+\|[^|]*?"
    r"(?:(?P<duration>\d+\.\d+) us)?\s+\|  (?P<text>.*)$"
)
"""Matches a line of the function graph tracer with the options funcgraph-abstime and funcgraph-proc."""
GRAPH_CALL = re.compile(
    r"(?P<indent> *)(?:(?P<function>[^\s(]+)(?P<entry>\(\) \{|\(\);)|\} /\* (?P<left>[^\s*]+) \*/)"
)
GRAPH_EVENT = re.compile(r" */\* (\w+): (.*) \*/$")
NUMBERS = "diux"
"""Conversion letters of printf that print a number."""
Layout = tuple[re.Pattern[str], list[tuple[str, str]]]
"""Regular expression of an event's text, and for each group in it: (name, conversion letter of printf)."""
Layouts = dict[str, list[Layout]]
"""Name of an event -> layouts of the events with that name."""
CONVERSION = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?(?:hh?|ll?|L|z)?(p[a-zA-Z0-9]*|[a-zA-Z%])")


class RecordParser:
    """Converts lines of trace_pipe to JSON objects, and adds each call stack to the object of its record."""

    def __init__(self) -> None:
        self._layouts: Layouts = {}
        self._last: dict[int, dict[str, object]] = {}
        """CPU -> object of its last record, which is not yielded yet, because a stack may follow."""
        self._stack: list[str] | None = None
        """Lines of the call stack that is being read; None outside of a stack."""

    def add_layout(self, event: str, format_file: str) -> None:
        """Add the layout of the event called `event`, from the text of its `format` file."""
        self._layouts.setdefault(event, []).append(layout(format_file))

    def feed(self, line: str) -> Iterator[dict[str, object]]:
        """Process a line of trace_pipe, and yield the objects that are complete now.

        The object of a record is complete when the next record of its CPU comes, because a stack may follow a
        record.
        """
        if self._stack is not None and (frame := FRAME.match(line)):
            self._stack.append(frame[1])
            return
        self._stack = None
        if (head := STACK.match(line)) and (before := self._last.get(int(head["cpu"]))) is not None:
            self._stack = []
            before["stack"] = self._stack
            return
        if not line:
            return
        for found in _objects(line, self._layouts):
            cpu = found.get("cpu")
            if isinstance(cpu, int):
                if cpu in self._last:
                    yield self._last.pop(cpu)
                self._last[cpu] = found
            else:
                yield found

    def rest(self) -> Iterator[dict[str, object]]:
        """At the end of trace_pipe, yield the last object of each CPU."""
        yield from self._last.values()
        self._last = {}


def _objects(line: str, layouts: Layouts) -> Iterator[dict[str, object]]:
    """Yield the objects of a line of trace_pipe.

    A line has one object, except that of a traced function that calls no other traced function. Such a line
    has two objects: one for the function's entry and one for its exit.
    """
    found = GRAPH.match(line)
    if found is None:
        yield record(line, layouts)
        return
    text = found["text"]
    head = {name: found[name] for name in ("time", "cpu", "comm", "pid")}
    if event := GRAPH_EVENT.match(text):
        # Give the line the head that other tracers write, so that record() can parse it.
        yield record(
            f"{head['comm']:>16}-{head['pid']} [{head['cpu']}] ..... {head['time']}: {event[1]}: {event[2]}",
            layouts,
        )
        return
    shown = {"time": float(head["time"]), "cpu": int(head["cpu"]), "pid": int(head["pid"])}
    call = GRAPH_CALL.match(text)
    if call is None:
        yield {"text": line}
        return
    fields: dict[str, object] = {"func": call["function"] or call["left"], "depth": len(call["indent"]) // 2}
    if call["entry"]:
        yield {**shown, "comm": head["comm"], "event": "funcgraph_entry", "fields": fields, "text": text}
    if call["entry"] != "() {":
        fields = {**fields, "us": float(found["duration"] or 0)}
        yield {**shown, "comm": head["comm"], "event": "funcgraph_exit", "fields": fields, "text": text}


def text_line(line: str, output: TextIO) -> str:
    """Return a line of trace_pipe for `output`, with unprintable characters escaped.

    On a terminal, the line is also wrapped, and the event's name is coloured.
    """
    text = terminal.wrap(escape_for_terminal(line), output, "    ")
    found = LINE.match(line)
    if found is None or not terminal.has_colours(output):
        return text
    return text.replace(f" {found['event']}: ", f" \033[36m{found['event']}\033[0m: ", 1)


def layout(text: str) -> Layout:
    """Return the layout of an event, from the text of its `format` file.

    Each value in the event's text is a group of the regular expression. The group's name is the word before
    the "=" that precedes the value. If there is no such word, and each printed value is a whole field, the
    name is that of the field. Otherwise, or if the name begins with "__", it is "".
    """
    found = PRINT_FMT.search(text)
    if found is None:
        return re.compile("(?!)"), []
    # Literal text and the last letters of the conversion after it alternate.
    *parts, rest = CONVERSION.split(re.sub(r"\\(.)", r"\1", found[1]))
    entry = re.findall(r"REC->(\w+)", found[2])
    is_plain = len(entry) == len(parts) // 2 and "{" not in found[1]
    pattern = ""
    fields = []
    for number, (literal, conversion) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        if number and not literal:
            continue
        named = re.search(r'(\w+)="?(?:0x)?$', literal)
        name = named[1] if named else entry[number] if is_plain else ""
        fields.append(("" if name.startswith("__") else name, conversion))
        pattern += re.escape(literal) + (r"(\S+?)" if conversion[0] in NUMBERS else "(.*?)")
    return re.compile(f"{pattern}{re.escape(rest)}"), fields


def record(line: str, layouts: Layouts) -> dict[str, object]:
    """Return a line of trace_pipe as an object for JSON, with only the key `text` if the line is no record.

    If no layout of the event matches, each NAME=VALUE in the text is a field.
    """
    fields: dict[str, object] = {}
    if call := CALL.match(line):
        kind = "exit" if call["arguments"] is None else "enter"
        fields = (
            {"ret": _signed(int(call["result"], 16))} if call["result"] else _arguments(call["arguments"])
        )
        line = f"{call['before']}sys_{kind}_{call['name']}: sys_{call['name']}{call['text']}"
    found = LINE.match(line)
    if found is None:
        return {"text": line}
    if call is None:
        fields = {name: _value(text) for name, text in FIELD.findall(found["text"])}
        for pattern, names in layouts.get(found["event"], ()):
            if values := pattern.fullmatch(found["text"]):
                named = set(re.findall(r"(\w+)=", pattern.pattern))
                fields = {name: value for name, value in fields.items() if name in named}
                values_of: dict[str, list[int | str]] = {}
                for (name, conversion), text in zip(names, values.groups(), strict=True):
                    values_of.setdefault(name, []).append(_converted(text, conversion))
                fields |= {name: each if each[1:] else each[0] for name, each in values_of.items() if name}
    return {
        "time": float(found["time"]),
        "cpu": int(found["cpu"]),
        "pid": int(found["pid"]),
        "comm": found["comm"],
        "event": found["event"],
        "fields": fields,
        "text": found["text"],
    }


def _arguments(text: str) -> dict[str, object]:
    """Return a map of a system call's arguments: name -> value.

    `text`: the arguments in the form `NAME: VALUE, ...`, with hexadecimal values.
    """
    pairs = (each.partition(": ") for each in text.split(", ") if each)
    # The option verbose prints the type before the name.
    return {name.rpartition(" ")[2]: _converted(value, "x") for name, _, value in pairs}


def _converted(text: str, conversion: str) -> int | str:
    if conversion[0] in NUMBERS:
        with suppress(ValueError):
            return int(text, 16 if conversion == "x" else 10)
    return text


def _signed(word: int) -> int:
    return word - (word >> 63 << 64)


def _value(text: str) -> int | str:
    if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", text):
        return int(text, 0) if "x" in text else int(text)
    return text[1:-1] if text.startswith('"') else text
