"""Files of tracefs that came after Linux 6.1, on kprobefs's own kernel with the profiles of 6.12 and 7.2."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from functools import partial

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import profile_named
from emulated_kernel.trace.array.raw_pipe import RawPipe
from emulated_kernel.trace.interface import INTERFACES
from emulated_kernel.trace.output.line_formatter import FlagColumns, latency_flags
from emulated_kernel.trace.ring.trace_entry import EntryFlag
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import replace
from emulated_kernel.vfs.core.client import Client
from tests.trace.events.kernel import Function, errno_of, make_kernel

SET_EVENT = "tracing/set_event"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel(profile=profile_named("linux-7.2")) as booted:
        yield booted


@pytest.fixture(scope="module")
def old() -> Iterator[Kernel]:
    with Kernel(profile=profile_named("linux-6.1")) as booted:
        yield booted


def refused(kernel: Kernel, path: str, text: str) -> int:
    with pytest.raises(KernelError) as failure:
        kernel.write_file(path, text)
    return failure.value.errno or 0


@pytest.mark.parametrize(
    "path",
    [
        "available_filter_functions_addrs",
        "buffer_subbuf_size_kb",
        "touched_functions",
        "show_event_filters",
        "show_event_triggers",
        "syscall_user_buf_size",
    ],
)
def test_each_file_belongs_to_its_versions(kernel: Kernel, old: Kernel, path: str) -> None:
    kernel.read_file(f"tracing/{path}")
    with pytest.raises(KernelError) as failure:
        old.read_file(f"tracing/{path}")
    assert failure.value.errno == errno.ENOENT
    assert path in kernel.read_file("tracing/README")
    assert path not in old.read_file("tracing/README")


def test_the_longest_latency_is_no_file_since_7_0(kernel: Kernel, old: Kernel) -> None:
    old.read_file("tracing/tracing_max_latency")
    assert refused(kernel, "tracing/tracing_max_latency", "0") == errno.ENOENT
    assert "tracing_max_latency" in old.read_file("tracing/README")
    assert "tracing_max_latency" not in kernel.read_file("tracing/README")


def test_addresses_of_functions_are_those_that_records_have(kernel: Kernel) -> None:
    lines = kernel.read_file("tracing/available_filter_functions_addrs").splitlines()
    names = kernel.read_file("tracing/available_filter_functions").splitlines()
    assert [line.partition(" ")[2] for line in lines] == names
    addresses = {name: int(text, 16) for text, name in (line.split(" ", 1) for line in lines)}
    assert addresses["vfs_read"] == kernel.kallsyms_lookup_name("vfs_read")


def test_functions_that_were_traced_stay_in_touched_functions(kernel: Kernel) -> None:
    kernel.write_file("tracing/kprobe_events", "p:one gcd\np:two int_sqrt")
    kernel.write_file("tracing/events/kprobes/one/enable", "1")
    (line,) = kernel.read_file("tracing/enabled_functions").splitlines()
    assert line.startswith(f"gcd (1) R{' ' * 9}\ttramp: ")
    assert kernel.read_file("tracing/touched_functions").splitlines() == [line]
    kernel.write_file("tracing/events/kprobes/two/enable", "1")
    kernel.write_file("tracing/events/kprobes/one/enable", "0")
    touched = {each.split()[0]: each for each in kernel.read_file("tracing/touched_functions").splitlines()}
    assert touched["gcd"] == f"gcd (0){' ' * 11} ->ftrace_stub"
    assert touched["int_sqrt"] in kernel.read_file("tracing/enabled_functions")
    kernel.write_file("tracing/events/kprobes/two/enable", "0")
    kernel.write_file("tracing/kprobe_events", "-:one\n-:two")
    assert kernel.read_file("tracing/enabled_functions") == ""


def test_filters_and_triggers_of_all_events_are_listed(kernel: Kernel) -> None:
    assert kernel.read_file("tracing/show_event_filters") == ""
    kernel.write_file("tracing/events/sched/sched_switch/filter", "prev_pid > 1")
    kernel.write_file("tracing/events/exceptions/page_fault_kernel/filter", "address != 0")
    kernel.write_file("tracing/events/sched/sched_switch/trigger", "traceon:3 if prev_pid == 5")
    kernel.write_file("tracing/events/sched/sched_switch/trigger", "stacktrace")
    filters = kernel.read_file("tracing/show_event_filters").splitlines()
    assert sorted(filters) == [
        "exceptions:page_fault_kernel    address != 0",
        "sched:sched_switch              prev_pid > 1",
    ]
    triggers = kernel.read_file("tracing/show_event_triggers").splitlines()
    own = kernel.read_file("tracing/events/sched/sched_switch/trigger").splitlines()
    assert triggers == [f"sched:sched_switch              {line}" for line in own]
    kernel.write_file("tracing/events/sched/sched_switch/filter", "0")
    kernel.write_file("tracing/events/exceptions/page_fault_kernel/filter", "0")
    kernel.write_file("tracing/events/sched/sched_switch/trigger", "!stacktrace")
    kernel.write_file("tracing/events/sched/sched_switch/trigger", "!traceon:3")
    assert kernel.read_file("tracing/show_event_triggers") == ""


def test_a_name_longer_than_the_column_is_followed_by_one_blank(kernel: Kernel) -> None:
    kernel.write_file("tracing/kprobe_events", f"p:{'g' * 20}/{'e' * 20} gcd a=%di")
    kernel.write_file(f"tracing/events/{'g' * 20}/{'e' * 20}/filter", "a == 1")
    assert kernel.read_file("tracing/show_event_filters") == f"{'g' * 20}:{'e' * 20} a == 1\n"
    kernel.write_file("tracing/kprobe_events", f"-:{'g' * 20}/")


def test_events_of_a_module_that_is_not_loaded_are_awaited(kernel: Kernel) -> None:
    for word in ("xfs:mod:nfs", "xfs:*:mod:nfs", ":mod:a-b", "*:mod:ktgt", ":x:mod:ktgt"):
        kernel.write_file(SET_EVENT, word)
    assert kernel.read_file(SET_EVENT).splitlines() == [
        "*:x:mod:ktgt",
        "*:*:mod:ktgt",
        "*:*:mod:a-b",
        "xfs:*:mod:nfs",
        "xfs:mod:nfs",
    ]
    assert refused(kernel, SET_EVENT, "!y:mod:ktgt") == errno.EINVAL
    kernel.write_file(SET_EVENT, "!xfs:mod:nfs")
    kernel.write_file(SET_EVENT, "!*:mod:a-b")
    assert kernel.read_file(SET_EVENT).splitlines() == ["*:x:mod:ktgt", "*:*:mod:ktgt", "xfs:*:mod:nfs"]
    kernel.load_module("ktgt")
    assert kernel.read_file(SET_EVENT) == "xfs:*:mod:nfs\n"
    assert refused(kernel, SET_EVENT, "sched:mod:ktgt") == errno.EINVAL
    kernel.unload_module("ktgt")
    kernel.write_file(SET_EVENT, "!:mod:nfs")
    assert kernel.read_file(SET_EVENT) == ""


def test_earlier_kernels_know_no_events_of_modules(old: Kernel) -> None:
    assert refused(old, SET_EVENT, "sched:sched_switch:mod:ktgt") == errno.EINVAL
    assert old.read_file(SET_EVENT) == ""


@pytest.mark.parametrize(
    ("profile", "longest", "taken", "shown", "text"),
    [
        ("linux-6.1", 3072, 1024, [16, 16, 20], 1024),
        ("linux-6.12", 4060, 4060, [16, 16, 20], 4054),
        ("linux-7.2", 4064, 4064, [0, 8, 16], 4054),
    ],
)
def test_sizes_of_markers(profile: str, longest: int, taken: int, shown: list[int], text: int) -> None:
    """Sizes of markers are those of each version: how many bytes of a raw marker are shown, and how much of a
    long marker is taken.
    """
    with Kernel(profile=profile_named(profile)) as kernel:
        write = kernel.trace.write_raw_marker
        for size in (3, longest + 1):
            with pytest.raises(KernelError) as failure:
                write(b"x" * size)
            assert failure.value.errno == errno.EINVAL
        for size in (4, 10, 17):
            assert write(b"x" * size) == size
        lines = [line.partition(" buf:") for line in kernel.read_file("tracing/trace").splitlines()]
        assert [len(data.split()) for _, found, data in lines if found] == shown
        assert write(b"x" * longest) == taken
        assert kernel.trace.write_marker(b"y" * 5000) == text


@pytest.mark.parametrize(("profile", "depth"), [("linux-6.1", "."), ("linux-6.12", "."), ("linux-7.2", "1")])
def test_preemption_depth_of_markers(profile: str, depth: str) -> None:
    """Since Linux 7.2, markers have a preemption depth of 1, in the trace and in filters of triggers."""
    with Kernel(profile=profile_named(profile)) as kernel:
        kernel.write_file("tracing/events/ftrace/print/trigger", "traceoff if common_preempt_count == 1")
        kernel.trace.write_raw_marker(b"\1\0\0\0data")
        kernel.trace.write_marker(b"hello")
        lines = kernel.read_file("tracing/trace").splitlines()
        shown = [line.partition("[000] ")[2][:5] for line in lines if not line.startswith("#")]
        assert shown == [f"...{depth}."] * 2
        assert kernel.read_file("tracing/tracing_on") == ("0\n" if depth == "1" else "1\n")


@pytest.mark.parametrize(
    ("profile", "format_"),
    [
        ("linux-6.12", '"n=%u, s=%s, d=%s", REC->n, REC->s, __get_str(d)'),
        ("linux-7.2", '"n=%u s=%s d=%s", REC->n, REC->s, __get_str(d)'),
    ],
)
def test_print_format_of_a_synthetic_event(profile: str, format_: str) -> None:
    with Kernel(profile=profile_named(profile)) as kernel:
        kernel.write_file("tracing/synthetic_events", "made u32 n; char[16] s; char[] d")
        text = kernel.read_file("tracing/events/synthetic/made/format")
        assert text.splitlines()[-1] == f"print fmt: {format_}"


SIZE = "tracing/buffer_subbuf_size_kb"


def data_size(kernel: Kernel) -> int:
    """Return the size of a page's data in bytes, from events/header_page."""
    (size,) = re.findall(r"char data;.*size:(\d+);", kernel.read_file("tracing/events/header_page"))
    return int(size)


