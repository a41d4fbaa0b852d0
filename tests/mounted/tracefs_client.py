"""A client in `kprobefs run` that uses the mount by libtracefs, as programs in C do.

tracefs_client.py [CASE...]

Runs the functions CASE, or all functions of CASES. Prints one line of JSON: name -> traceback of each failed
case. $TRACING is the directory for the library; some calls of version 1.6 still look for a tracefs of the
system.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_bool, c_char_p, c_int, c_longlong, c_size_t, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

from tests.sample import fewer

TRACING = Path(os.environ.get("TRACING", "/sys/kernel/tracing"))
CASES: list[Callable[[], None]] = []
RECORDS = fewer(600, 2)
"""Number of markers on two CPUs; those of one CPU take more than a page."""
PAGED = fewer(3000, 3)
"""Number of markers that take several pages."""
KPROBE, KRETPROBE, EPROBE, SYNTH = 1 << 0, 1 << 1, 1 << 4, 1 << 5
"""Values of enum tracefs_dynevent_type."""
START, DESTROY = 0, 4
"""Values of enum tracefs_hist_command."""
RESET = 1
"""The flag TRACEFS_FL_RESET."""
OPTIONS = 64
"""A number above all values of enum tracefs_option_id."""


class Event(ctypes.Structure):
    """The beginning of struct tep_event."""

    _fields_ = [("tep", c_void_p), ("name", c_char_p), ("id", c_int)]


class Record(ctypes.Structure):
    """The beginning of struct tep_record."""

    _fields_ = [
        ("ts", c_ulonglong),
        ("offset", c_ulonglong),
        ("missed_events", c_longlong),
        ("record_size", c_int),
        ("size", c_int),
        ("data", c_void_p),
        ("cpu", c_int),
    ]


ON_RECORD = ctypes.CFUNCTYPE(c_int, POINTER(Event), POINTER(Record), c_int, c_void_p)
ON_NAME = ctypes.CFUNCTYPE(c_int, c_char_p, c_void_p)


class Library:
    """The functions of libtracefs and libtraceevent, as attributes. RESULTS has the types of results other
    than int.
    """

    def __init__(self) -> None:
        self._events = ctypes.CDLL("libtraceevent.so.1", ctypes.RTLD_GLOBAL)
        self._files = ctypes.CDLL("libtracefs.so.1")

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._events if name.startswith("tep_") else self._files, name)
        function.restype = RESULTS.get(name, c_int)
        setattr(self, name, function)
        return function


RESULTS: dict[str, Any] = {
    "tep_find_event": POINTER(Event),
    "tep_find_event_by_name": POINTER(Event),
    "tracefs_error_all": c_char_p,
    "tracefs_error_last": c_char_p,
    "tracefs_get_clock": c_char_p,
    "tracefs_get_tracing_file": c_char_p,
    "tracefs_instance_exists": c_bool,
    "tracefs_instance_get_affinity": c_char_p,
    "tracefs_instance_get_dir": c_char_p,
    "tracefs_instance_get_file": c_char_p,
    "tracefs_instance_get_name": c_char_p,
    "tracefs_instance_is_new": c_bool,
    "tracefs_instance_file_read": c_char_p,
    "tracefs_option_is_enabled": c_bool,
    "tracefs_option_is_supported": c_bool,
    "tracefs_option_name": c_char_p,
    "tracefs_tracing_dir": c_char_p,
    "tracefs_file_exists": c_bool,
    "tracefs_dir_exists": c_bool,
    **dict.fromkeys(
        [
            "tracefs_cpu_open",
            "tracefs_dynevent_get_all",
            "tracefs_eprobe_alloc",
            "tracefs_event_systems",
            "tracefs_hist_alloc",
            "tracefs_instance_create",
            "tracefs_kprobe_alloc",
            "tracefs_kretprobe_alloc",
            "tracefs_local_events",
            "tracefs_sql",
            "tracefs_system_events",
            "tracefs_tracers",
        ],
        c_void_p,
    ),
}
lib = Library()


def case(function: Callable[[], None]) -> Callable[[], None]:
    """Add `function` to the list CASES, and return it."""
    CASES.append(function)
    return function


def pointer(value: int | None) -> c_void_p:
    """Return a pointer with the value `value`, an address that the library has returned.

    Assert that the address is not NULL.
    """
    assert value
    return c_void_p(value)


def strings(value: int | None) -> list[str]:
    """Return the strings of the library's list at the address `value`. The list ends with NULL."""
    listed = ctypes.cast(pointer(value), POINTER(c_char_p))
    found = []
    while (text := listed[len(found)]) is not None:
        found.append(text.decode())
    return found


