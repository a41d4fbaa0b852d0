"""Events of single system calls, which are computed from the raw_syscalls records of all calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

from emulated_kernel.image.trace_events import SyscallDefinition
from emulated_kernel.trace.context.probe_hit import ProbeHit, within_another
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.events.static_event import Tracepoint
from emulated_kernel.trace.events.syscall_user_data import (
    USER_ARGUMENTS,
    UserArguments,
    UserDataSize,
    captured,
    open_flags,
    open_print_fmt,
    shown,
)
from emulated_kernel.trace.ring.trace_entry import COMMON_SIZE, EventField
from emulated_kernel.trace.symbols import KernelSymbols

GROUP = "syscalls"
_FIRST_HEX = 10
"""Smallest value of an argument that Linux 7.2 shows in hexadecimal."""
_NO_USER_ARGUMENTS = UserArguments(())


def event_names(syscall: str) -> tuple[str, str]:
    """Return (name of the entry event, name of the exit event) of the system call called `syscall`.

    `syscall`: a name with its prefix, such as `sys_read`.
    """
    return syscall.replace("sys_", "sys_enter_", 1), syscall.replace("sys_", "sys_exit_", 1)


class SyscallTracepoint:
    """Dispatcher for the entries or exits of all system calls: passes each record to its call's event.

    Mirrors: kernel/trace/trace_syscalls.c:ftrace_syscall_enter, ftrace_syscall_exit (v6.1).
    """

    def __init__(self, raw: Tracepoint, word_size: int, start: int = 0, preempt_count: int = 1) -> None:
        """Create the dispatcher for entries or exits.

        `raw` is the tracepoint of raw_syscalls:sys_enter or sys_exit. `word_size` is the size of a long in
        bytes. `start` is the offset in bytes of the system call's number in the tracepoint's records.
        `preempt_count` is the amount that the tracepoint adds to common_preempt_count of the records.
        """
        self._raw = raw
        self._start = start
        self._preempt_count = preempt_count
        self.word_size = word_size
        self._events: dict[int, SyscallEvent] = {}

    def start(self, event: SyscallEvent) -> None:
        """Begin to pass the records of the event's system call to the event."""
        if not self._events:
            self._raw.subscribe(self._record)
        self._events[event.syscall.nr] = event

    def stop(self, event: SyscallEvent) -> None:
        """Stop passing records to the event."""
        del self._events[event.syscall.nr]
        if not self._events:
            self._raw.unsubscribe(self._record)

    def _record(self, raw: bytes, hit: ProbeHit) -> None:
        raw = raw[self._start :]
        number = int.from_bytes(raw[: self.word_size], "little", signed=True)
        event = self._events.get(number)
        if event is None:
            return
        payload = raw[:4].ljust(self.word_size, b"\0") + event.words(raw[self.word_size :], hit)
        # Linux: the tracepoint's own preempt_disable_notrace() is counted here; other events subtract it.
        with within_another(hit, preempt_count=self._preempt_count):
            event.record(payload, hit)