def marks(kernel: Kernel, directory: str = "tracing") -> list[str]:
    text = kernel.read_file(f"{directory}/trace")
    return re.findall(r"(?:tracing_mark_write: |gcd\+0x0/\S+\) )(.*)", text)


def test_values_of_the_size_of_pages(kernel: Kernel) -> None:
    """buffer_subbuf_size_kb refuses and rounds values as in Debian's 6.12.117 and 7.2.13."""
    for text in ("0", "-1", "x", "513", "18014398509481984"):
        assert refused(kernel, SIZE, text) == errno.EINVAL
    assert refused(kernel, SIZE, "99999999999999999999") == errno.ERANGE
    for text, shown in (("512", 512), ("5", 8), ("1", 4), ("256", 256), ("4", 4)):
        kernel.write_file(SIZE, text)
        assert kernel.read_file(SIZE) == f"{shown}\n"
        assert data_size(kernel) == shown * 1024 - 16


def test_a_new_size_of_pages_removes_records_and_keeps_the_capacity(kernel: Kernel) -> None:
    kernel.write_file("tracing/buffer_size_kb", "1408")
    kernel.write_file("tracing/trace_marker", "kept")
    kernel.write_file(SIZE, "3")
    assert marks(kernel) == ["kept"]
    kernel.write_file(SIZE, "8")
    assert marks(kernel) == []
    assert "entries: 0\n" in kernel.read_file("tracing/per_cpu/cpu0/stats")
    assert kernel.read_file("tracing/buffer_size_kb") == "1410\n"
    sizes = []
    for size in ("1", "20", "1408"):
        kernel.write_file("tracing/buffer_size_kb", size)
        sizes.append(kernel.read_file("tracing/buffer_size_kb"))
    assert sizes == ["15\n", "23\n", "1413\n"]
    kernel.write_file(SIZE, "64")
    assert kernel.read_file("tracing/per_cpu/cpu0/buffer_size_kb") == "1413\n"
    kernel.write_file(SIZE, "4")