def shown(path: str) -> str:
    return (TRACING / path).read_text()


@contextmanager
def instance(name: str = "one") -> Iterator[c_void_p]:
    """Yield an instance called `name`, and remove the instance after the block."""
    made = pointer(lib.tracefs_instance_create(name.encode()))
    try:
        yield made
    finally:
        assert lib.tracefs_instance_destroy(made) == 0
        lib.tracefs_instance_free(made)
    assert not (TRACING / "instances" / name).exists()


def events() -> c_void_p:
    return pointer(lib.tracefs_local_events(None))


def recorded(of: c_void_p | None, cpus: list[int] | None = None) -> list[tuple[str, int, int, bytes]]:
    """Return (name, time, CPU, data) for each event that the library reads from raw pages.

    `of`: the instance, or None for the top trace array. `cpus`: the CPUs to read, by default all.
    """
    found = []

    @ON_RECORD
    def take(event: Any, record: Any, cpu: int, _context: int) -> int:
        assert cpu == record[0].cpu
        assert not record[0].missed_events
        data = ctypes.string_at(record[0].data, record[0].size)
        found.append((event[0].name.decode(), record[0].ts, cpu, data))
        return 0

    mask = None if cpus is None else byref(c_ulonglong(sum(1 << cpu for cpu in cpus)))
    assert lib.tracefs_iterate_raw_events(events(), of, mask, c_int(8 if mask else 0), take, None) == 0
    return found


def write(file: int, text: bytes) -> None:
    assert os.write(file, text) == len(text)


@case
def files_and_directories() -> None:
    assert lib.tracefs_tracing_dir() == str(TRACING).encode()
    assert lib.tracefs_get_tracing_file(b"trace") == str(TRACING / "trace").encode()
    with instance() as made:
        for of, place in ((None, TRACING), (made, TRACING / "instances/one")):
            assert lib.tracefs_instance_get_dir(of) == str(place).encode()
            assert lib.tracefs_instance_get_file(of, b"trace") == str(place / "trace").encode()
            for name, is_file, is_directory in (
                (b"current_tracer", True, False),
                (b"per_cpu", False, True),
                (b"nothing", False, False),
            ):
                assert lib.tracefs_file_exists(of, name) is is_file
                assert lib.tracefs_dir_exists(of, name) is is_directory
            size = c_int()
            text = lib.tracefs_instance_file_read(of, b"available_tracers", byref(size))
            assert (text.decode(), size.value) == ((place / "available_tracers").read_text(), len(text))
            assert lib.tracefs_instance_file_write(of, b"current_tracer", b"function") == len("function")
            assert (place / "current_tracer").read_text() == "function\n"
            assert lib.tracefs_instance_file_write(of, b"current_tracer", b"nop") == len("nop")
            number = c_longlong()
            assert lib.tracefs_instance_file_read_number(of, b"tracing_on", byref(number)) == 0
            assert number.value == 1
            assert lib.tracefs_instance_file_read_number(of, b"available_tracers", byref(number)) != 0


@case
def definitions_in_a_file() -> None:
    first, second = (
        b"p:one do_mkdirat path=+u0($arg2):ustring",
        b"p:two do_sys_openat2 file=+u0($arg2):ustring",
    )
    assert lib.tracefs_instance_file_write(None, b"kprobe_events", first) == len(first)
    assert lib.tracefs_instance_file_append(None, b"kprobe_events", second) == len(second)
    assert shown("kprobe_events").count("ustring") == 2
    assert lib.tracefs_instance_file_append(None, b"kprobe_events", b"-:one") == 5
    assert "one" not in shown("kprobe_events")
    assert lib.tracefs_instance_file_clear(None, b"kprobe_events") == 0
    assert shown("kprobe_events") == ""


@case
def instances() -> None:
    with instance("one") as one, instance("two"):
        assert lib.tracefs_instance_exists(b"one")
        assert not lib.tracefs_instance_exists(b"three")
        assert lib.tracefs_instance_is_new(one)
        assert lib.tracefs_instance_get_name(one) == b"one"
        again = pointer(lib.tracefs_instance_create(b"one"))
        assert not lib.tracefs_instance_is_new(again)
        lib.tracefs_instance_free(again)
        met = []
        assert lib.tracefs_instances_walk(ON_NAME(lambda name, _: met.append(name) or 0), None) == 0
        assert sorted(met) == [b"one", b"two"]


