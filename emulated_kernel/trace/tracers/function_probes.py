"""Commands of set_ftrace_filter: actions at calls of a function, independent of the current tracer."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator, Mapping

from emulated_kernel.trace.array.trace_array import TraceArray
from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.events.registry import EventRegistry, no_such_event
from emulated_kernel.trace.text.chars import bytes_to_text
from emulated_kernel.trace.text.numbers import kstrtoul
from emulated_kernel.trace.tracers.call_sites import KernelFunctions
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass

Action = Callable[[ProbeHit], bool]
"""Function that performs a command's action at a call.

It returns True if the call counts against the command's limit.
"""


Kind = tuple[str, bool]
"""A command's name, and whether the command has a limit.

A function has at most one command of each kind.
"""

_SWITCHES = ("enable_event", "disable_event")
"""Names of the commands with an event."""


@dataclass(eq=False)
class FunctionProbe:
    """A command of set_ftrace_filter, such as traceoff, that runs at each call of one function."""

    title: str
    """The command as set_ftrace_filter shows it: `NAME`, or `NAME:GROUP:EVENT`."""
    action: Action
    count: int | None
    """Number of calls at which the command still acts; None means no limit. For -1, see fire()."""
    forget: Callable[[], None]
    """Function to call after the command was removed; it releases the command's resources."""

    def fire(self, hit: ProbeHit) -> None:
        """Run the action at a call of the function, unless the limit is reached.

        Linux: an empty limit (`NAME:`) sets `count` to -1. Then `stacktrace` acts without a limit, and other
        commands never act.
        """
        if self.count is None:
            self.action(hit)
        elif (self.count > 0 or (self.count and self.title == "stacktrace")) and self.action(hit):
            self.count -= 1

    def show(self) -> str:
        """Return the text after the function's name in set_ftrace_filter, with the newline.

        The text is `:TITLE:unlimited`, or `:TITLE:count=COUNT` if the command has a limit.
        """
        count = "unlimited" if self.count is None else f"count={self.count}"
        return f":{self.title}:{count}\n"


class _Probes(dict[int, FunctionProbe]):
    """Fentry site -> command, for the commands of one kind.

    Mirrors: kernel/trace/ftrace.c:struct ftrace_func_probe (v6.1).
    """

    def __init__(self, hooks: KernelFunctions) -> None:
        self._hooks = hooks
        self._user = hooks.user(self._fire, lambda: "function_trace_probe_call")

    def changed(self) -> None:
        """Handle a change of the commands: attach to the sites that have one, and detach from all others."""
        if self:
            self._hooks.attach(self._user, self.keys())
        else:
            self._hooks.detach(self._user)

    def _fire(self, site: int, hit: ProbeHit) -> None:
        probe = self.get(site)
        if probe is not None:
            probe.fire(hit)