def test_pages_of_another_size_hold_what_guest_code_records(kernel: Kernel) -> None:
    """Guest code fills pages of another size completely: no page but the last has room for another record of
    28 bytes.
    """
    kernel.write_file("tracing/buffer_size_kb", "64")
    kernel.write_file(SIZE, "16")
    kernel.write_file("tracing/kprobe_events", "p:filling gcd a=%di:u32")
    kernel.write_file("tracing/events/kprobes/filling/enable", "1")
    for number in range(1500):
        kernel.call("gcd", number, 1)
    kernel.write_file("tracing/events/kprobes/filling/enable", "0")
    assert marks(kernel) == [f"a={number}" for number in range(1500)]
    pipe = RawPipe(kernel.trace, 0)
    pages = [pipe.read(1 << 20), b"".join(pipe.splice_page() for _ in range(4)), pipe.read(1 << 20)]
    pipe.close()
    assert [len(page) for page in pages] == [16384] * 3
    for page in pages[:-1]:
        assert data_size(kernel) - 28 < int.from_bytes(page[8:16], "little") <= data_size(kernel)
    assert marks(kernel) == []
    kernel.write_file("tracing/kprobe_events", "-:filling")
    kernel.write_file(SIZE, "4")


def test_an_open_trace_file_keeps_the_size_of_pages(kernel: Kernel) -> None:
    kernel.write_file("tracing/trace_marker", "kept")
    tree = kernel.filesystem()
    reader = tree.open("/tracing/trace", os.O_RDONLY, Client(1, 0, 0))
    assert refused(kernel, SIZE, "8") == errno.EBUSY
    assert marks(kernel) == ["kept"]
    tree.release(reader)
    kernel.write_file(SIZE, "8")
    assert marks(kernel) == []
    kernel.write_file(SIZE, "4")


