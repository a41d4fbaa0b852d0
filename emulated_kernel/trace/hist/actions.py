"""Actions of a histogram: onmatch(), onmax() or onchange() with trace(), save() or snapshot()."""

from __future__ import annotations

import errno
from enum import Enum

from emulated_kernel.trace.hist.field import HistField, HistHit, Histogram, as_number, set_variables
from emulated_kernel.trace.hist.hist_errors import HistError
from emulated_kernel.trace.hist.tracing_map import Element, Value
from emulated_kernel.trace.synth.synth_event import FIELDS_MAX, SyntheticEvent
from emulated_kernel.trace.text.chars import SPACES
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass, field


class Handler(Enum):
    """The condition under which an action runs. The value is its name in a command."""

    ONMATCH = "onmatch"
    ONMAX = "onmax"
    ONCHANGE = "onchange"


class ActionKind(Enum):
    """The kind of an action. The value is its name in a command."""

    SAVE = "save"
    SNAPSHOT = "snapshot"
    TRACE = "trace"


@dataclass
class Action:
    """An action that a histogram runs at hits.

    Mirrors: kernel/trace/trace_events_hist.c:struct action_data (v6.1).
    """

    owner: Histogram
    handler: Handler
    name: str = ""
    """Text before `(PARAMS)`, as written: `trace`, `save`, `snapshot`, or the name of a synthetic event."""
    kind: ActionKind = ActionKind.TRACE
    params: list[str] = field(default_factory=list)
    synthetic_name: str | None = None
    """First parameter of trace(), the name of the synthetic event; None if the action is not trace(...)."""
    match: tuple[str, str] | None = None
    """Parameter of onmatch(): group and name of the event that must occur first; None for other handlers."""
    tracked_name: str = ""
    """Parameter of onmax() and onchange(): the variable, as written; "" for onmatch()."""
    tracked: HistField | None = None
    """Reference to the variable of onmax() or onchange(); None for onmatch()."""
    track_index: int = -1
    """Index in Element.variables of the greatest or latest value of `tracked`; -1 for onmatch()."""
    synthetic: SyntheticEvent | None = None
    arguments: list[int] = field(default_factory=list)
    """Indices in HistHit.references of the values that are passed to the synthetic event."""

    @property
    def target_name(self) -> str:
        """Name of the synthetic event that the action records; for save() and snapshot(), `name`."""
        return self.name if self.synthetic_name is None else self.synthetic_name

    def key(self) -> tuple[object, ...]:
        """Return a tuple that is the same for equivalent actions.

        Mirrors: kernel/trace/trace_events_hist.c:actions_match (v6.1).
        """
        return (self.handler, self.kind, tuple(self.params), self.target_name, self.match, self.tracked_name)

    def show(self) -> str:
        """Return the action as the trigger file shows it.

        Mirrors: kernel/trace/trace_events_hist.c:print_actions_spec (v6.1).
        """
        subject = ".".join(self.match) if self.match else self.tracked_name
        params = self.params if self.kind is ActionKind.TRACE else []
        if self.kind is ActionKind.SAVE:
            params = [each.variable.variable or "" for each in self.owner.saved_variables]
        if self.synthetic_name is not None:
            params = [self.synthetic_name, *params]
        return f":{self.handler.value}({subject}).{self.name}({','.join(params)})"

    # Hits

    def track_value(self, element: Element) -> int:
        """Return the greatest or latest value of the tracked variable in `element`; 0 if it was never set."""
        return as_number(element.variables.get(self.track_index, 0))

    def passes(self, before: int, value: int) -> bool:
        """Return True if the variable's change from `before` to `value` fulfils the condition.

        onmax(): `value` is greater than `before`. onchange(): the two differ.
        """
        return value > before if self.handler is Handler.ONMAX else value != before

    def _is_news(self, element: Element, value: Value) -> bool:
        """Return True if the condition of onmax() or onchange() holds for the tracked variable's `value`.

        For a string or call chain, the condition holds only for the first value in `element`. Linux compares
        the address of the element's own copy, which never changes.
        """
        if isinstance(value, bytes):
            return self.track_index not in element.variables
        return self.passes(self.track_value(element), value)

    def run(self, hit: HistHit, element: Element, key: bytes) -> None:
        """Run the action for a hit; for onmax() and onchange(), only if the condition holds.

        An action of onmax() or onchange() that runs also stores the tracked variable's value in `element`.

        `element`: element of the map in which the hit is counted. `key`: key of the element.

        Mirrors: kernel/trace/trace_events_hist.c:hist_trigger_actions, ontrack_action (v6.1).
        """
        if self.tracked is not None:
            value = hit.references[self.tracked.reference]
            if not self._is_news(element, value):
                return
            element.variables[self.track_index] = value
        if self.synthetic is not None:
            self.synthetic.trace([hit.references[index] for index in self.arguments], hit.hit)
        elif self.kind is ActionKind.SAVE:
            set_variables(element, self.owner.saved_variables, hit)
        else:
            self._snapshot(element, key)

    def _snapshot(self, element: Element, key: bytes) -> None:
        """Take a snapshot if the tracked variable has a new maximum or another value since the last snapshot.

        The value of the variable in `element` must be greater than the value at the last snapshot (onmax), or
        different from it (onchange). `key`: key of the element.
        Deviates: a string or call chain always passes. Linux compares the addresses of the present and the
        last value.
        Mirrors: kernel/trace/trace_events_hist.c:cond_snapshot_update (v6.1).
        """
        snapshot = self.owner.triggers.array.snapshot
        taken = snapshot.condition
        if not isinstance(taken, TrackedSnapshot):
            return
        value = taken.action.track_value(element)
        is_text = isinstance(element.variables.get(taken.action.track_index), bytes)
        if not is_text and not taken.action.passes(taken.value, value):
            return
        taken.value = value
        taken.key = key
        taken.comm = element.comm
        taken.updated = True
        snapshot.take()

    def destroy(self) -> None:
        """Release the synthetic event and the snapshot condition that the action uses."""
        if self.synthetic is not None:
            self.synthetic.hist_references -= 1
        if self.kind is ActionKind.SNAPSHOT:
            snapshot = self.owner.triggers.array.snapshot
            if isinstance(snapshot.condition, TrackedSnapshot) and snapshot.condition.action is self:
                snapshot.condition = None