@case
def systems_and_events() -> None:
    systems = strings(lib.tracefs_event_systems(None))
    # The events of ftrace itself cannot be enabled.
    assert sorted(systems) == sorted(path.parent.name for path in TRACING.glob("events/*/enable"))
    for system in systems:
        listed = strings(lib.tracefs_system_events(None, system.encode()))
        there = (path.name for path in (TRACING / "events" / system).iterdir() if path.is_dir())
        assert sorted(listed) == sorted(there)
    tracers = strings(lib.tracefs_tracers(None))
    assert sorted(tracers) == sorted({*shown("available_tracers").split()} - {"nop"})


@case
def formats_of_all_events() -> None:
    tep = events()
    formats = list(TRACING.glob("events/*/*/format"))
    assert len(formats) > 200
    for path in formats:
        number = next(line for line in path.read_text().splitlines() if line.startswith("ID: ")).split()[1]
        event = lib.tep_find_event(tep, int(number))
        assert event, path
        assert event[0].name.decode() == path.parent.name


@case
def clock() -> None:
    for name in ("global", "local"):
        (TRACING / "trace_clock").write_text(name)
        assert lib.tracefs_get_clock(None) == name.encode()
    (TRACING / "trace_clock").write_text("local")


@case
def on_and_off() -> None:
    with instance() as made, open(TRACING / "instances/one/tracing_on", "r+b", 0) as file:
        for value, switch in ((0, lib.tracefs_trace_off), (1, lib.tracefs_trace_on)):
            assert switch(made) == 0
            assert lib.tracefs_trace_is_on(made) == value
        for value, switch in ((0, lib.tracefs_trace_off_fd), (1, lib.tracefs_trace_on_fd)):
            assert switch(file.fileno()) == 0
            assert lib.tracefs_trace_is_on(made) == value


@case
def options() -> None:
    known = {lib.tracefs_option_name(number).decode(): number for number in range(1, OPTIONS)}
    with instance() as made:
        there = {path.name for path in (TRACING / "instances/one/options").iterdir()}
        supported = {name for name, number in known.items() if lib.tracefs_option_is_supported(made, number)}
        assert supported == there & known.keys()
        assert len(supported) > 15
        for name in sorted(supported):
            number, file = known[name], TRACING / "instances/one/options" / name
            was = lib.tracefs_option_is_enabled(made, number)
            assert file.read_text() == f"{was:d}\n"
            switches = [lib.tracefs_option_enable, lib.tracefs_option_disable]
            for value in (not was, was):
                assert switches[not value](made, number) == 0, name
                assert file.read_text() == f"{value:d}\n", name


@case
def markers() -> None:
    data = (ctypes.c_uint * 2)(0xDEADBEEF, 7)
    with instance() as made:
        assert lib.tracefs_print_init(made) == 0
        assert lib.tracefs_binary_init(made) == 0
        for number in range(100):
            assert lib.tracefs_binary_write(made, data, ctypes.sizeof(data)) == 0
            assert lib.tracefs_printf(made, b"marker %d of %s", number, b"many") == 0
        lib.tracefs_print_close(made)
        lib.tracefs_binary_close(made)
        found = recorded(made)
    assert sum(name == "raw_data" and bytes(data) in raw for name, _, _, raw in found) == 100
    texts = [raw[16:].split(b"\0")[0].strip() for name, _, _, raw in found if name == "print"]
    assert texts == [b"marker %d of many" % number for number in range(100)]


@case
def records_of_each_cpu() -> None:
    own = os.sched_getaffinity(0)
    count = min(2, len(own))
    with instance() as made:
        for chosen in (None, *([cpu] for cpu in range(count))):
            file = os.open(TRACING / "instances/one/trace_marker", os.O_WRONLY)
            for number in range(RECORDS):
                os.sched_setaffinity(0, {sorted(own)[number % count]})
                write(file, b"number %d." % number)
            os.sched_setaffinity(0, own)
            os.close(file)
            found = recorded(made, chosen)
            times = [ts for _, ts, _, _ in found]
            assert times == sorted(times)
            got = [
                int(raw.split(b"number ")[1].split(b".")[0]) for name, _, _, raw in found if name == "print"
            ]
            cpus = {cpu for _, _, cpu, _ in found}
            if chosen is None:
                assert got == [*range(RECORDS)]
                assert len(cpus) == count
            else:
                assert cpus == set(chosen)
                assert len(got) == RECORDS // count
            (TRACING / "instances/one/trace").write_text("")