def test_each_array_and_its_snapshot_have_one_size_of_pages(kernel: Kernel) -> None:
    kernel.trace_arrays.make("one")
    one = "tracing/instances/one"
    kernel.write_file(f"{one}/buffer_subbuf_size_kb", "8")
    assert (kernel.read_file(SIZE), data_size(kernel)) == ("4\n", 4080)
    assert "size:8176;" in kernel.read_file(f"{one}/events/header_page")
    kernel.write_file(f"{one}/trace_marker", "first")
    kernel.write_file(f"{one}/snapshot", "1")
    kernel.write_file(f"{one}/trace_marker", "second")
    assert "first" in kernel.read_file(f"{one}/snapshot")
    kernel.write_file(f"{one}/buffer_subbuf_size_kb", "32")
    assert "first" not in kernel.read_file(f"{one}/snapshot")
    assert marks(kernel, one) == []
    kernel.write_file(f"{one}/trace_marker", "third")
    kernel.write_file(f"{one}/snapshot", "1")
    assert "third" in kernel.read_file(f"{one}/snapshot")
    kernel.write_file(f"{one}/snapshot", "0")
    kernel.trace_arrays.remove("one")


@pytest.mark.parametrize(
    ("profile", "fields", "size", "sizes"),
    [
        ("linux-6.1", ("int overwrite 1", "char data 1"), 32, ["1410", "1410", "1410"]),
        ("linux-6.12", ("int overwrite 1", "char data 0"), 32, ["7 (expanded: 1408)", "1410", "1410"]),
        ("linux-7.2", ("char overwrite 0", "char data 0"), 28, ["7 (expanded: 1408)", "1410", "1410"]),
    ],
)
def test_buffers_by_version(profile: str, fields: tuple[str, ...], size: int, sizes: list[str]) -> None:
    """The format of a page header, the size of a marker's record, and the sizes of buffers are those of
    Debian's kernels.

    `sizes` has the top array's size after an event was enabled in an instance, the instance's size, and the
    top array's size after a refused write to `snapshot`.
    """
    with Kernel(profile=profile_named(profile)) as kernel:
        shown = re.findall(
            r"field: ((?:int|char) \w+);.*signed:(.);", kernel.read_file("tracing/events/header_page")
        )
        assert tuple(" ".join(each) for each in shown) == fields
        signs = {
            sign
            for event in ("sched/sched_switch", "ftrace/print", "ftrace/branch")
            for sign in re.findall(
                r"field:char .*signed:(.);", kernel.read_file(f"tracing/events/{event}/format")
            )
        }
        assert signs == {fields[1][-1]}
        kernel.write_file("tracing/trace_marker", "hello")
        assert f"bytes: {size}\n" in kernel.read_file("tracing/per_cpu/cpu0/stats")
        kernel.trace_arrays.make("one")
        kernel.write_file("tracing/instances/one/events/sched/sched_switch/enable", "1")
        read = [kernel.read_file(f"tracing/{where}buffer_size_kb") for where in ("", "instances/one/")]
        assert refused(kernel, "tracing/snapshot", "x") == errno.EINVAL
        read.append(kernel.read_file("tracing/buffer_size_kb"))
        assert [text.rstrip("\n") for text in read] == sizes