@dataclass
class TrackedSnapshot:
    """The condition of a trace array's snapshots: an action, and the hit that took the last snapshot.

    Mirrors: kernel/trace/trace_events_hist.c:struct track_data (v6.1).
    """

    action: Action
    value: int = 0
    key: bytes = b""
    comm: bytes = b""
    updated: bool = False


# Parsing. Mirrors: kernel/trace/trace_events_hist.c:parse_actions (v6.1).


def parse_action(text: str, data: Histogram) -> Action:
    """Parse `HANDLER(SUBJECT).ACTION(PARAMS)`, and return the action of the histogram `data`.

    Raises: KernelError EINVAL (a syntax error, an unknown event in onmatch(), or save() or snapshot() after
    onmatch()).
    """
    handler_name, _, rest = text.partition("(")
    action = Action(data, Handler(handler_name))
    subject, closed, rest = rest.partition(")")
    if action.handler is Handler.ONMATCH:
        action.match = _parse_match(subject, bool(closed), data)
    elif not closed:
        raise KernelError(errno.EINVAL, f"{handler_name}: a closing parenthesis is missing")
    action.tracked_name = "" if action.match else subject
    _parse_body(action, rest, data)
    return action


def _parse_match(subject: str, closed: bool, data: Histogram) -> tuple[str, str]:
    if not closed:
        raise data.log.error(HistError.NO_CLOSING_PAREN, subject)
    group, dot, event = subject.partition(".")
    if not dot:
        raise data.log.error(HistError.SUBSYS_NOT_FOUND, group)
    if data.triggers.find_file(group, event) is None:
        raise data.log.error(HistError.INVALID_SUBSYS_EVENT, event)
    data.matches.append((group, event))
    return group, event


def _parse_body(action: Action, text: str, data: Histogram) -> None:
    """Parse `.ACTION(PARAMS)` into `action`.

    As in Linux, a name that only begins like an action's name is accepted too.
    Mirrors: kernel/trace/trace_events_hist.c:action_parse (v6.1).
    """
    action.name, opened, rest = text.partition(".")[2].partition("(")
    if "." not in text or not opened:
        raise data.log.error(HistError.ACTION_NOT_FOUND)
    params, closed, _ = rest.partition(")")
    if action.name.startswith("save"):
        action.kind = ActionKind.SAVE
        _parse_params(action, params, data, named=False)
    elif action.name.startswith("snapshot"):
        action.kind = ActionKind.SNAPSHOT
        if not closed:
            raise data.log.error(HistError.NO_CLOSING_PAREN, params)
    else:
        _parse_params(action, params, data, named=action.name.startswith("trace"))
    if action.kind is not ActionKind.TRACE and action.handler is Handler.ONMATCH:
        raise data.log.error(HistError.ACTION_MISMATCH, action.name)


def _parse_params(action: Action, text: str, data: Histogram, *, named: bool) -> None:
    for number, part in enumerate(text.split(",")):
        if len(action.params) >= FIELDS_MAX:
            raise data.log.error(HistError.TOO_MANY_PARAMS)
        param = part.strip(SPACES)
        if len(param) < 2:
            raise data.log.error(HistError.INVALID_PARAM, param)
        if named and number == 0:
            action.synthetic_name = param
        else:
            action.params.append(param)
