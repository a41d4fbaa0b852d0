"""The files of a trace array, which the top directory and each instance have."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar

from emulated_kernel.trace.array.raw_pipe import RawPipe
from emulated_kernel.trace.array.services import FUNCTION_TRACER
from emulated_kernel.trace.array.trace_array import TraceArray
from emulated_kernel.trace.array.trace_pipe import TracePipe
from emulated_kernel.trace.events.array_events import EventPidsFile
from emulated_kernel.trace.events.event import TraceEvent
from emulated_kernel.trace.events.syscall_user_data import UserDataSize
from emulated_kernel.trace.events.trigger import Trigger
from emulated_kernel.trace.interface import InterfaceRule
from emulated_kernel.trace.output.options import TraceOptions
from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.trace.trace_arrays import TraceArrays, Tracing
from emulated_kernel.trace.tracers.function_tracer import FunctionTracer
from emulated_kernel.trace.trigger.triggers import trigger_line
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.attribute_file import AttributeFile
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.command_file import (
    CommandFile,
    Execute,
    MarkerFile,
    OpenCommand,
    RawMarkerFile,
    SteppedFile,
    WrittenList,
)
from emulated_kernel.vfs.core.edited_file import EditedFile, LastCloseFile
from emulated_kernel.vfs.core.kstrtox import cpumask, kstrtoul
from emulated_kernel.vfs.core.modes import DIRECTORY, OWNER_WRITE_ONLY, READ_ONLY, READ_WRITE, WRITE_ONLY
from emulated_kernel.vfs.core.node import Directory, DynamicDirectory, Node, Objects
from emulated_kernel.vfs.core.open_file import File, Moves, OpenFile
from emulated_kernel.vfs.core.pipe_file import OpenPipe, PipeFile
from emulated_kernel.vfs.core.seq_file import Records, RecordStream, SeqFile, listing, listing_of, single
from emulated_kernel.vfs.trees.events_dir import events_directory

NAME_MAX = 100
"""Maximum length of a tracer's name in bytes; the rest of a longer name is ignored.

Mirrors: kernel/trace/trace.c:MAX_TRACER_SIZE (v6.1).
"""
CLOCK_BUFFER = 64
"""Size in bytes of Linux's buffer for a clock's name and a NUL.