class FunctionProbes:
    """The commands that were written to set_ftrace_filter of one trace array.

    Mirrors: kernel/trace/ftrace.c:register_ftrace_function_probe (v6.1).
    """

    def __init__(
        self, hooks: KernelFunctions, array: TraceArray, registry: EventRegistry, top: TraceArray
    ) -> None:
        self._top = top
        self._hooks = hooks
        self._functions = hooks.functions
        self._array = array
        self._registry = registry
        self._plain: Mapping[str, Action] = {
            "traceon": lambda _hit: self._switch(True),
            "traceoff": lambda _hit: self._switch(False),
            "stacktrace": self._stacktrace,
            "snapshot": self._snapshot,
        }
        self._kinds: dict[Kind, _Probes] = {}
        """Kind -> commands of this kind; the oldest kind comes first."""

    def execute(self, pattern: bytes, command: str) -> None:
        """Add the command `COMMAND[:COUNT]` to the functions that match `pattern`.

        If "!" precedes the pattern, remove the command from these functions.
        Raises: KernelError EINVAL (no such command or event, a count that is no number, or no matching
        function gets or loses the command), ENODEV (no function has the command to remove), ERANGE (the count
        is too large), ENOMEM (no memory for the snapshot's buffers).
        """
        title, limit = self._parse(command)
        kind = title.partition(":")[0], limit is not None
        if pattern.startswith(b"!"):
            self._remove(pattern.removeprefix(b"!"), kind)
            return
        count = _count(title, limit)
        sites = self._functions.matching(pattern)
        probes = self._kinds.get(kind) or _Probes(self._hooks)
        new = [site for site in sites if site not in probes]
        if not new:
            raise KernelError(
                errno.EINVAL, f"{bytes_to_text(pattern)!r}: no function without this command matches"
            )
        probes.update({site: self._make(title, count) for site in new})
        self._kinds[kind] = probes
        probes.changed()

    def _remove(self, pattern: bytes, kind: Kind) -> None:
        """Remove the commands of the kind `kind` from the functions that match `pattern`.

        Linux: an enable_event or disable_event command is removed even if it is for another event.
        Mirrors: kernel/trace/ftrace.c:unregister_ftrace_function_probe_func (v6.1).
        """
        if pattern.startswith(b"!"):
            raise KernelError(errno.EINVAL, f"{bytes_to_text(pattern)!r}: write one ! before the pattern")
        probes = self._kinds.get(kind)
        if probes is None:
            raise KernelError(errno.ENODEV, f"{kind[0]}: no function has this command; see set_ftrace_filter")
        gone = self._functions.matching(pattern) & probes.keys()
        if not gone:
            raise KernelError(
                errno.EINVAL, f"{bytes_to_text(pattern)!r}: no function with this command matches"
            )
        self._drop(kind, gone)

    def _drop(self, kind: Kind, sites: Collection[int]) -> None:
        probes = self._kinds[kind]
        for site in sites:
            probes.pop(site).forget()
        probes.changed()
        if not probes:
            del self._kinds[kind]

    def clear(self) -> None:
        """Remove all commands, because the trace array is being removed."""
        for kind, probes in tuple(self._kinds.items()):
            self._drop(kind, tuple(probes))

    def functions_removed(self, sites: frozenset[int]) -> None:
        """Remove the commands on the functions with the fentry sites `sites`, which no longer exist."""
        for kind, probes in tuple(self._kinds.items()):
            self._drop(kind, sites & probes.keys())

    def records(self) -> Iterator[str]:
        """Yield the lines of the commands in set_ftrace_filter, the newest kind first.

        Mirrors: kernel/trace/ftrace.c:t_probe_next (v6.1).
        """
        for probes in reversed(self._kinds.values()):
            for function in self._functions:
                if function.site in probes:
                    yield function.shown + probes[function.site].show()

    def _parse(self, command: str) -> tuple[str, str | None]:
        """Return a command's title (see FunctionProbe.title), and the text of the command's limit.

        The second item is None if the command has no limit.
        Raises: KernelError EINVAL (no such command or event).
        """
        name, colon, rest = command.partition(":")
        title = name
        if name in _SWITCHES:
            group, _, rest = rest.partition(":")
            event, colon, rest = rest.partition(":")
            title = f"{name}:{group}:{event}"
            if self._registry.find(group, event) is None:
                raise KernelError(errno.EINVAL, no_such_event(name, group, event))
        elif name not in self._plain:
            known = ", ".join((*self._plain, *_SWITCHES))
            raise KernelError(errno.EINVAL, f"{name!r}: no such command; use {known} or mod:MODULE")
        return title, rest.partition(":")[0] if colon else None

    def _make(self, title: str, count: int | None) -> FunctionProbe:
        plain = self._plain.get(title)
        if plain is not None:
            if title == "snapshot":
                self._array.snapshot.allocate()
            limited = title == "stacktrace" and count is not None
            return FunctionProbe(title, self._limited_stacktrace if limited else plain, count, lambda: None)
        name, group, event_name = title.split(":")
        event = self._registry.find(group, event_name)
        assert event is not None, "_parse() has looked the event up"
        file = event.file(self._array)
        file.hold()

        def switch(_hit: ProbeHit) -> bool:
            changes = file.soft_disabled is (name == "enable_event")
            file.soft_disabled = name == "disable_event"
            return changes

        return FunctionProbe(title, switch, count, file.let_go)

    def _switch(self, on: bool) -> bool:
        """Switch recording on or off, and return True; return False if recording was already in this state.

        Mirrors: kernel/trace/trace_functions.c:update_traceon_count (v6.1).
        """
        changes = self._array.tracing_on is not on
        if changes:
            self._array.set_tracing_on(on)
        return changes

    def _stacktrace(self, hit: ProbeHit) -> bool:
        self._array.record_stack(hit)
        return True

    def _limited_stacktrace(self, hit: ProbeHit) -> bool:
        """Record the call chain and return True; if tracing is off, record nothing and return False.

        Linux: tracing_on of the top array decides, even for instances.
        Mirrors: kernel/trace/trace_functions.c:ftrace_stacktrace_count (v6.1).
        """
        return self._top.tracing_on and self._stacktrace(hit)

    def _snapshot(self, _hit: ProbeHit) -> bool:
        self._array.snapshot.take()
        return True


def _count(title: str, limit: str | None) -> int | None:
    """Parse `limit`, the limit of the command `title`. Return None if `limit` is None.

    `title`: see FunctionProbe.title.
    Linux: an empty limit is -1, except for commands with an event. Raises: KernelError EINVAL (not a number),
    ERANGE (too large).
    """
    if limit is None:
        return None
    return -1 if not limit and ":" not in title else kstrtoul(limit)
