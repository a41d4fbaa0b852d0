"""The hist trigger and its command, which adds, changes and removes histograms."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.events.event import EventFile, TraceEvent
from emulated_kernel.trace.filter.predicates import EventFilter
from emulated_kernel.trace.hist.actions import parse_action
from emulated_kernel.trace.hist.attrs import parse_attrs, split_filter
from emulated_kernel.trace.hist.create import ActionMaker
from emulated_kernel.trace.hist.field import HistField
from emulated_kernel.trace.hist.hist_data import HistData
from emulated_kernel.trace.hist.hist_errors import HistError
from emulated_kernel.trace.hist.output import HistPrinter, command_text
from emulated_kernel.trace.hist.services import HistHolder, HistServices
from emulated_kernel.trace.ring.trace_entry import RawEntry
from emulated_kernel.trace.synth.synth_event import SyntheticEvent
from emulated_kernel.trace.text.error_log import LastCommandLog
from emulated_kernel.trace.trigger.triggers import (
    EventTriggers,
    TriggerCommand,
    parse_trigger_filter,
)
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass, field

_PREFIX = "hist:"


class HistTrigger(HistHolder):
    """A histogram trigger of an event. Triggers with the same name share their data.

    Mirrors: kernel/trace/trace_events_hist.c:event_hist_trigger_ops, event_hist_trigger_named_ops (v6.1).
    """

    def __init__(self, data: HistData, filter_: EventFilter | None, release: HistCommand) -> None:
        super().__init__(data, filter_)
        self.data: HistData = data
        self.name: str | None = None
        self.shared: HistTrigger | None = None
        """The named trigger whose data this trigger uses; None if it uses data of its own."""
        self.users = 0
        self.synthetic: SyntheticEvent | None = None
        """The trigger's event if the event is synthetic, otherwise None.

        While the trigger exists, the event can't be removed.
        """
        self.identity = 0
        """Hash of the result of _identity() for this trigger, computed when the trigger was registered."""
        self._command = release

    def fire(self, hit: ProbeHit, entry: RawEntry | None) -> None:
        """Count a hit in the histogram.

        As in Linux, do not count a hit without an entry, which occurs if another trigger fires this trigger.
        """
        if entry is not None:
            self.data.count(hit, entry)
            self._wake()

    def _wake(self) -> None:
        """Wake the clients that poll hist files.

        Mirrors: include/linux/trace_events.h:hist_poll_wakeup (v7.2).
        """
        for waiter in tuple(self._command.system.registry.hist_waiters):
            waiter()

    def show(self) -> str:
        name = f"{self.name}:" if self.name is not None else ""
        state = " [paused]" if self.paused else " [active]"
        return f"{_PREFIX}{name}{command_text(self.data)}{self.filter_text()}{state}"

    def released(self) -> None:
        self._command.system.removed.note(self)
        if self.synthetic is not None:
            self.synthetic.hist_references -= 1
        self._command.release(self)
        self._wake()


@dataclass(frozen=True)
class HistCommand(TriggerCommand):
    """The command `hist:keys=...` of trigger files.

    Mirrors: kernel/trace/trace_events_hist.c:event_hist_trigger_parse (v6.1).
    """

    system: HistServices
    name: str = "hist"
    owners: dict[str, HistTrigger] = field(default_factory=dict, compare=False)
    """Name of a named histogram -> trigger that owns the histogram's data, for all trace arrays."""

    def execute(self, triggers: EventTriggers, file: EventFile, rest: str | None, *, removes: bool) -> None:
        """Add, change or remove a histogram: execute a command that was written to a trigger file.

        `rest`: the text after `hist:`. `removes`: whether the command begins with `!`.
        Raises: KernelError EEXIST (the histogram exists), ENOENT (no histogram to continue or clear), EBUSY
        (another histogram uses the variables), ENOMEM (the memory budget has no room), EPERM (the event
        cannot be enabled), any error of HistData.build(), ActionMaker.create() and parse_filter().
        """
        if rest is None:
            raise KernelError(errno.EINVAL, "histogram: keys are missing; add keys=FIELD")
        location = f"{_PREFIX}{file.event.group}:{file.event.name}"
        log = LastCommandLog(triggers.error_log, location, _PREFIX + rest)
        self._run(triggers, file, log, rest, removes=removes)

    def _run(
        self, triggers: EventTriggers, file: EventFile, log: LastCommandLog, text: str, *, removes: bool
    ) -> None:
        command, condition = split_filter(text)
        attrs = parse_attrs(command.replace(".sym-offset", ".symXoffset"), log, self.system.interface)
        data = HistData(triggers, self.system, file, log, attrs, removes=removes)
        for action in attrs.actions:
            data.actions.append(parse_action(action, data))
        data.build()
        trigger = HistTrigger(data, parse_trigger_filter(file.event, condition, triggers), self)
        if removes:
            self._remove(trigger, file)
        elif not self._update_existing(trigger, file):
            self._add(trigger, data)

    # Adding

    def _add(self, trigger: HistTrigger, data: HistData) -> None:
        try:
            maker = ActionMaker(data, self._make_for)
            for action in data.actions:
                maker.create(action)
            if data.has_variables():
                self.system.save_variables(data)
            self._register(trigger, data)
        except KernelError:
            self._discard(data)
            raise
        try:
            data.file.add(trigger, last=True)
        except KernelError:
            self.release(trigger)
            # Linux: the errno of the failure is lost.
            raise KernelError(errno.EPERM, "histogram: its event cannot be enabled") from None
        if isinstance(data.file.event, SyntheticEvent):
            trigger.synthetic = data.file.event
            trigger.synthetic.hist_references += 1

    def _make_for(self, data: HistData, file: EventFile, command: str) -> None:
        """Execute `command`, which creates a histogram on the event `file`, for an action of `data`.

        The action needs a field of that event. `command`: the text after `hist:`. Errors are logged with the
        command of `data`. Raises: as execute().
        """
        self._run(data.triggers, file, data.log, command, removes=False)

    def _register(self, trigger: HistTrigger, data: HistData) -> None:
        """Check that `trigger` is new and fits those with its name; register the name and set the clock.

        `data`: the data that were parsed for `trigger`. If another trigger owns data with the name, `trigger`
        uses those, and `data` is released.

        Raises: KernelError EINVAL (the named histogram differs, or the clock is unknown), EEXIST (an
        equivalent histogram exists), ENOENT (no histogram to continue or clear), ENOMEM (the memory budget
        has no room).

        Mirrors: kernel/trace/trace_events_hist.c:hist_register_trigger (v6.1).
        """
        attrs = data.attrs
        log = data.log
        shared = self._find_named(attrs.name)
        if shared is not None and _contents(trigger.data) != _contents(shared.data):
            raise log.error(HistError.NAMED_MISMATCH, attrs.name or "")
        is_first = attrs.name is not None and shared is None
        if not is_first and self._find_match(trigger, data.file, shared) is not None:
            raise log.error(HistError.TRIGGER_EEXIST, code=errno.EEXIST)
        if attrs.resume or attrs.clear:
            raise log.error(HistError.TRIGGER_ENOENT_CLEAR, code=errno.ENOENT)
        if shared is None:
            data.map.allocate()
        trigger.paused = attrs.pause
        if data.uses_time:
            with log.instead(HistError.SET_CLOCK_FAIL, attrs.clock):
                data.triggers.array.set_clock(attrs.clock)
        self._take_name(trigger, shared)
        trigger.identity = hash(_identity(trigger))

    def _find_named(self, name: str | None) -> HistTrigger | None:
        """Return the trigger that owns the data called `name`, or None if no trigger owns such data.

        Mirrors: kernel/trace/trace_events_trigger.c:find_named_trigger (v6.1).
        """
        return None if name is None else self.owners.get(name)

    def _take_name(self, trigger: HistTrigger, shared: HistTrigger | None) -> None:
        trigger.name = trigger.data.attrs.name
        trigger.users = 1
        if trigger.name is not None:
            self.owners.setdefault(trigger.name, trigger)
        if shared is not None:
            own = trigger.data
            trigger.shared = shared
            trigger.data = shared.data
            shared.users += 1
            self._discard(own)

    def _update_existing(self, trigger: HistTrigger, file: EventFile) -> bool:
        """Pause, continue or clear the existing histogram that is equivalent to that of `trigger`.

        Return True if the command asks for such a change and the histogram exists, else False.

        Mirrors: kernel/trace/trace_events_hist.c:existing_hist_update_only (v6.1).
        """
        attrs = trigger.data.attrs
        if not attrs.changes:
            return False
        shared = self._find_named(attrs.name)
        is_known = shared is not None and _contents(trigger.data) == _contents(shared.data)
        if attrs.name is not None and not is_known:
            return False
        existing = self._find_match(trigger, file, shared)
        if existing is None:
            return False
        if attrs.pause:
            existing.paused = True
        elif attrs.resume:
            existing.paused = False
        else:
            self.system.removed.note(existing)
            existing.data.map.clear()
        return True

    # Removing

    def _remove(self, trigger: HistTrigger, file: EventFile) -> None:
        """Remove the existing trigger whose histogram is equivalent to that of `trigger`, if there is one.

        Raises: KernelError EBUSY (another histogram uses the variables of the histogram).
        """
        existing = self._find_match(trigger, file, self._find_named(trigger.data.attrs.name))
        if existing is None:
            return
        if existing.data.is_referred_to():
            raise KernelError(errno.EBUSY, "histogram: another one uses its variables; remove that one first")
        file.remove(existing)

    def remove_all(self, file: EventFile) -> None:
        """Remove all histograms of an event.

        As in Linux, if another histogram uses a variable of any of these histograms, none is removed.

        Mirrors: kernel/trace/trace_events_hist.c:hist_unreg_all (v6.1).
        """
        found = [trigger for trigger in file.triggers if isinstance(trigger, HistTrigger)]
        if any(trigger.data.is_referred_to() for trigger in found):
            return
        for trigger in found:
            if trigger in file.triggers:
                file.remove(trigger)

    def release(self, trigger: HistTrigger) -> None:
        """Decrease the use count of `trigger`.

        If `trigger` uses the data of another trigger, decrease the use count of that trigger too. When the
        count of the trigger that owns the data becomes 0, release the data.

        Mirrors: kernel/trace/trace_events_hist.c:event_hist_trigger_free (v6.1).
        """
        trigger.users -= 1
        if trigger.shared is not None:
            self.release(trigger.shared)
        if trigger.users:
            return
        if trigger.shared is None:
            if trigger.name is not None:
                del self.owners[trigger.name]
            self._discard(trigger.data)

    def _discard(self, data: HistData) -> None:
        """Release a histogram's map, actions and variables.

        Also remove the histograms that were created for it on other events.
        """
        self.system.remove_variables(data)
        data.map.release()
        for action in data.actions:
            action.destroy()
        made = data.made_hists
        data.made_hists = []
        for file, command in made:
            self._run(data.triggers, file, data.log, command, removes=True)

    # Comparing

    def _find_match(
        self, trigger: HistTrigger, file: EventFile, shared: HistTrigger | None
    ) -> HistTrigger | None:
        """Return the event's trigger with a histogram equivalent to that of `trigger`; None if there is none.

        `shared`: the trigger that owns the data with the name of `trigger`. If it is not None, compare only
        with triggers that use these data; if it is None, only with triggers without a name.
        """
        identity = _identity(trigger)
        wanted = hash(identity)
        for other in file.triggers:
            # An event may have thousands of triggers.
            if (
                isinstance(other, HistTrigger)
                and other.identity == wanted
                and _has_data_of(other, shared)
                and _identity(other) == identity
            ):
                return other
        return None


