"""Preparation of a histogram's actions: look up their names, and create variables for the fields they use.

Mirrors: kernel/trace/trace_events_hist.c:create_actions (v6.1).
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from emulated_kernel.trace.events.event import EventFile
from emulated_kernel.trace.hist.actions import Action, ActionKind, Handler, TrackedSnapshot
from emulated_kernel.trace.hist.expression import ExpressionParser
from emulated_kernel.trace.hist.field import MAX_STRING, FieldVariable, Flag, HistField, Histogram
from emulated_kernel.trace.hist.hist_data import HistData
from emulated_kernel.trace.hist.hist_errors import HistError
from emulated_kernel.trace.hist.operators import qualified, remains_of
from emulated_kernel.trace.hist.services import hists_of, holders_of
from emulated_kernel.trace.hist.variables import find_file_variable
from emulated_kernel.trace.synth.synth_event import FIELDS_MAX
from emulated_kernel.util.errors import KernelError

MakeHist = Callable[[HistData, EventFile, str], None]
"""Function that creates a histogram on another event.

It takes the histogram that needs the new one, the other event, and the command.

Raises: KernelError (errors of the command).
"""
_TRACKS = {Handler.ONMAX: "__max", Handler.ONCHANGE: "__change"}


class ActionMaker:
    """Prepares the actions of one histogram."""

    def __init__(self, data: HistData, make_hist: MakeHist) -> None:
        self._data = data
        self._log = data.log
        self._make_hist = make_hist

    def create(self, action: Action) -> None:
        """Prepare an action, so that hits can run it.

        Raises: KernelError EINVAL (malformed, or a name is unknown), EEXIST (a second save), EBUSY (a second
        snapshot), ENOMEM (no memory, or too many references), errors of creating another histogram.
        """
        if action.handler is not Handler.ONMATCH:
            self._track(action)
        match action.kind:
            case ActionKind.TRACE:
                self._trace(action)
            case ActionKind.SAVE:
                self._save(action)
            case ActionKind.SNAPSHOT:
                self._snapshot(action)

    def _track(self, action: Action) -> None:
        """Create the variable that keeps the tracked variable's greatest (onmax) or latest (onchange) value.

        Mirrors: kernel/trace/trace_events_hist.c:track_data_create (v6.1).
        """
        if not action.tracked_name.startswith("$"):
            raise self._log.error(HistError.ONX_NOT_VAR, action.tracked_name)
        name = action.tracked_name[1:]
        variable = self._data.variable(name)
        if variable is None:
            raise self._log.error(HistError.ONX_VAR_NOT_FOUND, name)
        action.tracked = self._refer_to(variable, None, None)
        with self._log.instead(HistError.ONX_VAR_CREATE_FAIL):
            action.track_index = self._new_variable(_TRACKS[action.handler], 8, "u64", Flag(0)).index

    def _refer_to(self, variable: HistField, system: str | None, event_name: str | None) -> HistField:
        reference = self._data.variables.refer_to(variable, system, event_name)
        if reference is None:
            raise KernelError(errno.ENOMEM, "histogram: too many references to variables")
        return reference

    def _new_variable(self, name: str, size: int, type_: str, flags: Flag) -> HistField:
        """Create a variable of the histogram, and return it.

        `size`, `type_`: size in bytes and C type of the value. `flags`: further Flag bits.
        Mirrors: kernel/trace/trace_events_hist.c:create_var (v6.1).
        """
        data = self._data
        if data.variables.exists(name) and not data.removes:
            raise KernelError(errno.EINVAL, f"histogram: the variable {name!r} already exists")
        made = HistField(data, Flag.VAR | flags, size=size, type=type_, variable=name)
        made.index = data.map.add_variable()
        return made

    def _snapshot(self, action: Action) -> None:
        """Allocate the trace array's snapshot buffer, and make `action` the condition of its snapshots.

        Mirrors: kernel/trace/trace.c:tracing_snapshot_cond_enable (v6.1).
        """
        snapshot = self._data.triggers.array.snapshot
        snapshot.allocate()
        if snapshot.condition is not None:
            raise KernelError(errno.EBUSY, "snapshot: another histogram already takes snapshots")
        snapshot.condition = TrackedSnapshot(action)

    def _save(self, action: Action) -> None:
        if self._data.saved_variables:
            raise self._log.error(HistError.TOO_MANY_SAVE_ACTIONS, code=errno.EEXIST)
        for param in action.params:
            with self._log.instead(HistError.FIELD_VAR_CREATE_FAIL, remains_of(param)):
                self._data.saved_variables.append(self._field_variable(param))

    def _field_variable(self, name: str) -> FieldVariable:
        """Create a variable for the field `name` of the histogram's own event.

        Mirrors: kernel/trace/trace_events_hist.c:create_field_var (v6.1).
        """
        if len(self._data.field_variables) >= FIELDS_MAX:
            raise self._log.error(HistError.TOO_MANY_FIELD_VARS, name)
        with self._log.instead(HistError.FIELD_VAR_PARSE_FAIL, remains_of(name)):
            value = ExpressionParser(self._data.variables).atom(name, Flag.VAR)
        name = remains_of(name)
        with self._log.instead(HistError.VAR_CREATE_FIND_FAIL, name):
            flags = value.flags & Flag.STACKTRACE
            return FieldVariable(self._new_variable(name, value.size, value.type, flags), value)

    # trace(), and synthetic events by name

    def _trace(self, action: Action) -> None:
        """Look up the synthetic event of an action, and the variables that are its arguments.

        Mirrors: kernel/trace/trace_events_hist.c:trace_action_create (v6.1).
        """
        event = self._data.system.find_synthetic(action.target_name)
        if event is None:
            raise self._log.error(HistError.SYNTH_EVENT_NOT_FOUND, action.target_name)
        arguments: list[int] = []
        for param in action.params:
            if param.count(".") == 1:
                raise KernelError(errno.EINVAL, f"{param!r}: a name has no dot, or two dots")
            system, event_name, name = qualified(param)
            variable = self._argument(action, system, event_name, name)
            if not event.takes(len(arguments), variable.value_type):
                raise self._log.error(HistError.SYNTH_TYPE_MISMATCH, name)
            arguments.append(self._refer_to(variable, system, event_name).reference)
        if len(arguments) != len(event.synthetic_fields):
            raise self._log.error(HistError.SYNTH_COUNT_MISMATCH, event.name)
        event.hist_references += 1
        action.synthetic = event
        action.arguments = arguments

    def _argument(self, action: Action, system: str | None, event_name: str | None, name: str) -> HistField:
        """Return the variable for a synthetic event's argument; if `name` is a field's, create the variable.

        `system` and `event_name`: group and name of the event in the argument; None if it names no event.
        `name`: name of a field, or `$` and the name of a variable.
        Mirrors: kernel/trace/trace_events_hist.c:trace_action_find_var, trace_action_create_field_var (v6.1).
        """
        own = self._data.file.event
        is_variable = name.startswith("$")
        name = name.removeprefix("$")
        if system is None or (system, event_name) == (own.group, own.name):
            found = self._data.variable(name) if is_variable else self._argument_field(name)
            if found is not None:
                return found
        if system is None and action.match is not None:
            system, event_name = action.match
        if is_variable:
            found = self._data.variables.find(system, event_name, name)
            if found is None:
                raise self._log.error(HistError.PARAM_NOT_FOUND, name)
            return found
        if system is None or event_name is None:
            raise KernelError(errno.EINVAL, f"histogram: no field {name!r}")
        return self._field_of_other(system, event_name, name)

    def _argument_field(self, name: str) -> HistField | None:
        try:
            made = self._field_variable(name)
        except KernelError:
            return None
        self._data.field_variables.append(made)
        return made.variable

    def _field_of_other(self, system: str, event_name: str, name: str) -> HistField:
        """Return a variable that holds the value of the field `name` of another event.

        If the variable does not exist, create a histogram on the other event, which sets the variable. The
        new histogram has the keys and the filter of an existing histogram of that event, whose keys have the
        same types as those of this histogram.
        Mirrors: kernel/trace/trace_events_hist.c:create_field_var_hist (v6.1).
        """
        data = self._data
        if len(data.made_hists) >= FIELDS_MAX:
            raise self._log.error(HistError.TOO_MANY_FIELD_VARS, name)
        file = data.triggers.find_file(system, event_name)
        if file is None:
            raise self._log.error(HistError.EVENT_FILE_NOT_FOUND, name)
        model = next((each for each in hists_of(file) if _same_keys(each, data)), None)
        if model is None:
            raise self._log.error(HistError.HIST_NOT_FOUND, name)
        variable = f"synthetic_{name}"
        existing = data.variables.find(system, event_name, variable)
        if existing is not None:
            return existing
        command = _hist_command(model, file, variable, name)
        with self._log.instead(HistError.HIST_CREATE_FAIL, name):
            self._make_hist(data, file, command)
        data.made_hists.append((file, command))
        made = find_file_variable(file, variable)
        if made is None:
            raise self._log.error(HistError.SYNTH_VAR_NOT_FOUND, name)
        return made


def _same_keys(one: Histogram, other: Histogram) -> bool:
    """Return True if the keys of both histograms have the same types in the same order.

    Mirrors: kernel/trace/trace_events_hist.c:compatible_keys (v6.1).
    """
    return [(key.type, key.size, key.is_signed) for key in one.keys] == [
        (key.type, key.size, key.is_signed) for key in other.keys
    ]


def _hist_command(model: Histogram, file: EventFile, variable: str, name: str) -> str:
    """Return the command of a histogram with the keys and the filter of `model`, and with one variable.

    `file`: the event of `model`. `variable`: name of the variable. `name`: name of the field whose value the
    variable gets. Raises: KernelError E2BIG (the command is too long).
    """
    keys = ",".join(key.full_name() for key in model.keys)
    text = f"keys={keys}:{variable}={name}"
    holder = next(each for each in holders_of(file) if each.data is model)
    text += holder.filter_text()
    if len(text) >= MAX_STRING:
        raise KernelError(errno.E2BIG, "histogram: its command is too long")
    return text