@pytest.mark.parametrize(
    ("rules", "preemption", "shown"),
    [("linux-6.1", True, "r10:"), ("linux-6.1", False, "r1:"), ("linux-6.12", False, "r10:")],
)
def test_default_maxactive_by_version(rules: str, preemption: bool, shown: str) -> None:
    """The default maxactive depends on the version and on preemption. Without preemption, the answers are
    those of kernels built from Debian's sources.
    """
    profile = replace(profile_named(rules), preemption=preemption)
    with Kernel(profile=profile) as kernel:
        kernel.write_file("tracing/kprobe_events", "r:x vfs_read")
        assert kernel.read_file("tracing/kprobe_events").startswith(shown)


def test_options_belong_to_their_versions() -> None:
    later = {"fields": "6.12", "trace_printk_dest": "6.12", "copy_trace_marker": "7.2", "bitmask-list": "7.2"}
    for version in ("5.10", "6.1", "6.12", "7.2"):
        with Kernel(profile=profile_named(f"linux-{version}")) as kernel:
            text = kernel.read_file("tracing/trace_options")
            names = {line.removeprefix("no") for line in text.splitlines()}
            assert names & {*later, "hash-ptr"} == {
                name for name, since in {**later, "hash-ptr": "6.1"}.items() if since in text_of(version)
            }
            if version == "6.1":
                continue
            order = [line for line in text.splitlines() if line.removeprefix("no") in later]
            assert (
                order
                == {
                    "5.10": [],
                    "6.12": ["nofields", "trace_printk_dest"],
                    "7.2": ["nofields", "trace_printk_dest", "copy_trace_marker", "nobitmask-list"],
                }[version]
            )


def text_of(version: str) -> tuple[str, ...]:
    """Return the known versions of Linux up to `version`."""
    versions = ("5.10", "6.1", "6.12", "7.2")
    return versions[: versions.index(version) + 1]