@case
def pages_of_a_cpu() -> None:
    """libtracefs reads all records of a CPU: full pages by splice(2), as trace-cmd does, and the last page by
    a flush.
    """
    with instance() as made:
        pages = b""
        reader = pointer(lib.tracefs_cpu_open(made, 0, c_bool(True)))
        size = lib.tracefs_cpu_read_size(reader)
        buffer = ctypes.create_string_buffer(size)
        os.sched_setaffinity(0, {own := min(os.sched_getaffinity(0))})
        assert own == 0
        file = os.open(TRACING / "instances/one/trace_marker", os.O_WRONLY)
        for number in range(PAGED):
            write(file, b"number %d." % number)
            if not number % 100:
                while (taken := lib.tracefs_cpu_buffered_read(reader, buffer, c_bool(True))) > 0:
                    pages += buffer.raw[:taken]
        os.close(file)
        for take in (lib.tracefs_cpu_buffered_read, lib.tracefs_cpu_read):
            while (taken := take(reader, buffer, c_bool(True))) > 0:
                pages += buffer.raw[:taken]
        while (taken := lib.tracefs_cpu_flush(reader, buffer)) > 0:
            pages += buffer.raw[:taken]
        lib.tracefs_cpu_close(reader)
    assert [int(text.split(b".")[0]) for text in pages.split(b"number ")[1:]] == [*range(PAGED)]


@case
def dynamic_events() -> None:
    made = [
        pointer(lib.tracefs_kprobe_alloc(b"mine", b"in", b"vfs_mkdir", b"name=$arg1")),
        pointer(lib.tracefs_kretprobe_alloc(b"mine", b"out", b"vfs_mkdir", b"ret=$retval", 0)),
        pointer(lib.tracefs_eprobe_alloc(b"mine", b"on", b"syscalls", b"sys_enter_mkdir", b"mode=$mode")),
    ]
    for event, kind in zip(made, (KPROBE, KRETPROBE, EPROBE), strict=True):
        assert lib.tracefs_dynevent_create(event) == 0
        assert lib.tracefs_dynevent_create(event) != 0
        parts = [c_char_p() for _ in range(5)]
        assert lib.tracefs_dynevent_info(event, *map(byref, parts)) == kind
        assert parts[0].value == b"mine"
        assert (TRACING / "events/mine" / (parts[1].value or b"").decode()).is_dir()
        listed = ctypes.cast(pointer(lib.tracefs_dynevent_get_all(kind, b"mine")), POINTER(c_void_p))
        assert listed[0]
        assert not listed[1]
    assert len(shown("dynamic_events").splitlines()) == 3
    assert lib.tracefs_event_enable(None, b"mine", None) == 0
    assert lib.tracefs_event_is_enabled(None, b"mine", None) == 1
    # Without force, an event that is in use is not destroyed.
    assert lib.tracefs_dynevent_destroy(made[0], c_bool(False)) != 0
    for event in made:
        assert lib.tracefs_dynevent_destroy(event, c_bool(True)) == 0
        lib.tracefs_dynevent_free(event)
    assert shown("dynamic_events") == ""


@case
def errors() -> None:
    assert lib.tracefs_error_clear(None) == 0
    wrong = pointer(lib.tracefs_kprobe_alloc(b"mine", b"wrong", b"no_such_function", b""))
    assert lib.tracefs_dynevent_create(wrong) != 0
    assert b"no_such_function" in lib.tracefs_error_last(None)
    assert lib.tracefs_error_all(None).decode() == shown("error_log")
    assert lib.tracefs_error_clear(None) == 0
    assert lib.tracefs_error_last(None) is None