class SyscallEvent(TraceEvent):
    """Base class of entry and exit events.

    A record has `int __syscall_nr`, and a word for each other field.
    """

    def __init__(
        self, name: str, syscall: SyscallDefinition, calls: SyscallTracepoint, print_fmt: str = ""
    ) -> None:
        self.syscall = syscall
        self._calls = calls
        self._word = calls.word_size
        super().__init__(GROUP, name, print_fmt=print_fmt)

    @abstractmethod
    def word_fields(self) -> Iterable[tuple[str, str, bool]]:
        """Return C type, name, and whether the type is signed, of each word after `__syscall_nr`."""

    @property
    def fields(self) -> tuple[EventField, ...]:
        """The event's own fields.

        The fields are computed at each use, because there are hundreds of events, and programs read the
        fields of only a few.
        """
        word = self._word
        words = (
            EventField(kind, field, COMMON_SIZE + word * (1 + index), word, is_signed)
            for index, (kind, field, is_signed) in enumerate(self.word_fields())
        )
        return EventField("int", "__syscall_nr", COMMON_SIZE, 4, True), *words

    def start(self) -> None:
        """Subscribe to the records of this system call."""
        self._calls.start(self)

    def stop(self) -> None:
        """Unsubscribe from the records of this system call."""
        self._calls.stop(self)

    @abstractmethod
    def words(self, raw: bytes, hit: ProbeHit) -> bytes:
        """Return the event's payload after the number of the system call.

        `raw`: the part of a raw_syscalls record that follows this number. `hit`: the hit, by which user
        memory can be read.
        """

    def print_line(
        self, payload: bytes, symbols: KernelSymbols, *, sym_addr: bool = False, verbose: bool = False
    ) -> str:
        """Return the text that `trace` shows after the timestamp. As in Linux, it omits the event's name."""
        del verbose
        return self.print_record(payload, symbols, sym_addr=sym_addr)

    def _word_at(self, payload: bytes, index: int) -> int:
        at = self._word * (1 + index)
        return int.from_bytes(payload[at : at + self._word], "little")