Mirrors: kernel/trace/trace.c:tracing_clock_write (v6.1).
"""
_MASK_CHUNK = 32
_EVENT_COLUMN = 32
"""Column at which the filter or trigger begins in show_event_filters and show_event_triggers."""
_ULONG_MAX = (1 << 64) - 1


def trace_array_files(tracing: Tracing, *, instance: bool = False) -> dict[str, Node]:
    """Return name -> node of a trace array's files.

    `instance`: whether the trace array is an instance, in which some options have no files. It also decides
    who owns the directories of new groups; see events_directory().
    Mirrors: kernel/trace/trace.c:init_tracer_tracefs (v6.1).
    """
    array = tracing.array
    return {
        **_buffer_files(tracing),
        **_control_files(array),
        "error_log": CommandFile(
            READ_WRITE, listing(tracing.errors.records), execute=len, truncate=tracing.errors.clear
        ),
        "events": events_directory(tracing, instance=instance),
        "options": _options_directory(array.options, instance=instance),
        "per_cpu": Directory(DIRECTORY, {f"cpu{cpu}": _per_cpu(tracing, cpu) for cpu in range(array.cpus)}),
        "set_event": SteppedFile(
            READ_WRITE,
            listing(tracing.events.records),
            tracing.events.write_steps,
            tracing.events.clear,
            moves=Moves.BY_BYTES,
        ),
        **(_event_lists(tracing) if InterfaceRule.EVENT_LISTS in array.system.interface else {}),
        **_user_data_file(array.system.user_data),
        "set_event_notrace_pid": list_file(EventPidsFile(tracing.events, array.pids.untraced)),
        "set_event_pid": list_file(EventPidsFile(tracing.events, array.pids.traced)),
        **(_function_files(tracing.functions) if FUNCTION_TRACER in array.tracers() else {}),
    }


def _function_files(functions: FunctionTracer) -> dict[str, Node]:
    return {
        "set_ftrace_filter": EditedFile(READ_WRITE, functions.filter),
        "set_ftrace_notrace": EditedFile(READ_WRITE, functions.notrace),
        "set_ftrace_notrace_pid": list_file(functions.pids.untraced),
        "set_ftrace_pid": list_file(functions.pids.traced),
    }


def _user_data_file(size: UserDataSize | None) -> dict[str, Node]:
    if size is None:
        return {}
    return {"syscall_user_buf_size": number_file(lambda: size.value, size.set)}


def _event_lists(tracing: Tracing) -> dict[str, Node]:
    """Return name -> node of the files show_event_filters and show_event_triggers.

    Mirrors: kernel/trace/trace_events.c:t_show_filters, t_show_triggers (v7.2).
    """

    def filters() -> Iterator[str]:
        for event in tracing.events.switchable():
            text = tracing.filters.set_text(event)
            if text is not None:
                yield f"{_padded(event)}{text}\n"

    def triggers() -> Iterator[tuple[TraceEvent, Trigger]]:
        for event in tracing.events.switchable():
            if tracing.array in event.files:
                yield from ((event, trigger) for trigger in tracing.triggers.visible(event))

    def line(shown: tuple[TraceEvent, Trigger]) -> str:
        event, trigger = shown
        return f"{_padded(event)}{trigger_line(trigger)}"

    return {
        "show_event_filters": SeqFile(READ_ONLY, listing(filters)),
        "show_event_triggers": SeqFile(READ_ONLY, listing_of(triggers, line)),
    }


def _padded(event: TraceEvent) -> str:
    """Return `GROUP:EVENT` followed by at least one blank, and by blanks up to column _EVENT_COLUMN."""
    return f"{event.group}:{event.name} ".ljust(_EVENT_COLUMN)


class _InstancesDirectory(DynamicDirectory[Tracing]):
    is_kept_by_open_files = True
    names_are_clients = True
    __slots__ = ()


def instances_directory(arrays: TraceArrays) -> Directory:
    """Return instances/, with a directory for each trace array except the top one.

    Removing a directory with an open file fails with EBUSY.
    """

    def remove(name: str) -> None:
        node = directory.get(name)
        if isinstance(node, Directory) and node.open_files:
            raise KernelError(errno.EBUSY, f"{name} has open files")
        arrays.remove(name)

    directory = _InstancesDirectory(
        DIRECTORY,
        Objects(
            names=arrays.names,
            find=arrays.find,
            make=lambda tracing: Directory(DIRECTORY, trace_array_files(tracing, instance=True)),
        ),
        mkdir=arrays.make,
        rmdir=remove,
    )
    return directory


def list_file(lines: WrittenList) -> File:
    """Return a file that shows a list. A write adds entries to the list, and O_TRUNC removes all entries."""
    return CommandFile(READ_WRITE, lines.records_from, lines.write, lines.clear, moves=Moves.BY_BYTES)


def number_file(
    value: Callable[[], int],
    store: Callable[[int], None],
    moves: Moves = Moves.BY_BYTES,
    kind: type[AttributeFile] = AttributeFile,
) -> File:
    """Return a file that shows the number that `value` returns. A write passes its number to `store`.

    kstrtoul() parses the number. `moves`: distance by which a write moves the file position.
    `kind`: class of the file.
    """
    return kind(READ_WRITE, lambda: f"{value():d}\n", lambda data: store(kstrtoul(data)), moves)


def time_file(nanoseconds: Callable[[], int], store: Callable[[int], None]) -> File:
    """Return a file of a time, which clients read and write in microseconds.

    `nanoseconds` returns the time in nanoseconds. A write passes the time in nanoseconds to `store`.
    Linux: the nanoseconds are an unsigned long, which wraps.
    Mirrors: kernel/trace/trace.c:tracing_nsecs_read, tracing_nsecs_write (v6.1).
    """
    return number_file(
        lambda: nanoseconds() // 1000, lambda usecs: store(usecs * 1000 & _ULONG_MAX), Moves.NOT
    )


def _buffer_files(tracing: Tracing) -> dict[str, Node]:
    array = tracing.array
    return {
        "buffer_percent": number_file(lambda: array.buffer_percent, array.set_buffer_percent, Moves.BY_ONE),
        "buffer_size_kb": _buffer_size(array, None),
        "buffer_total_size_kb": AttributeFile(READ_ONLY, array.buffer_total_size_text),
        **_subbuf_file(array),
        "free_buffer": LastCloseFile(OWNER_WRITE_ONLY, array.free_buffer),
        "snapshot": _snapshot(tracing, None),
        "trace": _TraceFile(array, None),
        "trace_marker": MarkerFile(WRITE_ONLY, None, execute=array.write_marker),
        "trace_marker_raw": RawMarkerFile(WRITE_ONLY, None, execute=array.write_raw_marker),
        "trace_pipe": PipeFile(READ_ONLY, lambda: TracePipe(array)),
    }


def _subbuf_file(array: TraceArray) -> dict[str, Node]:
    """Return name -> file for buffer_subbuf_size_kb; the dict is empty if the kernel lacks the file.

    Mirrors: kernel/trace/trace.c:buffer_subbuf_size_read, buffer_subbuf_size_write (v6.12).
    """
    if InterfaceRule.SUBBUF_SIZE not in array.system.interface:
        return {}
    size = number_file(lambda: PAGE_SIZE << array.order >> 10, array.set_subbuf_size, Moves.BY_ONE)
    return {"buffer_subbuf_size_kb": size}


def _control_files(array: TraceArray) -> dict[str, Node]:
    return {
        "available_tracers": AttributeFile(READ_ONLY, show=lambda: " ".join(array.tracers()) + "\n"),
        "current_tracer": AttributeFile(
            READ_WRITE,
            show=lambda: f"{array.current_tracer}\n",
            store=lambda data: array.set_tracer(tracer_name(data)),
        ),
        "timestamp_mode": AttributeFile(READ_ONLY, lambda: "[delta] absolute\n"),
        "trace_clock": AttributeFile(
            READ_WRITE, array.clock_text, store=lambda data: array.set_clock(clock_name(data))
        ),
        "trace_options": CommandFile(
            READ_WRITE, single(array.options.text), array.options.write, moves=Moves.BY_BYTES
        ),
        "tracing_cpumask": AttributeFile(
            READ_WRITE,
            show=lambda: mask_text(array.cpumask, array.cpus),
            store=lambda data: array.set_cpumask(cpumask(data, array.cpus)),
            moves=Moves.NOT,
        ),
        **_max_latency(array),
        "tracing_on": number_file(lambda: array.tracing_on, array.write_tracing_on, Moves.BY_ONE),
    }


def _per_cpu(tracing: Tracing, cpu: int) -> Directory:
    array = tracing.array
    return Directory(
        DIRECTORY,
        {
            "buffer_size_kb": _buffer_size(array, cpu),
            "snapshot": _snapshot(tracing, cpu),
            "snapshot_raw": _RawFile(array, cpu, snapshot=True),
            "stats": AttributeFile(READ_ONLY, show=lambda: array.stats_text(cpu)),
            "trace": _TraceFile(array, cpu),
            "trace_pipe": PipeFile(READ_ONLY, lambda: TracePipe(array, cpu)),
            "trace_pipe_raw": _RawFile(array, cpu),
        },
    )


def _options_directory(options: TraceOptions, *, instance: bool) -> Directory:
    """Return options/, which has a switch for each option.

    `instance`: whether to leave out the options for which instances have no files.
    """
    names = options.names(instance=instance)
    return Directory(
        DIRECTORY,
        {name: number_file(partial(options.get, name), partial(options.set, name)) for name in names},
    )


class _OpenRecords(OpenCommand):
    """An open `trace` or `snapshot` file. While it is open for reading, its buffers cannot be resized.

    Mirrors: kernel/trace/ring_buffer.c:ring_buffer_read_prepare (v6.1).
    """

    node: _RecordsFile

    def __init__(self, node: _RecordsFile, flags: int, client: Client) -> None:
        super().__init__(node, flags, client)
        self._held = [*node.buffers()] if self.readable else []
        for buffer in self._held:
            buffer.held += 1

    @property
    def acts_on_close(self) -> bool:
        return self.readable

    def release(self) -> None:
        for buffer in self._held:
            buffer.held -= 1


class _RecordsFile(CommandFile):
    """A `trace` or `snapshot` file, whose lines are rendered when they are read."""

    opened_as: ClassVar[type[OpenFile]] = _OpenRecords
    __slots__ = ("_begin", "buffers")

    def __init__(
        self,
        buffers: Callable[[], Sequence[RingBuffer]],
        begin: Callable[[], Iterator[str]],
        execute: Execute,
        truncate: Callable[[], None] | None = None,
        *,
        moves: Moves = Moves.NOT,
    ) -> None:
        super().__init__(READ_WRITE, None, execute, truncate, moves=moves)
        self.buffers = buffers
        self._begin = begin

    def records_for(self, client: Client) -> Records:
        del client
        return RecordStream(self._begin)


def _of_cpu(buffers: Sequence[RingBuffer], cpu: int | None) -> Sequence[RingBuffer]:
    return buffers if cpu is None else [buffers[cpu]]


class _OpenTrace(_OpenRecords):
    """An open `trace` file.

    While the file is open for reading, recording stops if the option pause-on-trace is set.
    """

    node: _TraceFile

    def __init__(self, node: _TraceFile, flags: int, client: Client) -> None:
        super().__init__(node, flags, client)
        if self.readable and node.array.pauses_for_readers:
            node.array.stop()

    def release(self) -> None:
        if self.readable:
            # Linux: a reader that opened the file before the option was set also undoes another reader's
            # stop.
            self.node.array.start()
        super().release()


class _TraceFile(_RecordsFile):
    """The file `trace`: writes are ignored, and O_TRUNC clears the buffer."""

    opened_as = _OpenTrace
    __slots__ = ("array",)

    def __init__(self, array: TraceArray, cpu: int | None) -> None:
        super().__init__(
            lambda: _of_cpu(array.buffers, cpu),
            lambda: array.trace_records(cpu, is_followed=True),
            execute=len,
            truncate=lambda: array.clear_trace(cpu),
        )
        self.array = array


class _OpenRaw(OpenPipe):
    _source: RawPipe

    def read_page(self, size: int) -> bytes:
        self.node.check_attached()
        return self._source.splice_page() if size == PAGE_SIZE else super().read_page(size)


class _RawFile(PipeFile):
    """A file trace_pipe_raw or snapshot_raw, which several clients can have open at the same time."""

    is_paged = True
    opened_as = _OpenRaw
    __slots__ = ()

    def __init__(self, array: TraceArray, cpu: int, *, snapshot: bool = False) -> None:
        super().__init__(READ_ONLY, lambda: RawPipe(array, cpu, snapshot=snapshot))


def _snapshot(tracing: Tracing, cpu: int | None) -> File:
    array = tracing.array

    def execute(data: bytes) -> int:
        tracing.events.expand()
        array.snapshot.write(kstrtoul(data), cpu)
        return len(data)

    return _RecordsFile(
        lambda: _of_cpu(array.snapshot.buffers, cpu),
        lambda: array.snapshot_records(cpu),
        execute,
        moves=Moves.BY_BYTES,
    )


def _buffer_size(array: TraceArray, cpu: int | None) -> File:
    """Return buffer_size_kb of one CPU's buffer, or of all buffers if `cpu` is None.

    Mirrors: kernel/trace/trace.c:tracing_entries_read, tracing_entries_write (v6.1).
    """
    return AttributeFile(
        READ_WRITE,
        show=lambda: array.buffer_size_text(cpu),
        store=lambda data: array.resize_buffer(kstrtoul(data), cpu),
    )


def _max_latency(array: TraceArray) -> dict[str, Node]:
    if InterfaceRule.NO_MAX_LATENCY in array.system.interface:
        return {}

    def store(nanoseconds: int) -> None:
        array.max_latency_ns = nanoseconds

    return {"tracing_max_latency": time_file(lambda: array.max_latency_ns, store)}


def tracer_name(data: bytes) -> str:
    """Parse a write to current_tracer: return the tracer's name without surrounding whitespace.

    Mirrors: kernel/trace/trace.c:tracing_set_trace_write (v6.1).
    """
    return data[:NAME_MAX].decode("latin-1").strip()


def clock_name(data: bytes) -> str:
    """Parse a write to trace_clock: return the clock's name without surrounding whitespace.

    Raises: KernelError EINVAL (too long). Mirrors: kernel/trace/trace.c:tracing_clock_write (v6.1).
    """
    if len(data) >= CLOCK_BUFFER:
        raise KernelError(errno.EINVAL, "clock: the name is too long")
    return data.split(b"\0", 1)[0].decode("latin-1").strip()


def mask_text(mask: int, cpus: int) -> str:
    """Return a mask of `cpus` CPUs as hexadecimal text, in chunks of 32 bits with commas between them.

    Mirrors: lib/vsprintf.c:bitmap_string (v6.1).
    """
    chunks = []
    for start in range((cpus - 1) // _MASK_CHUNK * _MASK_CHUNK, -1, -_MASK_CHUNK):
        digits = -(-min(_MASK_CHUNK, cpus - start) // 4)
        chunks.append(f"{mask >> start & 0xFFFFFFFF:0{digits}x}")
    return ",".join(chunks) + "\n"
