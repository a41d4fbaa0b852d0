"""Trace options: the flags of trace_options and of the files in options/."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection
from enum import IntFlag, auto

from emulated_kernel.trace.interface import LINUX_6_1, Interface, InterfaceRule
from emulated_kernel.trace.output.tracer_options import BLK_CLASSIC, NopOption, TracerOptions
from emulated_kernel.util.errors import KernelError

_WRITE_LIMIT = 64


class TraceOption(IntFlag):
    """Options of a trace array that do not depend on the tracer, in the order of trace_options.

    In the file, most names are the members' names in lower case, with `-` for `_`.
    Mirrors: kernel/trace/trace.h:TRACE_FLAGS (v6.1, v6.12, v7.2), as configured for x86_64.
    """

    PRINT_PARENT = auto()
    SYM_OFFSET = auto()
    SYM_ADDR = auto()
    VERBOSE = auto()
    RAW = auto()
    HEX = auto()
    BIN = auto()
    BLOCK = auto()
    FIELDS = auto()
    PRINTK = auto()
    ANNOTATE = auto()
    USERSTACKTRACE = auto()
    SYM_USEROBJ = auto()
    PRINTK_MSGONLY = auto()
    CONTEXT_INFO = auto()
    LATENCY_FMT = auto()
    RECORD_CMD = auto()
    RECORD_TGID = auto()
    OVERWRITE = auto()
    STOP_ON_FREE = auto()
    IRQ_INFO = auto()
    MARKERS = auto()
    EVENT_FORK = auto()
    TRACE_PRINTK = auto()
    COPY_MARKER = auto()
    PAUSE_ON_TRACE = auto()
    HASH_PTR = auto()
    BITMASK_LIST = auto()
    FUNCTION = auto()
    FUNC_FORK = auto()
    DISPLAY_GRAPH = auto()
    STACKTRACE = auto()


_OTHER_NAMES = {
    TraceOption.PRINTK: "trace_printk",
    TraceOption.PRINTK_MSGONLY: "printk-msg-only",
    TraceOption.LATENCY_FMT: "latency-format",
    TraceOption.STOP_ON_FREE: "disable_on_free",
    TraceOption.FUNCTION: "function-trace",
    TraceOption.FUNC_FORK: "function-fork",
    TraceOption.TRACE_PRINTK: "trace_printk_dest",
    TraceOption.COPY_MARKER: "copy_trace_marker",
}
_RULES = {
    TraceOption.FIELDS: InterfaceRule.OPTION_FIELDS,
    TraceOption.TRACE_PRINTK: InterfaceRule.OPTION_PRINTK_DEST,
    TraceOption.COPY_MARKER: InterfaceRule.OPTION_COPY_MARKER,
    TraceOption.HASH_PTR: InterfaceRule.OPTION_HASH_PTR,
    TraceOption.BITMASK_LIST: InterfaceRule.OPTION_BITMASK_LIST,
}
"""Option that only some versions of Linux have -> interface rule that these versions have."""


def option_names(interface: Interface) -> dict[str, TraceOption]:
    """Return the options of the version of Linux in `interface`: name in trace_options -> option."""
    return {
        _OTHER_NAMES.get(option) or str(option.name).lower().replace("_", "-"): option
        for option in TraceOption
        if option not in _RULES or _RULES[option] in interface
    }


OPTION_NAMES = option_names(LINUX_6_1)
"""Name of an option in trace_options -> option, in Linux 6.1."""

DEFAULT_OPTIONS = (
    TraceOption.PRINT_PARENT
    | TraceOption.PRINTK
    | TraceOption.ANNOTATE
    | TraceOption.CONTEXT_INFO
    | TraceOption.RECORD_CMD
    | TraceOption.OVERWRITE
    | TraceOption.IRQ_INFO
    | TraceOption.MARKERS
    | TraceOption.HASH_PTR
    | TraceOption.FUNCTION
    | TraceOption.TRACE_PRINTK
    | TraceOption.COPY_MARKER
)
"""Options that are on at boot."""

TOP_LEVEL_OPTIONS = TraceOption.PRINTK | TraceOption.PRINTK_MSGONLY | TraceOption.RECORD_CMD
"""Options for which only the top array has files in options/."""

INHERITED_OPTIONS = ~(
    TraceOption.EVENT_FORK | TraceOption.FUNC_FORK | TraceOption.TRACE_PRINTK | TraceOption.COPY_MARKER
)
"""Mask of the options that a new instance inherits from the top array.