class SyscallEnter(SyscallEvent):
    """Event sys_enter_NAME: its records have a word for each argument, and since 7.2 some user memory."""

    def __init__(
        self,
        syscall: SyscallDefinition,
        calls: SyscallTracepoint,
        user_data: UserDataSize | None = None,
    ) -> None:
        """Create the entry event of the system call `syscall`.

        `calls` is the dispatcher for the entries of all system calls. `user_data` limits the user memory in
        records; None if records contain no user memory.
        """
        name, _ = event_names(syscall.name)
        own = syscall.name.removeprefix("sys_")
        self._user_data = user_data
        self._user = USER_ARGUMENTS.get(own) if user_data is not None else None
        self._is_open = self._user is not None and own == "openat"
        self._located = COMMON_SIZE + calls.word_size * (1 + len(syscall.args))
        """Offset of the first `__data_loc` field in the entry."""
        super().__init__(name, syscall, calls)

    def word_fields(self) -> Iterable[tuple[str, str, bool]]:
        """Return C type, name, and whether the type is signed, of each argument."""
        pairs = zip(self.syscall.types, self.syscall.args, strict=True)
        return ((kind, name, False) for kind, name in pairs)

    @property
    def fields(self) -> tuple[EventField, ...]:
        """The event's own fields, in the order of the `format` file.

        These are __syscall_nr, a word for each argument, and a `__data_loc char[]` for each argument whose
        user memory is recorded.
        """
        positions = () if self._user is None else self._user.positions
        located = (
            EventField(
                "__data_loc char[]", f"__{self.syscall.args[at]}_val", self._located + 4 * index, 4, False
            )
            for index, at in enumerate(positions)
        )
        return *super().fields, *located

    @property
    def print_fmt(self) -> str:
        """The print format, as the `format` file shows it.

        Mirrors: kernel/trace/trace_syscalls.c:__set_enter_print_fmt (v6.1, v7.2).
        """
        if self._is_open:
            return open_print_fmt()
        args = self.syscall.args
        user = self._user or _NO_USER_ARGUMENTS
        form = r" \"%s\"" if user.is_string else " (%s)"
        formats = []
        values = ""
        for at, name in enumerate(args):
            has_memory = at in user.positions
            formats.append(f"{name}: 0x%0{self._word}lx{form if has_memory else ''}")
            values += f", ((unsigned long)(REC->{name}))"
            if has_memory:
                values += (
                    f", __get_str(__{name}_val)"
                    if user.is_string
                    else f", __print_dynamic_array(__{name}_val, 1)"
                )
        return f'"{", ".join(formats)}"{values}'

    def words(self, raw: bytes, hit: ProbeHit) -> bytes:
        words = raw[: self._word * len(self.syscall.args)]
        if self._user is None or self._user_data is None:
            return words
        args = [
            int.from_bytes(words[at : at + self._word], "little") for at in range(0, len(words), self._word)
        ]
        return words + captured(self._user, args, self._located, self._user_data.value, hit)

    def print_record(self, payload: bytes, symbols: KernelSymbols, *, sym_addr: bool = False) -> str:
        """Return the text of a system call's record: NAME(argument: value, ...).

        Mirrors: kernel/trace/trace_syscalls.c:print_syscall_enter (v6.1).
        """
        del symbols, sym_addr
        return self._open_call(payload) if self._is_open else self._call(payload, self.syscall.args)

    def print_line(
        self, payload: bytes, symbols: KernelSymbols, *, sym_addr: bool = False, verbose: bool = False
    ) -> str:
        """Return the text that `trace` shows after the timestamp, with argument types if `verbose` is set."""
        if not verbose:
            return self.print_record(payload, symbols, sym_addr=sym_addr)
        pairs = zip(self.syscall.types, self.syscall.args, strict=True)
        return self._call(payload, [f"{kind} {name}" for kind, name in pairs])

    def _call(self, payload: bytes, names: Sequence[str]) -> str:
        if self._user_data is None:
            args = (f"{name}: {self._word_at(payload, at):x}" for at, name in enumerate(names))
            return f"{self.syscall.name}({', '.join(args)})"
        values = [self._word_at(payload, at) for at in range(len(names))]
        shown_args = []
        for at, (name, value) in enumerate(zip(names, values, strict=True)):
            text = f"{name}: {value}" if value < _FIRST_HEX else f"{name}: {value:#x}"
            shown_args.append(text + self._memory(payload, at, values))
        return f"{self.syscall.name}({', '.join(shown_args)})"

    def _memory(self, payload: bytes, at: int, values: Sequence[int]) -> str:
        """Return the text of the user memory of argument number `at`, or "" if none was recorded.

        `at` counts from 0. `values` are the values of all arguments of the call.
        """
        user = self._user
        if user is None or at not in user.positions:
            return ""
        word = self._located - COMMON_SIZE + 4 * user.positions.index(at)
        location = int.from_bytes(payload[word : word + 4], "little")
        start = (location & 0xFFFF) - COMMON_SIZE
        return shown(user, payload[start : start + (location >> 16)], values)

    def _open_call(self, payload: bytes) -> str:
        """Return the text of an openat() with the names of its flags.

        Mirrors: kernel/trace/trace_syscalls.c:sys_enter_openat_print (v7.2).
        """
        dfd, filename, flags, mode = (self._word_at(payload, at) for at in range(4))
        names = self.syscall.args
        memory = self._memory(payload, 1, (dfd, filename, flags, mode))
        text, has_mode = open_flags(flags & 0xFFFFFFFF)
        end = f", {names[3]}: 0{mode & 0xFFFFFFFF:03o}" if has_mode else ""
        return f"{self.syscall.name}({names[0]}: {dfd}, {names[1]}: {filename}{memory}, flags: {text}{end})"


class SyscallExit(SyscallEvent):
    """Event sys_exit_NAME, which has one word for the result."""

    def __init__(self, syscall: SyscallDefinition, calls: SyscallTracepoint) -> None:
        _, name = event_names(syscall.name)
        super().__init__(name, syscall, calls, '"0x%lx", REC->ret')

    def word_fields(self) -> Iterable[tuple[str, str, bool]]:
        """Return C type, name, and whether the type is signed, of the only word, which is the result."""
        return (("long", "ret", True),)

    def words(self, raw: bytes, hit: ProbeHit) -> bytes:
        del hit
        return raw[: self._word]

    def print_record(self, payload: bytes, symbols: KernelSymbols, *, sym_addr: bool = False) -> str:
        """Return the text of a system call's result: NAME -> result.

        Mirrors: kernel/trace/trace_syscalls.c:print_syscall_exit (v6.1).
        """
        del symbols, sym_addr
        return f"{self.syscall.name} -> {self._word_at(payload, 0):#x}"
