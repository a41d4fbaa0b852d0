"""Variables of histograms: look-up by name, in the histogram itself or in histograms of other events."""

from __future__ import annotations

import errno

from emulated_kernel.trace.events.event import EventFile
from emulated_kernel.trace.hist.field import TIME_FLAGS, Flag, HistField, Histogram
from emulated_kernel.trace.hist.hist_errors import HistError
from emulated_kernel.trace.hist.operators import find_operator, is_reference
from emulated_kernel.trace.hist.services import HistServices, hists_of
from emulated_kernel.trace.hist.tracing_map import VARS_MAX
from emulated_kernel.util.errors import KernelError


def find_file_variable(file: EventFile, name: str) -> HistField | None:
    """Return the variable called `name` in a histogram of the event, or None if no histogram has it.

    Mirrors: kernel/trace/trace_events_hist.c:find_file_var (v6.1).
    """
    for data in hists_of(file):
        field = data.variable(name)
        if field is not None:
            return field
    return None


class Variables:
    """The variables that a histogram can use while it is being created."""

    def __init__(self, owner: Histogram, system: HistServices) -> None:
        self.owner = owner
        self._system = system
        self.log = owner.log
        self.interface = system.interface
        self.definitions: list[tuple[str, str]] = []
        """(name, expression) of each variable that the histogram defines, until the end of HistData.build().

        Expressions that have been parsed are shortened to the result of leftmost_operand().
        """

    def exists(self, name: str) -> bool:
        """Return True if this histogram, or another histogram of the same event, defines the variable `name`.

        Mirrors: kernel/trace/trace_events_hist.c:find_var (v6.1).
        """
        if self.owner.variable(name) is not None:
            return True
        return find_file_variable(self.owner.file, name) is not None

    def local_expression(self, system: str | None, event_name: str | None, name: str) -> str | None:
        """Return the expression of a variable of this histogram, if the expression is only a field's name.

        `name` is `$` and the variable's name. `system` and `event_name` must be None, or name the
        histogram's event. In all other cases, return None.
        Mirrors: kernel/trace/trace_events_hist.c:local_field_var_ref, field_name_from_var (v6.1).
        """
        event = self.owner.file.event
        if system is not None and (system, event_name) != (event.group, event.name):
            return None
        if not is_reference(name):
            return None
        for defined, expression in self.definitions:
            if (
                defined == name[1:]
                and find_operator(expression, self.interface) is None
                and not is_reference(expression)
            ):
                return expression
        return None

    def reference(self, system: str | None, event_name: str | None, name: str) -> HistField | None:
        """Return a reference to the variable `name` of an event; `name` is `$` and the variable's name.

        `system`, `event_name`: see find(). If there is no such variable, or no room for a reference, log an
        error and return None.
        Mirrors: kernel/trace/trace_events_hist.c:parse_var_ref (v6.1).
        """
        variable = self.find(system, event_name, name[1:])
        reference = None if variable is None else self.refer_to(variable, system, event_name)
        if reference is None:
            self.log.error(HistError.VAR_NOT_FOUND, name[1:])
        return reference

    def find(self, system: str | None, event_name: str | None, name: str) -> HistField | None:
        """Return the variable `name` of a histogram, or None if it is not found or not unique.

        `name` is without `$`. `system` and `event_name`: group and name of that histogram's event. If either
        is None, search the events of this histogram's onmatch() actions first. If the variable is not unique,
        log an error.
        Mirrors: kernel/trace/trace_events_hist.c:find_event_var (v6.1).
        """
        if system is None or event_name is None:
            try:
                found = self._find_matched(name)
            except KernelError:
                return None
            if found is not None:
                return found
        file = self._find_file(system, event_name, name)
        return None if file is None else find_file_variable(file, name)

    def _find_matched(self, name: str) -> HistField | None:
        """Search the events of the histogram's onmatch() actions for the variable `name`; return it or None.

        Raises: KernelError EINVAL (two of the events have the variable).
        Mirrors: kernel/trace/trace_events_hist.c:find_match_var (v6.1).
        """
        found: HistField | None = None
        for match in self.owner.matches:
            file = self.owner.triggers.find_file(*match)
            variable = None if file is None else find_file_variable(file, name)
            if variable is not None:
                if found is not None:
                    raise self.log.error(HistError.VAR_NOT_UNIQUE, name, errno.EINVAL)
                found = variable
        return found

    def _find_file(self, system: str | None, event_name: str | None, name: str) -> EventFile | None:
        """Return the event whose histograms have to be searched for the variable `name`; None if not found.

        If `system` is given, return the event with the group `system` and the name `event_name`. Otherwise
        return the only event whose histogram has the variable. If several events have it, log an error and
        return None.
        Mirrors: kernel/trace/trace_events_hist.c:find_var_file (v6.1).
        """
        if system is not None:
            return self.owner.triggers.find_file(system, event_name or "")
        found: EventFile | None = None
        for data in self._system.with_variables(self.owner.triggers.array):
            if data.file is found or data.variable(name) is None:
                continue
            if found is not None:
                self.log.error(HistError.VAR_NOT_UNIQUE, name)
                return None
            found = data.file
        return found

    def refer_to(self, variable: HistField, system: str | None, event_name: str | None) -> HistField | None:
        """Return this histogram's reference to a variable; create the reference if necessary.

        `system` and `event_name`: group and event to set in a new reference. If one is None, it is copied
        from `variable`. If the histogram already has 16 references, return None.
        Mirrors: kernel/trace/trace_events_hist.c:create_var_ref (v6.1).
        """
        owner = self.owner
        for existing in owner.references:
            if existing.owner is variable.owner and existing.index == variable.index:
                return existing
        if len(owner.references) >= VARS_MAX:
            return None
        reference = HistField(variable.owner, Flag.VAR_REF)
        reference.system = system
        reference.event_name = event_name
        self.copy(variable, reference)
        place = len(owner.references)
        reference.reference = place
        reference.value = lambda hit: hit.references[place]
        owner.references.append(reference)
        return reference

    @staticmethod
    def copy(variable: HistField, reference: HistField) -> None:
        """Copy a variable's properties to its reference.

        Mirrors: kernel/trace/trace_events_hist.c:init_var_ref (v6.1).
        """
        reference.index = variable.index
        reference.owner = variable.owner
        reference.size = variable.size
        reference.is_signed = variable.is_signed
        reference.type = variable.type
        reference.flags |= variable.flags & (TIME_FLAGS | Flag.STACKTRACE)
        reference.system = reference.system or variable.system
        reference.event_name = reference.event_name or variable.event_name
        reference.name = variable.variable if variable.variable is not None else variable.name

    @staticmethod
    def origin(operand: HistField) -> HistField:
        """Return the variable to which a reference or alias refers; return any other field itself.

        Raises: KernelError EINVAL (the variable does not exist any more).
        Mirrors: kernel/trace/trace_events_hist.c:check_expr_operands (v6.1).
        """
        if not operand.flags & (Flag.VAR_REF | Flag.ALIAS):
            return operand
        found = operand.owner.variable(operand.name)
        if found is None:
            raise KernelError(errno.EINVAL, f"histogram: no variable {operand.name!r}")
        return found