def _has_data_of(other: HistTrigger, shared: HistTrigger | None) -> bool:
    """Return True if `other` is the trigger `shared`, or uses its data.

    If `shared` is None, return True if `other` has no name.
    """
    return other.name is None if shared is None else shared in (other, other.shared)


def _identity(trigger: HistTrigger) -> tuple[str, tuple[object, ...]]:
    """Return a value that is equal for triggers with equal filters and equivalent histograms.

    Mirrors: kernel/trace/trace_events_hist.c:hist_trigger_match (v6.1).
    """
    return trigger.filter_text(), _contents(trigger.data)


def _contents(data: HistData) -> tuple[object, ...]:
    return (
        len(data.values),
        tuple(data.sort_keys),
        tuple(_field_identity(each) for each in data.fields),
        tuple(action.key() for action in data.actions),
    )


def _field_identity(each: HistField) -> tuple[object, ...]:
    """Return a tuple that is the same for equivalent fields of two histograms."""
    source = each.field
    field = None if source is None else (source.name, source.type, source.size, source.is_signed)
    return (each.flags, field, each.offset, each.size, each.is_signed, each.variable)


def hist_records(triggers: EventTriggers, event: TraceEvent) -> Iterator[str]:
    """Yield the text of an event's hist file in parts; see HistPrinter.records().

    Mirrors: kernel/trace/trace_events_hist.c:hist_show (v6.1).
    """
    found = [trigger for trigger in triggers.file(event).triggers if isinstance(trigger, HistTrigger)]
    for number, trigger in enumerate(found):
        if number:
            yield "\n\n"
        yield from HistPrinter(trigger.data, triggers.symbols).records(trigger.show())
