"""Text of histograms: a histogram's line in the trigger file, and the contents of the hist file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from emulated_kernel.trace.hist.actions import ActionKind, Handler, TrackedSnapshot
from emulated_kernel.trace.hist.field import Flag, HistField
from emulated_kernel.trace.hist.hist_data import HistData
from emulated_kernel.trace.hist.tracing_map import U64, Element, Value
from emulated_kernel.trace.symbols import KernelSymbols, sprint_symbol, sprint_symbol_no_offset
from emulated_kernel.trace.text.chars import bytes_to_text, to_text
from emulated_kernel.util.control_lock import PAUSE

_BAR_SIZE = 20


def command_text(data: HistData) -> str:
    """Return the histogram's command as the trigger file shows it, without `hist:`, filter and state.

    Mirrors: kernel/trace/trace_events_hist.c:event_hist_trigger_print (v6.1).
    """
    keys = [_chain_name(key) if key.flags & Flag.STACKTRACE else key.show() for key in data.keys]
    values = [each.show() for each in data.values[1:] if not each.flags & Flag.VAR]
    variables = [each.show() for each in data.values if each.flags & Flag.VAR]
    if not data.attrs.no_hitcount:
        values.insert(0, "hitcount")
    text = f"keys={','.join(keys)}:vals={','.join(values)}"
    if variables:
        text += f":{','.join(variables)}"
    text += f":sort={','.join(_sort_texts(data))}:size={1 << data.map.bits}"
    if data.uses_time:
        text += f":clock={data.attrs.clock}"
    if data.attrs.no_hitcount:
        text += ":nohitcount"
    return text + "".join(action.show() for action in data.actions)


def _chain_name(key: HistField) -> str:
    """Return the name under which a key that is a call chain is shown."""
    if key.field is not None:
        return f"{key.field.name}.stacktrace"
    return key.full_name() or key.owner.chain_name or "stacktrace"


def _sort_texts(data: HistData) -> list[str]:
    names = [data.sortable[key.index].show() if key.index else "hitcount" for key in data.sort_keys]
    orders = [".descending" if key.descending else "" for key in data.sort_keys]
    return [name + order for name, order in zip(names, orders, strict=True)]


class HistPrinter:
    """Printer of one histogram for the hist file."""

    def __init__(self, data: HistData, symbols: KernelSymbols) -> None:
        self._data = data
        self._symbols = symbols
        self._syscall_name = data.system.syscall_name
        self._columns = [
            (index, each)
            for index, each in enumerate(data.values)
            if index and not each.flags & (Flag.VAR | Flag.EXPR)
        ]

    def records(self, line: str) -> Iterator[str]:
        """Yield the histogram's text in the hist file: its head, one part for each element, and the totals.

        The elements are sorted first, and PAUSE is yielded after each step of the sort. While the generator
        is suspended, hits may be counted. `line`: the trigger's line in the trigger file.
        Mirrors: kernel/trace/trace_events_hist.c:hist_trigger_show (v6.1).
        """
        sorting = self._data.elements()
        while True:
            try:
                next(sorting)
            except StopIteration as end:
                elements: list[Element] = end.value
                break
            yield PAUSE
        yield f"# event histogram\n#\n# trigger info: {to_text(line)}\n#\n\n"
        scales = {index: self._scale(index, column, elements) for index, column in self._columns}
        for element in elements:
            yield self._entry(element, scales)
        counts = self._data.map
        yield (
            f"{self._snapshot()}"
            f"\nTotals:\n    Hits: {counts.hits}\n    Entries: {len(elements)}\n    Dropped: {counts.drops}\n"
        )

    @staticmethod
    def _scale(index: int, column: HistField, elements: Sequence[Element]) -> int:
        """Return what a column shows as 100 %: the sum for the modifier percent, the maximum for graph.

        Both are of all `elements`. `index`: index of the column in Element.sums. Return 0 for columns with
        other modifiers.
        """
        if column.flags & Flag.PERCENT:
            return sum(each.sums[index] for each in elements) & U64
        if column.flags & Flag.GRAPH:
            return max((each.sums[index] for each in elements), default=0)
        return 0

    def _entry(self, element: Element, scales: Mapping[int, int]) -> str:
        text = self._key(element.key, element.comm)
        if not self._data.attrs.no_hitcount:
            text += f" hitcount: {element.sums[0]:10}"
        for index, column in self._columns:
            text += f"  {self._value(index, column, element, scales[index])}"
        return f"{text}{self._actions(element)}\n"

    # Keys. Mirrors: hist_trigger_print_key (v6.1).

    def _key(self, key: bytes, comm: bytes) -> str:
        parts = [self._key_part(part, key[part.offset :], comm) for part in self._data.keys]
        multiline = any(part.is_shown_as_chain for part in self._data.keys)
        return f"{{ {', '.join(parts)}{'' if multiline else ' '}}}"

    def _key_part(self, part: HistField, key: bytes, comm: bytes) -> str:
        if part.is_shown_as_chain:
            # Linux: the first caller follows the name of a field immediately.
            separator = ":\n" if part.field is None else ""
            return f"{_chain_name(part)}{separator}{self._stack(key[: part.size])}"
        return f"{to_text(part.full_name())}: {self._key_value(part, key, comm)}"

    def _key_value(self, part: HistField, key: bytes, comm: bytes) -> str:
        value = int.from_bytes(key[:8], "little")
        flags = part.flags
        if flags & Flag.HEX:
            return f"{value:x}"
        if flags & Flag.SYM:
            return f"[{value:x}] {sprint_symbol_no_offset(self._symbols, value):<45}"
        if flags & Flag.SYM_OFFSET:
            return f"[{value:x}] {sprint_symbol(self._symbols, value):<55}"
        if flags & Flag.EXECNAME:
            return f"{_padded(comm, 16)}[{value:10}]"
        if flags & Flag.SYSCALL:
            return f"{self._syscall_name(value) or 'unknown_syscall':<30}[{value:3}]"
        if flags & Flag.LOG2:
            return f"~ 2^{value:<2}"
        if flags & Flag.BUCKET:
            return f"~ {value}-{value + part.buckets - 1 & U64}"
        if flags & Flag.STRING:
            return _padded(key[: part.size].partition(b"\0")[0], 50)
        return f"{value:10}"

    def _stack(self, data: bytes) -> str:
        text = ""
        for at in range(0, len(data), 8):
            address = int.from_bytes(data[at : at + 8], "little")
            if not address:
                break
            text += f"{'':9}{sprint_symbol(self._symbols, address)}\n"
        return text

    # Values. Mirrors: hist_trigger_print_val (v6.1).

    @staticmethod
    def _value(index: int, column: HistField, element: Element, scale: int) -> str:
        name = to_text(column.full_name())
        value = element.sums[index]
        if column.flags & Flag.PERCENT:
            share = _percentage(value, scale)
            if share is None:
                return f"{name} (%):[ERROR]"
            return f"{name} (%): {share // 100:3}.{share % 100:02}"
        if column.flags & Flag.GRAPH:
            share = _percentage(value, scale)
            bar = "[ERROR]" if share is None else "#" * min(share * _BAR_SIZE // 10000, _BAR_SIZE)
            return f"{name}: {bar:>20}" if share is None else f"{name}: {bar:<20}"
        return f"{name}: {value:10x}" if column.flags & Flag.HEX else f"{name}: {value:10}"

    # Actions. Mirrors: print_actions, track_data_snapshot_print (v6.1).

    def _actions(self, element: Element) -> str:
        text = ""
        for action in self._data.actions:
            if action.kind is ActionKind.SNAPSHOT or action.handler is Handler.ONMATCH:
                continue
            title = "max" if action.handler is Handler.ONMAX else "changed"
            text += f"\n\t{title}: {action.track_value(element):10}"
            for saved in self._data.saved_variables:
                value = element.variables.get(saved.variable.index, 0)
                is_string = bool(saved.value.flags & Flag.STRING)
                text += f"  {to_text(saved.variable.variable or '')}: {_saved(value, is_string)}"
        return text

    def _snapshot(self) -> str:
        taken = self._data.triggers.array.snapshot.condition
        action = next((each for each in self._data.actions if each.kind is ActionKind.SNAPSHOT), None)
        if action is None or not isinstance(taken, TrackedSnapshot) or not taken.updated:
            return ""
        return (
            "\nSnapshot taken (see tracing/snapshot).  Details:\n"
            f"\ttriggering value {{ {action.handler.value}({action.tracked_name}) }}: {taken.value:10}"
            f"\ttriggered by event with key: {self._key(taken.key, taken.comm)}\n"
        )


def _saved(value: Value, is_string: bool) -> str:
    if is_string:
        return _padded(value if isinstance(value, bytes) else b"(null)", 32)
    return f"{value if isinstance(value, int) else 0:10}"


def _padded(data: bytes, size: int) -> str:
    """Return bytes as text, padded with spaces to `size` bytes; printk does this for `%-SIZEs`."""
    return bytes_to_text(data.ljust(size))


def _percentage(value: int, total: int) -> int | None:
    """Return `value` as a share of `total`, in hundredths of a percent; 0 if both are 0.

    Return None if only `total` is 0. Also return None if `value` * 10000 needs more than 64 bits and `total`
    is below 10000.
    Mirrors: kernel/trace/trace_events_hist.c:__get_percentage (v6.1).
    """
    if total and value >= U64 // 10000:
        total //= 10000
        return value // total & 0xFFFFFFFF if total else None
    if total:
        return value * 10000 // total & 0xFFFFFFFF
    return None if value else 0