@pytest.mark.parametrize(
    ("profile", "word", "text"),
    [
        ("linux-6.12", "{address:#x} ({signed})", "caf\u00e9"),
        ("linux-7.2", "gcd+0x0/0x80 ({signed})", "caf... (63:61:66:c3:a9:00)"),
    ],
)
def test_option_fields_shows_all_fields(profile: str, word: str, text: str) -> None:
    """The option `fields` shows all fields of an event, as in Debian's kernels. A marker, which belongs to no
    event, has an unknown type.
    """
    with Kernel(profile=profile_named(profile)) as kernel:
        address = kernel.kallsyms_lookup_name("gcd")
        shown = word.format(address=address, signed=address - (1 << 64))
        kernel.write_file(
            "tracing/kprobe_events",
            "p:all gcd b=\\65:u8 c=\\1:u8 d=\\65535:s16 e=\\-2:s32 f=%di:u64 "
            'g=\\"caf\u00e9":string h=+0(%sp):u32[3]',
        )
        kernel.write_file("tracing/events/kprobes/all/enable", "1")
        kernel.write_file("tracing/options/fields", "1")
        kernel.call("gcd", 3, 4)
        kernel.write_file("tracing/trace_marker", "text")
        lines = [line for line in kernel.read_file("tracing/trace").splitlines() if line[:1] != "#"]
        assert lines[0].partition(" all:")[2] == (
            f" __probe_ip={shown} b='A'(65) c=(1) d=0xffff (65535) e=0xfffffffe (-2) f=0x3 (3) g={text} "
            "h=<INVALID-SIZE>"
        )
        assert lines[1].endswith(": UNKNOWN TYPE 5")


def test_markers_go_to_the_arrays_with_copy_trace_marker(kernel: Kernel) -> None:
    for name in ("one", "two"):
        kernel.trace_arrays.make(name)
        assert kernel.read_file(f"tracing/instances/{name}/options/copy_trace_marker") == "0\n"
    kernel.write_file("tracing/instances/one/options/copy_trace_marker", "1")
    kernel.write_file("tracing/trace_marker", "first")
    kernel.write_file("tracing/options/copy_trace_marker", "0")
    kernel.write_file("tracing/trace_marker", "second")
    kernel.write_file("tracing/instances/two/trace_marker", "own")
    assert "first" in kernel.read_file("tracing/trace")
    assert "second" not in kernel.read_file("tracing/trace")
    copied = kernel.read_file("tracing/instances/one/trace")
    assert "first" in copied
    assert "second" in copied
    assert "first" not in kernel.read_file("tracing/instances/two/trace")
    assert "own" in kernel.read_file("tracing/instances/two/trace")
    kernel.write_file("tracing/instances/one/options/copy_trace_marker", "0")
    assert refused(kernel, "tracing/trace_marker", "third") == errno.ENODEV
    kernel.write_file("tracing/options/copy_trace_marker", "1")
    for name in ("one", "two"):
        kernel.trace_arrays.remove(name)


def test_one_trace_array_gets_trace_printk(kernel: Kernel) -> None:
    option = "options/trace_printk_dest"
    paths = {name: f"tracing/instances/{name}/{option}" for name in ("one", "two")}
    paths["top"] = f"tracing/{option}"
    for name in ("one", "two"):
        kernel.trace_arrays.make(name)

    def chosen() -> list[str]:
        return [name for name, path in paths.items() if kernel.read_file(path) == "1\n"]

    assert chosen() == ["top"]
    assert refused(kernel, paths["top"], "0") == errno.EINVAL
    kernel.write_file(paths["one"], "1")
    assert chosen() == ["one"]
    kernel.write_file(paths["two"], "1")
    assert chosen() == ["two"]
    kernel.write_file(paths["two"], "0")
    assert chosen() == ["top"]
    kernel.write_file(paths["one"], "1")
    for name in ("one", "two"):
        kernel.trace_arrays.remove(name)
        del paths[name]
    assert chosen() == ["top"]