Mirrors: kernel/trace/trace.c:ZEROED_TRACE_FLAGS (v7.2).
"""


class TraceOptions:
    """The options of one trace array, including the options of its tracers."""

    def __init__(
        self,
        interface: Interface,
        tracer_options: TracerOptions,
        changed: Callable[[], None],
        tracers: Callable[[], Collection[str]],
        current: Callable[[], str],
        printk: Callable[[str], None],
        tracer_changed: Callable[[str], None],
    ) -> None:
        """Create the options of a trace array, with the default values.

        `changed` is called when an option of the trace array itself changes. `tracer_changed` is called
        with the name of a tracer's option that changes. `tracers` returns the names of the registered
        tracers, and `current` the name of the current one. `printk` adds a line to the kernel's log.
        """
        self._own = option_names(interface)
        """Name -> option of the trace array itself."""
        self.flags = DEFAULT_OPTIONS
        self.printk_dest: list[TraceOptions] = []
        """The options of the top trace array, and then those of the instance that gets trace_printk().

        The second item is missing if the top array gets trace_printk(). All trace arrays share the list.
        """
        self.of_tracers = tracer_options
        self._changed = changed
        self._tracers = tracers
        self._current = current
        self._printk = printk
        self._tracer_changed = tracer_changed

    def names(self, *, instance: bool = False) -> tuple[str, ...]:
        """Return the names of all options, or of those with files in an instance if `instance` is True."""
        hidden = TOP_LEVEL_OPTIONS if instance else TraceOption(0)
        own = (name for name, option in self._own.items() if option not in hidden)
        others = () if instance else self.of_tracers.others
        return (*own, *self.of_tracers.names(self._tracers()), *others)

    def get(self, name: str) -> bool:
        """Return True if the option `name` is on. Raises: KernelError EINVAL (an unknown name)."""
        if option := self._own.get(name):
            return option in self.flags
        if name not in (*self.of_tracers.names(self._tracers()), *self.of_tracers.others):
            raise KernelError(errno.EINVAL, f"{name!r}: no such option; see trace_options")
        return self.of_tracers.is_on(name)

    def set(self, name: str, value: int) -> None:
        """Switch the option `name` on (1) or off (0).

        Raises: KernelError EINVAL (an unknown name, a value other than 0 and 1, the tracer refuses, or
        trace_printk() would have no destination).
        Mirrors: kernel/trace/trace.c:trace_options_core_write, trace_options_write (v6.1).
        """
        if value not in (0, 1):
            raise KernelError(errno.EINVAL, f"{name}: {value} is neither 0 nor 1")
        if self.get(name) == bool(value):
            return
        if option := self._own.get(name):
            if option is TraceOption.TRACE_PRINTK:
                self._move_printk(here=bool(value))
            else:
                self.flags = self.flags | option if value else self.flags & ~option
            self._changed()
        else:
            self._set_of_tracer(name, on=bool(value))

    def _move_printk(self, *, here: bool) -> None:
        """Direct trace_printk() to this trace array if `here` is set, else to the top trace array.

        Raises: KernelError EINVAL (trace_printk() is already directed to the top array, and would stay so).
        Mirrors: kernel/trace/trace.c:set_tracer_flag (v6.12).
        """
        top, *others = self.printk_dest
        last = others[-1] if others else top
        new = self if here else top
        if last is top and new is top:
            raise KernelError(errno.EINVAL, "trace_printk_dest: set it in the instance that is to get it")
        last.flags &= ~TraceOption.TRACE_PRINTK
        new.flags |= TraceOption.TRACE_PRINTK
        self.printk_dest[1:] = [] if new is top else [new]

    def leave_printk(self) -> None:
        """Direct trace_printk() to the top array if it is directed to this one.

        This method is called before this array is removed.
        """
        if self in self.printk_dest[1:]:
            self._move_printk(here=False)

    def _set_of_tracer(self, name: str, *, on: bool) -> None:
        """Switch an option of a tracer on or off.

        Raises: errors of TracerOptions.switch(). Mirrors: kernel/trace/trace_nop.c:nop_set_flag (v6.1).
        """
        if name in tuple(NopOption):
            verb = "refuse" if name == NopOption.REFUSE else "accept"
            self._printk(
                f"nop_test_{verb} flag set to {on:d}: we {verb}. Now cat trace_options to see the result"
            )
        differs = on is not self.of_tracers.is_on(name)
        self.of_tracers.switch(name, on=on)
        if differs:
            self._tracer_changed(name)
        if name == BLK_CLASSIC:
            self.flags = (
                self.flags & ~TraceOption.CONTEXT_INFO if on else self.flags | TraceOption.CONTEXT_INFO
            )
            self._changed()

    def write(self, data: bytes) -> int:
        """Execute one write to trace_options, and return the number of bytes taken.

        `data` is a name, or "no" and a name. Options of tracers other than the current one are refused.
        Raises: KernelError EINVAL (64 bytes or more, an unknown name, or the tracer refuses).
        Mirrors: kernel/trace/trace.c:tracing_trace_options_write (v6.1).
        """
        if len(data) >= _WRITE_LIMIT:
            raise KernelError(
                errno.EINVAL, f"trace_options: {len(data)} bytes; write less than {_WRITE_LIMIT}"
            )
        text = data.split(b"\0", 1)[0].decode("latin-1").strip(" \t\n\v\f\r\xa0")
        name = text.removeprefix("no")
        if name not in self._shown():
            raise KernelError(errno.EINVAL, f"{text!r}: no option of the current tracer; see trace_options")
        if name in self._own:
            self.set(name, name == text)
        else:
            # Linux: the tracer's set_flag is called even if that changes nothing.
            self._set_of_tracer(name, on=name == text)
        return len(data)

    def text(self) -> str:
        """Return the text of trace_options: a line for each option, with "no" before options that are off."""
        return "".join(f"{'' if self.get(name) else 'no'}{name}\n" for name in self._shown())

    def _shown(self) -> tuple[str, ...]:
        """Return the names of the options that trace_options lists.

        Mirrors: kernel/trace/trace.c:tracing_trace_options_show (v6.1).
        """
        return (*self._own, *self.of_tracers.names((self._current(),)))
