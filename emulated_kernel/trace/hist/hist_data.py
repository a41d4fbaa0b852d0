"""HistData, the data of a histogram: it creates the histogram's fields and map, and counts hits."""

from __future__ import annotations

import errno
from collections.abc import Generator

from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.events.event import EventFile
from emulated_kernel.trace.hist.actions import Action
from emulated_kernel.trace.hist.attrs import HistAttrs, parse_variables
from emulated_kernel.trace.hist.expression import ExpressionParser
from emulated_kernel.trace.hist.field import (
    LATER_STACK_DEPTH,
    MAX_STRING,
    WORD,
    Flag,
    HistField,
    HistHit,
    Histogram,
    execname_value,
    make_field,
    set_variable,
    set_variables,
)
from emulated_kernel.trace.hist.hist_errors import HistError
from emulated_kernel.trace.hist.operators import leftmost_operand, remains_of
from emulated_kernel.trace.hist.services import HistServices
from emulated_kernel.trace.hist.tracing_map import (
    DEFAULT_BITS,
    KEYS_MAX,
    SORT_KEYS_MAX,
    VALS_MAX,
    Element,
    Rank,
    SortKey,
    TracingMap,
    Value,
)
from emulated_kernel.trace.hist.variables import Variables
from emulated_kernel.trace.interface import InterfaceRule
from emulated_kernel.trace.ring.trace_entry import RawEntry
from emulated_kernel.trace.text.error_log import LastCommandLog
from emulated_kernel.trace.trigger.triggers import EventTriggers
from emulated_kernel.util.errors import KernelError

HITCOUNT = "hitcount"
_NOT_FOR_VARIABLES = Flag.GRAPH | Flag.PERCENT | Flag.BUCKET | Flag.LOG2
_NOT_FOR_VALUES = Flag.BUCKET | Flag.LOG2 | Flag.SYM | Flag.SYM_OFFSET | Flag.SYSCALL | Flag.STACKTRACE