def test_5_10_has_no_column_for_migrate_disable_and_no_event_probes() -> None:
    with Kernel(profile=profile_named("linux-5.10")) as kernel:
        kernel.write_file("tracing/kprobe_events", "p:one gcd a=%di")
        kernel.write_file("tracing/events/kprobes/one/enable", "1")
        kernel.call("gcd", 3, 4)
        lines = kernel.read_file("tracing/trace").splitlines()
        assert lines[4:-1] == [
            "#                                _-----=> irqs-off",
            "#                               / _----=> need-resched",
            "#                              | / _---=> hardirq/softirq",
            "#                              || / _--=> preempt-depth",
            "#                              ||| /     delay",
            "#           TASK-PID     CPU#  ||||   TIMESTAMP  FUNCTION",
            "#              | |         |   ||||      |         |",
        ]
        assert len(lines[-1].partition("[000] ")[2].split()[0]) == 4
        kernel.write_file("tracing/options/irq-info", "0")
        assert "||||" not in kernel.read_file("tracing/trace")
        kernel.write_file("tracing/options/irq-info", "1")
        kernel.write_file("tracing/options/latency-format", "1")
        assert "#  cmd     pid     ||||| time  |   caller      \n" in kernel.read_file("tracing/trace")
        assert refused(kernel, "tracing/dynamic_events", "e:x kprobes.one a=$a") == errno.EINVAL
        assert "<attached-group>" not in kernel.read_file("tracing/README")


def test_lazy_reschedules_have_letters_where_the_flag_exists() -> None:
    lazy, need, preempted = EntryFlag.IRQS_NOSUPPORT, EntryFlag.NEED_RESCHED, EntryFlag.PREEMPT_RESCHED
    new = FlagColumns(has_lazy=True)
    shown = {
        lazy: "l",
        lazy | need: "b",
        lazy | preempted: "L",
        lazy | need | preempted: "B",
        need: "n",
        preempted: "p",
        need | preempted: "N",
    }
    for flags, letter in shown.items():
        assert latency_flags(flags, 0, new) == f".{letter}..."
    assert latency_flags(lazy | need, 0) == "Xn..."


def test_symbols_of_the_kernel_hide_those_of_modules() -> None:
    """Before 7.2, a name in the kernel and in a module is ambiguous. A name that the kernel has twice is
    ambiguous in all versions.
    """
    functions = [
        Function("both", 0xFFFFFFFF81000100, size=16),
        Function("both", 0xFFFFFFFFC0230000, size=16, module="ktgt"),
        Function("twice", 0xFFFFFFFF81000200, size=16),
        Function("twice", 0xFFFFFFFF81000210, size=16),
    ]
    outcomes = []
    for name in ("linux-6.12", "linux-7.2"):
        made = make_kernel(functions=functions, interface=INTERFACES[name])
        outcomes += [
            errno_of(partial(made.events.write, f"p:x {each}".encode())) for each in ("both", "twice")
        ]
    assert outcomes == ["EINVAL", "EINVAL", "", "EINVAL"]