@case
def filters() -> None:
    tep = events()
    event = lib.tep_find_event_by_name(tep, b"sched", b"sched_switch")
    text = c_char_p()
    number = b"next_pid"
    assert lib.tracefs_event_append_filter(event, byref(text), 0, number, 2, b"100") == 0
    assert lib.tracefs_event_append_filter(event, byref(text), 1, None, 0, None) == 0
    assert lib.tracefs_event_append_filter(event, byref(text), 0, b"next_comm", 0, b'"cat"') == 0
    assert lib.tracefs_event_verify_filter(event, text, None) == 0
    with instance() as made:
        assert lib.tracefs_event_filter_apply(made, event, text) > 0
        assert (TRACING / "instances/one/events/sched/sched_switch/filter").read_text() == (
            f"{(text.value or b'').decode()}\n"
        )
        assert lib.tracefs_event_filter_clear(made, event) >= 0
    assert lib.tracefs_event_verify_filter(event, b"no_field == 1", None) != 0


@case
def functions() -> None:
    with instance() as made:
        assert lib.tracefs_function_filter(made, b"vfs_mk*", None, RESET) == 0
        chosen = (TRACING / "instances/one/set_ftrace_filter").read_text().split()
        assert chosen == ["vfs_mkdir", "vfs_mknod"]
        assert lib.tracefs_function_filter(made, b"^vfs_rmdir$", None, 0) == 0
        chosen = (TRACING / "instances/one/set_ftrace_filter").read_text().split()
        assert sorted(chosen) == ["vfs_mkdir", "vfs_mknod", "vfs_rmdir"]
        assert lib.tracefs_function_filter(made, b"no_such_function", None, 0) != 0
    found = c_void_p()
    assert lib.tracefs_filter_functions(b"^vfs_.*dir$", None, byref(found)) == 0
    wanted = [name for name in shown("available_filter_functions").split() if name.startswith("vfs_")]
    assert sorted(strings(found.value)) == sorted(name for name in wanted if name.endswith("dir"))


@case
def histograms() -> None:
    made = pointer(lib.tracefs_hist_alloc(events(), b"kmem", b"kmalloc", b"call_site", 2))
    assert lib.tracefs_hist_add_value(made, b"bytes_req") == 0
    assert lib.tracefs_hist_add_sort_key(made, b"hitcount") == 0
    assert lib.tracefs_hist_command(None, made, START) == 0
    assert "keys=call_site.sym:vals=hitcount,bytes_req:sort=hitcount" in shown("events/kmem/kmalloc/trigger")
    assert lib.tracefs_hist_command(None, made, DESTROY) == 0
    assert "keys=" not in shown("events/kmem/kmalloc/trigger")
    lib.tracefs_hist_free(made)


@case
def synthetic_events_by_sql() -> None:
    query = (
        b"select start.common_pid as pid, (end.common_timestamp.usecs - start.common_timestamp.usecs) as lat "
        b"from syscalls.sys_enter_mkdir as start join syscalls.sys_exit_mkdir as end "
        b"on start.common_pid = end.common_pid"
    )
    wrong = c_char_p()
    made = pointer(lib.tracefs_sql(events(), b"slow_mkdir", query, byref(wrong)))
    assert lib.tracefs_synth_create(made) == 0
    assert shown("synthetic_events").startswith("slow_mkdir\t")
    assert "onmatch(syscalls.sys_enter_mkdir)" in shown("events/syscalls/sys_exit_mkdir/trigger")
    assert lib.tracefs_synth_destroy(made) == 0
    assert shown("synthetic_events") == ""
    lib.tracefs_synth_free(made)


@case
def sizes_and_masks() -> None:
    with instance() as made:
        lib.tracefs_instance_set_buffer_size.argtypes = [c_void_p, c_size_t, c_int]
        assert lib.tracefs_instance_set_buffer_size(made, 64, -1) == 0
        # The size is that of whole pages, minus the headers of the pages.
        assert lib.tracefs_instance_get_buffer_size(made, 0) == 67
        assert lib.tracefs_instance_set_affinity(made, b"0") >= 0
        assert lib.tracefs_instance_get_affinity(made) == b"0"
        assert (TRACING / "instances/one/tracing_cpumask").read_text().strip("0,\n") == "1"


def main() -> None:
    """Run the selected cases, or all cases. A case that fails leaves its changes on the mount."""
    if "TRACING" in os.environ:
        assert lib.tracefs_set_tracing_dir(str(TRACING).encode()) == 0
    failed = {}
    for function in CASES:
        if sys.argv[1:] and function.__name__ not in sys.argv:
            continue
        try:
            function()
        except Exception:  # told by name
            failed[function.__name__] = traceback.format_exc()
    json.dump(failed, sys.stdout)


if __name__ == "__main__":
    main()