class HistData(Histogram):
    """The data of a histogram. Histogram triggers with the same name share one object.

    Mirrors: kernel/trace/trace_events_hist.c:struct hist_trigger_data (v6.1).
    """

    def __init__(
        self,
        triggers: EventTriggers,
        system: HistServices,
        file: EventFile,
        log: LastCommandLog,
        attrs: HistAttrs,
        *,
        removes: bool,
    ) -> None:
        """Create a histogram without fields; build() adds them.

        `removes`: whether the command begins with `!`, and so removes a histogram. If it does, it may define
        variables that already exist.
        """
        super().__init__(triggers, file, log, attrs)
        self.system = system
        self.removes = removes
        self.key_size = 0
        self.sort_keys: list[SortKey] = [SortKey()]
        self.actions: list[Action] = []
        self.made_hists: list[tuple[EventFile, str]] = []
        """(event, command) of each histogram that was created for this one on another event.

        Such a histogram reads a field of its event, which an action of this histogram needs.
        """
        self.variables = Variables(self, system)
        if InterfaceRule.HIST_COMMON_STACKTRACE in system.interface:
            self.chain_name = "common_stacktrace"
            self.stack_depth = LATER_STACK_DEPTH

    # Creation. Mirrors: create_hist_data, create_hist_fields (v6.1).

    def build(self) -> None:
        """Create the fields and the map from the attributes, after the actions have been parsed.

        Raises: KernelError EINVAL (an attribute is invalid), ENOMEM (a field is an array of numbers), EDOM
        (division by 0), ENOENT (`nohitcount` without another value).
        """
        self.variables.definitions = parse_variables(self.attrs, self.log)
        self._build_values()
        for number, (name, expression) in enumerate(self.variables.definitions):
            # Set before the expression is parsed, because operands after the first may use this variable.
            self.variables.definitions[number] = name, leftmost_operand(expression, self.variables.interface)
            self._build_variable(name, expression)
        self._build_keys()
        self.variables.definitions = []
        self._build_sort_keys()
        sums = len(self.sortable) - len(self.keys)
        bits = self.attrs.bits or DEFAULT_BITS
        self.map = TracingMap(bits, self.key_size, sums, self.system.memory)
        for each in self.fields:
            if each.flags & Flag.VAR:
                each.owner = self
                each.index = self.map.add_variable()

    def _build_values(self) -> None:
        self.values.append(make_field(self, None, Flag.HITCOUNT))
        names = self.attrs.vals.split(",") if self.attrs.vals is not None else []
        taken = 0
        while taken < min(len(names), VALS_MAX) and len(self.values) < VALS_MAX:
            name = names[taken]
            taken += 1
            if name != HITCOUNT:
                self.values.append(self._value(name, Flag(0), None))
        if names[taken:] and names[taken:] != [HITCOUNT]:
            raise KernelError(errno.EINVAL, "histogram: too many values")
        if self.attrs.no_hitcount and len(self.values) == 1:
            raise self.log.error(HistError.NEED_NOHC_VAL, code=errno.ENOENT)

    def _value(self, text: str, flags: Flag, variable: str | None) -> HistField:
        """Parse the expression of a value or a variable, and return its field.

        `flags`: flags of the new field. `variable`: name of the variable that is defined, or None for a
        value.

        Mirrors: kernel/trace/trace_events_hist.c:__create_val_field (v6.1).
        """
        made = ExpressionParser(self.variables).parse(text, flags, variable)
        refused = _NOT_FOR_VARIABLES if made.flags & Flag.VAR else _NOT_FOR_VALUES
        if made.flags & refused:
            raise self.log.error(HistError.BAD_FIELD_MODIFIER, remains_of(text))
        return made

    def _build_variable(self, name: str, expression: str) -> None:
        """Parse the definition of a variable, and add the variable.

        Mirrors: kernel/trace/trace_events_hist.c:create_var_field (v6.1).
        """
        if self.variables.exists(name) and not self.removes:
            raise self.log.error(HistError.DUPLICATE_VAR, name)
        made = self._value(expression, Flag.VAR, name)
        if made.flags & Flag.EXECNAME:
            made.flags = Flag.STRING | Flag.VAR | Flag.EXECNAME
            made.size = MAX_STRING
            made.is_signed = False
            made.type = "char[]"
            made.value = execname_value
        self.values.append(made)

    def _build_keys(self) -> None:
        names = (self.attrs.keys or "").split(",")
        for name in names[:KEYS_MAX]:
            made = self._key(name)
            made.size = made.size + 7 & ~7
            made.offset = self.key_size
            self.key_size += made.size
            if self.key_size > MAX_STRING + WORD * self.stack_depth:
                raise KernelError(errno.EINVAL, "histogram: the keys are too long")
            self.keys.append(made)
        if names[KEYS_MAX:]:
            raise KernelError(errno.EINVAL, "histogram: too many keys")

    def _key(self, text: str) -> HistField:
        """Parse a part of the key, and return its field.

        Mirrors: kernel/trace/trace_events_hist.c:create_key_field (v6.1).
        """
        if text == "stacktrace":
            return make_field(self, None, Flag.KEY | Flag.STACKTRACE)
        made = ExpressionParser(self.variables).parse(text, Flag.KEY)
        if _has_variables(made):
            raise self.log.error(HistError.INVALID_REF_KEY, leftmost_operand(text, self.variables.interface))
        return made

    def _build_sort_keys(self) -> None:
        """Parse the attribute `sort=` into sort keys.

        Mirrors: kernel/trace/trace_events_hist.c:create_sort_keys (v6.1).
        """
        if self.attrs.sort is None:
            return
        names = self.attrs.sort.split(",")
        self.sort_keys = []
        for number, text in enumerate(names[:SORT_KEYS_MAX]):
            name, dot, order = text.partition(".")
            if not text:
                raise self.log.error(HistError.EMPTY_SORT_FIELD, "sort=")
            if number == SORT_KEYS_MAX - 1 and names[SORT_KEYS_MAX:]:
                raise self.log.error(HistError.TOO_MANY_SORT_FIELDS, "sort=")
            if not name:
                raise self.log.error(HistError.EMPTY_SORT_FIELD, "sort=")
            index = self._sort_index(name)
            if dot and order not in ("ascending", "descending"):
                raise self.log.error(HistError.INVALID_SORT_MODIFIER, order)
            self.sort_keys.append(SortKey(index, order == "descending"))

    def _sort_index(self, name: str) -> int:
        if name == HITCOUNT:
            return 0
        for index, each in enumerate(self.sortable):
            if index and each.full_name() == name:
                return index
        raise self.log.error(HistError.INVALID_SORT_FIELD, name)

    # Queries

    def has_variables(self) -> bool:
        """Return True if the histogram defines variables or refers to variables.

        Mirrors: kernel/trace/trace_events_hist.c:has_hist_vars (v6.1).
        """
        return bool(self.references) or any(_has_variables(each) for each in self.fields)

    def is_referred_to(self) -> bool:
        """Return True if another histogram uses a variable of this histogram.

        Mirrors: kernel/trace/trace_events_hist.c:check_var_refs (v6.1).
        """
        return any(
            reference.owner is self
            for other in self.system.with_variables(self.triggers.array)
            if other is not self
            for reference in other.references
        )

    @property
    def sortable(self) -> list[HistField]:
        """Fields by which elements may be sorted: the hit count, other values, and keys."""
        return [each for each in self.fields if not each.flags & Flag.VAR]

    def elements(self) -> Generator[None, None, list[Element]]:
        """Return the map's elements, sorted by the sort keys, as the return value of a generator.

        The generator yields after each step of the sort; see TracingMap.sorted().
        """
        return self.map.sorted(*(self._ranking(key) for key in self.sort_keys))

    def _ranking(self, key: SortKey) -> Rank:
        part = self.sortable[key.index]
        sign = -1 if key.descending else 1
        if part.flags & Flag.KEY:
            return lambda element: sign * _rank(part, element.key)
        return lambda element: sign * element.sums[key.index]

    # Hits

    def count(self, hit: ProbeHit, entry: RawEntry) -> None:
        """Count a hit, and run the histogram's actions.

        If a variable of another histogram is needed but not set, do nothing. If one of the histogram's own is
        needed but not set, count the hit, but run no actions.

        Mirrors: kernel/trace/trace_events_hist.c:event_hist_trigger (v6.1).
        """
        now = HistHit(hit, entry, self.triggers.array.now)
        key = b"".join(self._key_bytes(part, now) for part in self.keys)
        references: list[Value] = [0] * len(self.references)
        if not self._resolve(key, references, own=False):
            return
        element = self.map.insert(key, now.comm)
        if element is None:
            return
        now.element = element
        now.references = tuple(references)
        self._update(now, element)
        if self._resolve(key, references, own=True):
            now.references = tuple(references)
            for action in self.actions:
                action.run(now, element, key)

    def _key_bytes(self, part: HistField, hit: HistHit) -> bytes:
        value = part.value(hit)
        if isinstance(value, bytes):
            end = part.size if part.flags & Flag.STACKTRACE else part.size - 1
            return value[:end].ljust(part.size, b"\0")
        return value.to_bytes(8, "little").ljust(part.size, b"\0")

    def _resolve(self, key: bytes, values: list[Value], *, own: bool) -> bool:
        """Store values of variables that the histogram refers to; return False if one is not set, else True.

        `values`: where to store them, one item for each of the histogram's references. `own`: if True, read
        only the histogram's own variables. If False, read only those of other histograms, and unset each one
        whose reference has `read_once`. `key`: key of the elements that hold the variables.

        Mirrors: kernel/trace/trace_events_hist.c:resolve_var_refs (v6.1).
        """
        for index, reference in enumerate(self.references):
            if (reference.owner is self) is not own:
                continue
            element = reference.owner.map.lookup(key)
            if element is None or reference.index not in element.variables:
                return False
            values[index] = element.variables[reference.index]
            if reference.read_once and not own:
                del element.variables[reference.index]
        return True

    def _update(self, hit: HistHit, element: Element) -> None:
        """Add a hit to the sums of its element, and set the variables of the element.

        Mirrors: kernel/trace/trace_events_hist.c:hist_trigger_elt_update (v6.1).
        """
        for index, each in enumerate(self.values):
            if each.flags & Flag.VAR:
                set_variable(element, each, each.value(hit))
            else:
                element.sums[index] = element.sums[index] + each.number(hit) & (1 << 64) - 1
        set_variables(element, self.field_variables, hit)


def _has_variables(each: HistField, level: int = 0) -> bool:
    """Return True if a field or one of its operands is a variable, or a reference to a variable.

    `level`: nesting depth of the field. As in Linux, operands nested deeper than 3 are ignored.
    Mirrors: kernel/trace/trace_events_hist.c:field_has_hist_vars (v6.1).
    """
    if level > 3:
        return False
    if each.flags & (Flag.VAR | Flag.VAR_REF):
        return True
    return any(_has_variables(operand, level + 1) for operand in each.operands)


def _rank(part: HistField, key: bytes) -> int:
    """Return the number by which the element with the key `key` is sorted if the sort key is `part`.

    `part`: one of the fields of which the key consists. Strings are ordered by their bytes. As in Linux, the
    number is 0 for all stack traces and for all values of `common_comm`.
    """
    if part.flags & Flag.STACKTRACE or (part.flags & Flag.COMM and part.field is None):
        return 0
    data = key[part.offset : part.offset + part.size]
    if part.field is None or part.flags & Flag.CPU:
        return int.from_bytes(data[:8], "little", signed=part.is_signed)
    if part.flags & Flag.STRING:
        return int.from_bytes(data, "big")
    return int.from_bytes(data[: part.field.size], "little", signed=part.field.is_signed)