def test_records_of_system_calls_have_strings_and_bytes_of_their_arguments(kernel: Kernel) -> None:
    """Records of system calls show strings and bytes of their arguments, up to the written limit. The texts
    are those of Debian's 7.2.13.
    """
    size = "tracing/syscall_user_buf_size"
    client = Client(4001, 0, 0)
    mount = kernel.mount()
    kernel.trace.clear_trace()
    for limit in ("63", "8", "0", "1000"):
        kernel.write_file(size, limit)
        kernel.write_file("tracing/events/syscalls/enable", "1")
        handle = mount.create(client, f"/scratch/name-that-is-long-{limit}", 0o600, os.O_RDWR)
        mount.write(client, handle, b"ab\x01c" * 20, 0)
        mount.write(client, handle, b"\x01\x02", 80)
        mount.release(handle)
        kernel.write_file("tracing/events/syscalls/enable", "0")
    assert kernel.read_file(size) == "165\n"
    lines = [line.partition(": ")[2] for line in kernel.read_file("tracing/trace").splitlines()]
    opened = [line.partition("filename: ")[2] for line in lines if line.startswith("sys_openat(")]
    written = [
        line.partition("buf: ")[2].partition(" ")[2] for line in lines if line.startswith("sys_write(")
    ]
    assert [line.partition(" ")[2] for line in opened] == [
        '"/scratch/name-that-is-long-63", flags: O_RDWR|O_CREAT, mode: 0600)',
        '"/scratch...", flags: O_RDWR|O_CREAT, mode: 0600)',
        '"", flags: O_RDWR|O_CREAT, mode: 0600)',
        '"/scratch/name-that-is-long-1000", flags: O_RDWR|O_CREAT, mode: 0600)',
    ]
    pattern = b"ab\x01c" * 20
    assert written == [
        f'({pattern[:63].hex(":")}, ...) "{"ab.c" * 15}ab."..., count: 0x50)',
        "(01:02), count: 2)",
        '(61:62:01:63:61:62:01:63, ...) "ab.cab.c"..., count: 0x50)',
        "(01:02), count: 2)",
        "(, ...), count: 0x50)",
        "(, ...), count: 2)",
        f'({pattern.hex(":")}) "{"ab.c" * 20}", count: 0x50)',
        "(01:02), count: 2)",
    ]
    kernel.write_file(size, "63")


def test_formats_of_system_calls_name_their_memory(kernel: Kernel, old: Kernel) -> None:
    path = "tracing/events/syscalls/sys_enter_{}/format"
    text = kernel.read_file(path.format("write"))
    assert "\tfield:__data_loc char[] __buf_val;\toffset:40;\tsize:4;\tsigned:0;\n" in text
    assert '"fd: 0x%08lx, buf: 0x%08lx (%s), count: 0x%08lx", ' in text
    assert ", __print_dynamic_array(__buf_val, 1), " in text
    assert "__filename_val;\toffset:48;" in kernel.read_file(path.format("openat"))
    assert "_val" not in kernel.read_file(path.format("read"))
    assert "_val" not in old.read_file(path.format("write"))


def test_enabled_functions_names_the_function_graph_and_its_users(kernel: Kernel) -> None:
    kernel.write_file("tracing/dynamic_events", "f:a gcd\nf:b int_sqrt%return")
    for name in ("a", "b"):
        kernel.write_file(f"tracing/events/fprobes/{name}/enable", "1")
    shown = [re.sub("0x[0-9a-f]+", "X", line) for line in enabled(kernel)]
    assert sorted(shown) == [
        f"gcd (1){' ' * 11}\ttramp: X (fprobe_ftrace_entry) ->fprobe_ftrace_entry",
        f"int_sqrt (1){' ' * 11}\ttramp: X (ftrace_graph_func) ->ftrace_graph_func"
        "\tsubops: {ent:fprobe_fgraph_entry ret:fprobe_return}",
    ]
    for name in ("a", "b"):
        kernel.write_file(f"tracing/events/fprobes/{name}/enable", "0")
    kernel.write_file("tracing/dynamic_events", "-:a\n-:b")
    kernel.write_file("tracing/set_ftrace_filter", "gcd")
    kernel.write_file("tracing/current_tracer", "function_graph")
    (line,) = enabled(kernel)
    assert line.endswith("\tsubops: {ent:trace_graph_entry ret:trace_graph_return}")
    kernel.write_file("tracing/current_tracer", "nop")
    kernel.write_file("tracing/set_ftrace_filter", "!gcd")
    assert enabled(kernel) == []


def enabled(kernel: Kernel) -> list[str]:
    return kernel.read_file("tracing/enabled_functions").splitlines()
