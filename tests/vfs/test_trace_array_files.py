"""Files of trace arrays: modes as recorded, the effect of each file, and instances."""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.kstrtox import cpumask
from emulated_kernel.vfs.core.node_tree import NodeTree
from emulated_kernel.vfs.core.open_file import OpenFile
from emulated_kernel.vfs.trees.trace_array_files import mask_text
from tests.vfs import files, oracle
from tests.vfs.files import ROOT, assert_errno, names


def opened(tree: NodeTree, path: str, flags: int = os.O_RDONLY) -> OpenFile:
    return files.opened(tree, f"/tracing/{path}", flags)


def read(tree: NodeTree, path: str) -> str:
    return files.read(tree, f"/tracing/{path}")


def write(tree: NodeTree, path: str, text: str) -> None:
    files.write(tree, f"/tracing/{path}", text)


def test_modes_of_a_cpu_as_recorded(unchanged: NodeTree) -> None:
    prefix = "/sys/kernel/tracing/per_cpu/cpu0/"
    recorded = oracle.modes("ls_tracefs_options_percpu_instances.txt", prefix)
    ours = names(unchanged, "/tracing/per_cpu/cpu0")
    modes = {n: stat.filemode(unchanged.getattr(f"/tracing/per_cpu/cpu0/{n}").mode) for n in ours}
    assert modes == recorded
    assert names(unchanged, "/tracing/per_cpu") == ["cpu0", "cpu1"]


def test_modes_of_an_instance_as_recorded(tree: NodeTree) -> None:
    tree.mkdir(ROOT, "/tracing/instances/i", 0o755)
    recorded = {}
    for line in oracle.oracle_path("samples/ls_instance.txt").read_text().splitlines():
        mode, _, name = line.partition(" ")
        recorded[name] = mode
    base = "/tracing/instances/i"
    ours = {name: stat.filemode(tree.getattr(f"{base}/{name}").mode) for name in names(tree, base)}
    assert ours.items() <= recorded.items()
    assert {name for name in recorded.keys() - ours.keys() if "ftrace" not in name} == set()


@pytest.fixture
def cpus(kernel: Kernel) -> tuple[int, int]:
    """Return the number of the CPU that runs, and the number of the other CPU."""
    return kernel.machine.cpu, 1 - kernel.machine.cpu


def test_per_cpu(tree: NodeTree, cpus: tuple[int, int]) -> None:
    """Records of the running CPU are only in this CPU's files.

    The size of a CPU's buffer can be set separately.
    """
    here, other = (f"per_cpu/cpu{cpu}" for cpu in cpus)
    write(tree, "trace_marker", "hello\n")
    assert "hello" in read(tree, f"{here}/trace")
    assert "hello" not in read(tree, f"{other}/trace")
    assert read(tree, f"{here}/stats").startswith("entries: 1\n")
    assert read(tree, f"{other}/stats").startswith("entries: 0\n")
    write(tree, f"{other}/buffer_size_kb", "64")
    assert read(tree, f"{other}/buffer_size_kb") == "67\n"
    assert read(tree, "buffer_size_kb") == "X\n"
    with assert_errno(errno.EINVAL):
        write(tree, f"{other}/buffer_size_kb", "0")


def test_snapshots(tree: NodeTree, cpus: tuple[int, int]) -> None:
    here, other = (f"per_cpu/cpu{cpu}/snapshot" for cpu in cpus)
    write(tree, "trace_marker", "hello\n")
    write(tree, "snapshot", "1\n")
    assert "hello" in read(tree, "snapshot")
    assert "hello" in read(tree, here)
    assert "hello" not in read(tree, other)
    write(tree, other, "2")
    assert "hello" in read(tree, "snapshot")
    write(tree, here, "2")
    assert "hello" not in read(tree, "snapshot")
    with assert_errno(errno.EINVAL):
        write(tree, "snapshot", "x")


def test_pipes_of_one_cpu(tree: NodeTree, cpus: tuple[int, int]) -> None:
    here = f"per_cpu/cpu{cpus[0]}"
    write(tree, "trace_marker", "hello\n")
    write(tree, "snapshot", "1")
    write(tree, "trace_marker", "again\n")
    pipe = opened(tree, f"{here}/trace_pipe")
    assert b"again" in pipe.read(1000, 0)
    tree.release(pipe)
    write(tree, "trace_marker", "later\n")
    for name, text in (("trace_pipe_raw", b"later"), ("snapshot_raw", b"hello")):
        raw = opened(tree, f"{here}/{name}")
        assert text in raw.read(4096, 0)
        tree.release(raw)


def test_pages(tree: NodeTree, cpus: tuple[int, int]) -> None:
    """Only trace_pipe_raw can be read in pages, and only in whole pages."""
    raw = f"per_cpu/cpu{cpus[0]}/trace_pipe_raw"
    write(tree, "buffer_size_kb", "64")
    for _ in range(100):
        write(tree, "trace_marker", "x" * 100)
    file = opened(tree, raw)
    with assert_errno(errno.EINVAL):
        file.read_page(2048)
    assert b"x" * 100 in file.read_page(4096)
    tree.release(file)
    for name, paged in ((raw, True), ("trace", False), (f"per_cpu/cpu{cpus[0]}/trace_pipe", False)):
        assert tree.getattr(f"/tracing/{name}").is_paged == paged
        assert tree.getattr(f"/tracing/{name}").size == 0
    file = opened(tree, "trace")
    with assert_errno(errno.EINVAL):
        file.read_page(4096)
    tree.release(file)


def test_values(kernel: Kernel, tree: NodeTree) -> None:
    write(tree, "buffer_percent", "75")
    assert read(tree, "buffer_percent") == "75\n"
    write(tree, "trace_clock", "global\n")
    assert "[global]" in read(tree, "trace_clock").split()
    for text in ("bogus", "x" * 64):
        with assert_errno(errno.EINVAL):
            write(tree, "trace_clock", text)
    write(tree, "tracing_max_latency", "7")
    array = kernel.trace
    assert (array.max_latency_ns, read(tree, "tracing_max_latency")) == (7000, "7\n")
    for name in ("tracing_max_latency", "tracing_thresh"):
        write(tree, name, f"{2**64 - 1}")
        assert read(tree, name) == "18446744073709550\n", "an unsigned long of nanoseconds"
        write(tree, name, "0")
    write(tree, "options/record-tgid", "1")
    kernel.guest.enter(kernel.guest.processes.init)
    write(tree, "trace_marker", "hello")
    assert read(tree, "saved_cmdlines") == read(tree, "saved_tgids") == ""
    write(tree, "events/signal/enable", "1")
    write(tree, "trace_marker", "hello")
    write(tree, "events/signal/enable", "0")
    task = kernel.tracing.system.tasks.context()
    assert f"{task.pid} {task.comm}\n" in read(tree, "saved_cmdlines")
    assert read(tree, "saved_tgids") == f"{task.pid} {task.pid}\n"
    write(tree, "saved_cmdlines_size", "1000")
    assert int(read(tree, "saved_cmdlines_size")) >= 1000
    assert read(tree, "saved_cmdlines") == ""
    assert read(tree, "printk_formats") == ""
    assert read(tree, "timestamp_mode") == "[delta] absolute\n"
    write(tree, "trace_marker_raw", "abcdefgh")
    assert "# 64636261 buf: 65 66 67 68" in read(tree, "trace")


def test_options(tree: NodeTree) -> None:
    write(tree, "options/record-cmd", "0")
    assert read(tree, "options/record-cmd") == "0\n"
    assert {"nopause-on-trace", "norecord-cmd"} <= set(read(tree, "trace_options").split())
    write(tree, "trace_options", "record-cmd\n")
    assert read(tree, "options/record-cmd") == "1\n"
    for text in ("2", "x", ""):
        with assert_errno(errno.EINVAL):
            write(tree, "options/record-cmd", text)


def test_option_files_are_among_the_recorded(unchanged: NodeTree) -> None:
    prefix = "/sys/kernel/tracing/options/"
    recorded = oracle.modes("ls_tracefs_options_percpu_instances.txt", prefix)
    # The recorded kernel has no CONFIG_FUNCTION_PROFILER.
    assert set(names(unchanged, "/tracing/options")) - {"graph-time"} <= recorded.keys()


@pytest.mark.parametrize(
    ("name", "line", "empty"),
    [
        ("set_event", "kprobes:a\n", ""),
        ("set_event_pid", "7\n", ""),
        ("set_event_notrace_pid", "7\n", ""),
        ("set_ftrace_filter", "vfs_read\n", "#### all functions enabled ####\n"),
        ("set_ftrace_notrace", "vfs_read\n", "#### no functions disabled ####\n"),
        ("set_ftrace_pid", "7\n", "no pid\n"),
        ("set_ftrace_notrace_pid", "7\n", "no pid\n"),
        ("dynamic_events", "p:kprobes/b vfs_mkdir\n", ""),
        ("synthetic_events", "delay\tu64 d\n", ""),
        ("uprobe_events", "p:uprobes/u /bin/sh:0x0000000000001000\n", ""),
    ],
)
def test_lists(tree: NodeTree, name: str, line: str, empty: str) -> None:
    if name.endswith("_events"):
        files.truncate(tree, "/tracing/dynamic_events")
    assert read(tree, name) == empty
    write(tree, name, line)
    assert read(tree, name) == line
    files.truncate(tree, f"/tracing/{name}")
    assert read(tree, name) == empty


@pytest.mark.parametrize(
    ("name", "data", "moved"),
    [
        ("tracing_on", "0\n", 1),
        ("buffer_percent", "50\n", 1),
        ("buffer_size_kb", "1408", 4),
        ("per_cpu/cpu0/buffer_size_kb", "1408", 4),
        ("trace_options", "markers", 7),
        ("options/markers", "1", 1),
        ("current_tracer", "nop", 3),
        ("trace_clock", "local", 5),
        ("tracing_cpumask", "1", 0),
        ("saved_cmdlines_size", "128", 3),
        ("tracing_thresh", "0", 0),
        ("tracing_max_latency", "0", 0),
        ("max_graph_depth", "0", 1),
        ("stack_max_size", "0", 0),
        ("snapshot", "0", 1),
        ("trace", "ignored", 0),
        ("set_event", "!kprobes:a\n", 11),
        ("set_event_pid", "7 ", 2),
        ("set_event_notrace_pid", "7 ", 2),
        ("set_ftrace_pid", "7 ", 2),
        ("set_ftrace_filter", "vfs_read ", 9),
        ("set_ftrace_notrace", "vfs_read ", 9),
        ("set_graph_function", "vfs_read ", 9),
        ("set_graph_notrace", "vfs_read ", 9),
        ("stack_trace_filter", "vfs_read ", 9),
        ("events/enable", "0", 1),
        ("events/kprobes/enable", "0", 1),
        ("events/kprobes/a/enable", "0", 1),
        ("events/kprobes/a/trigger", "traceoff\n", 9),
        ("kprobe_events", "p:b vfs_read\n", 0),
        ("dynamic_events", "p:b vfs_read\n", 0),
        ("synthetic_events", "b int i\n", 0),
        ("../kprobes/enabled", "1", 0),
    ],
)
def test_a_read_after_a_write_begins_where_linux_has_the_position(
    tree: NodeTree, name: str, data: str, moved: int
) -> None:
    """On one descriptor, a read after a write begins at the position that Debian's Linux 6.1.176 has after
    the same write.
    """
    path = posixpath.normpath(f"/tracing/{name}")
    file = files.opened(tree, path, os.O_RDWR)
    taken = file.write(data.encode(), 0)
    assert taken == len(data)
    after = file.read(1 << 16, taken)
    assert after == file.read(1 << 16, 0)[moved:]


def test_a_value_is_read_anew_after_a_write(tree: NodeTree) -> None:
    file = opened(tree, "current_tracer", os.O_RDWR)
    assert file.read(1, 0) == b"n"
    assert file.write(b"function", 1) == 8
    assert file.read(100, 1) == b"unction\n"


def test_a_sysctl_is_read_and_written_at_its_start_only(tree: NodeTree) -> None:
    file = files.opened(tree, "/sysctl/kernel/stack_tracer_enabled", os.O_RDWR)
    assert [file.write(data, file.next_offset) for data in (b"0", b"1", b"nonsense")] == [1, 1, 8]
    assert file.read(100, file.next_offset) == b""
    assert file.read(100, 0) == b"0\n"
    assert file.read(100, 1) == b""


_FILTERS = (
    ("set_ftrace_filter", "#### all functions enabled ####\n"),
    ("set_ftrace_notrace", "#### no functions disabled ####\n"),
    ("set_graph_function", "#### all functions enabled ####\n"),
    ("set_graph_notrace", "#### no functions disabled ####\n"),
    ("stack_trace_filter", "#### all functions enabled ####\n"),
)


@pytest.fixture(scope="module")
def filters() -> Iterator[NodeTree]:
    """Yield the file tree of a kernel that is shared by tests which first empty the filter files that they
    use.
    """
    with Kernel(MachineConfig(cpus=2)) as booted:
        yield booted.filesystem()


@pytest.mark.parametrize(("name", "none"), _FILTERS)
@pytest.mark.parametrize(
    ("writes", "answers", "chosen"),
    [
        (["vfs_re", "ad\n"], [6, 3], "vfs_read"),
        (["vfs_re", "ad"], [6, 2], "vfs_read"),
        (["vfs_re", " ", "ad"], [6, "EINVAL", 2], ""),
        (["nonsense"], [8], ""),
        (["nonsense ", "vfs_write"], ["EINVAL", 9], "vfs_write"),
        (["vfs_read:", "nonsense\n"], [9, "EINVAL"], ""),
        (["vfs_read:nonsense"], [17], ""),
        (["a" * 700, "vfs_write "], ["EINVAL", 10], ""),
        (["a" * 660, "b" * 20, " ", "vfs_write"], [660, "EINVAL", 1, 9], ""),
        (["vfs_write vfs_read", " vfs_open ", "  "], [10, 10, 2], "vfs_open vfs_write"),
        (["vfs_write\0vfs_read", "\t", "\0"], [10, 1, 1], "vfs_write"),
        (["vfs_write ", "vfs_open ", "!vfs_", "write"], [10, 9, 5, 5], "vfs_open"),
    ],
)
def test_a_word_ends_at_a_blank_or_at_the_close(
    filters: NodeTree, name: str, none: str, writes: list[str], answers: list[int | str], chosen: str
) -> None:
    """A word that is written to a filter file ends at a blank or at the close.

    The errnos and counts are those of Debian's Linux 6.1.176. The set of functions changes at the close.
    """
    files.truncate(filters, f"/tracing/{name}")
    file = opened(filters, name, os.O_RDWR | os.O_TRUNC)
    found: list[int | str] = []
    for data in writes:
        try:
            found.append(file.write(data.encode(), file.next_offset))
        except KernelError as error:
            found.append(error.name)
    assert found == answers
    assert read(filters, name) == none
    filters.release(file)
    assert sorted(read(filters, name).split("\n")[:-1]) == (chosen.split() or [none[:-1]])


def test_a_write_at_position_0_begins_a_new_word(tree: NodeTree) -> None:
    file = opened(tree, "set_ftrace_filter", os.O_WRONLY)
    assert file.write(b"nonsense", 0) == 8
    assert file.write(b"vfs_read", 0) == 8
    tree.release(file)
    assert read(tree, "set_ftrace_filter") == "vfs_read\n"


@pytest.mark.parametrize(
    ("name", "before", "shown"),
    [
        ("set_ftrace_filter", "", "#### all functions enabled ####\n"),
        ("set_ftrace_filter", "vfs_open", "vfs_open\n"),
        ("set_ftrace_notrace", "vfs_open", "vfs_open\n"),
        ("set_graph_function", "vfs_open", "vfs_read\n"),
    ],
)
def test_a_filter_is_shown_as_it_was_at_open(tree: NodeTree, name: str, before: str, shown: str) -> None:
    """An open filter file shows the functions that were set at its open.

    A filter of the function graph shows the present functions instead.
    """
    files.truncate(tree, f"/tracing/{name}")
    write(tree, name, before)
    file = opened(tree, name)
    files.truncate(tree, f"/tracing/{name}")
    write(tree, name, "vfs_read")
    assert file.read(100, 0) == shown.encode()
    tree.release(file)
    assert read(tree, name) == "vfs_read\n"


def test_the_last_of_two_writers_decides(tree: NodeTree) -> None:
    first = opened(tree, "set_ftrace_filter", os.O_WRONLY)
    write(tree, "set_ftrace_filter", "vfs_open\n")
    first.write(b"vfs_read\n", 0)
    assert read(tree, "set_ftrace_filter") == "vfs_open\n"
    tree.release(first)
    assert read(tree, "set_ftrace_filter") == "vfs_read\n"


def test_commands_take_effect_before_the_close(tree: NodeTree) -> None:
    file = opened(tree, "set_ftrace_filter", os.O_RDWR | os.O_TRUNC)
    assert [file.write(data, file.next_offset) for data in (b"vfs_read:trace", b"off:3\n")] == [14, 6]
    command = "#### all functions enabled ####\nvfs_read:traceoff:count=3\n"
    assert "".join(list(_lines(tree, "set_ftrace_filter"))) == command
    file.write(b"vfs_open\n", file.next_offset)
    assert "".join(list(_lines(tree, "set_ftrace_filter"))) == command
    tree.release(file)
    assert "".join(list(_lines(tree, "set_ftrace_filter"))) == command.replace(
        "#### all functions enabled ####", "vfs_open"
    )


def test_a_list_of_all_functions_can_be_written_in_pieces(tree: NodeTree) -> None:
    """A list of all functions can be written in pieces that end within words, as awk, head and dd do."""
    names_ = [line.split()[0] for line in _lines(tree, "available_filter_functions")]
    data = "".join(f"{name}\n" for name in names_).encode()
    file = opened(tree, "set_ftrace_filter", os.O_WRONLY | os.O_TRUNC)
    for start in range(0, len(data), 509):
        piece = data[start : start + 509]
        while piece:
            piece = piece[file.write(piece, file.next_offset) :]
    tree.release(file)
    assert _lines(tree, "set_ftrace_filter") == [f"{name}\n" for name in names_]


def _lines(tree: NodeTree, name: str) -> list[str]:
    file = opened(tree, name)
    data = b""
    while part := file.read(1 << 16, len(data)):
        data += part
    tree.release(file)
    return data.decode().splitlines(keepends=True)


def test_the_trace_stands_still_for_its_readers(kernel: Kernel, tree: NodeTree) -> None:
    array = kernel.trace
    tree.release(opened(tree, "trace"))
    assert not array.is_stopped
    write(tree, "options/pause-on-trace", "1")
    reader = opened(tree, "trace")
    writer = opened(tree, "trace", os.O_WRONLY)
    assert array.is_stopped
    tree.release(writer)
    assert array.is_stopped
    tree.release(reader)
    assert not array.is_stopped


def test_free_buffer_acts_when_it_is_closed(tree: NodeTree) -> None:
    write(tree, "buffer_size_kb", "64")
    file = opened(tree, "free_buffer", os.O_WRONLY)
    assert file.write(b"anything", 0) == 8
    assert read(tree, "buffer_size_kb") == "67\n"
    tree.release(file)
    assert read(tree, "buffer_size_kb") != "67\n"
    with assert_errno(errno.EINVAL):
        read(tree, "free_buffer")


@pytest.mark.parametrize(
    ("cpus", "mask", "text"),
    [
        (1, 1, "1\n"),
        (2, 3, "3\n"),
        (8, 0x0F, "0f\n"),
        (33, 1 << 32, "1,00000000\n"),
        (64, 0xFF, "00000000,000000ff\n"),
    ],
)
def test_masks(cpus: int, mask: int, text: str) -> None:
    assert mask_text(mask, cpus) == text
    assert cpumask(text.encode(), cpus) == mask
    assert cpumask(text.encode() + b"\0x", cpus) == mask


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (b"x", errno.EINVAL),
        (b"0x1", errno.EINVAL),
        (b"4", errno.EOVERFLOW),
        (b"000000001", errno.EOVERFLOW),
        (b"1,00000000", errno.EOVERFLOW),
        (b"0,1", errno.EOVERFLOW),
    ],
)
def test_wrong_masks(text: bytes, number: int) -> None:
    with assert_errno(number):
        cpumask(text, 2)


def test_cpumask_file(kernel: Kernel, tree: NodeTree) -> None:
    assert read(tree, "tracing_cpumask") == "3\n"
    write(tree, "tracing_cpumask", "2\n")
    assert (kernel.trace.cpumask, read(tree, "tracing_cpumask")) == (2, "2\n")


def test_instances(kernel: Kernel, tree: NodeTree) -> None:
    tree.mkdir(ROOT, "/tracing/instances/i", 0o755)
    assert names(tree, "/tracing/instances") == ["i"]
    with assert_errno(errno.EEXIST):
        tree.mkdir(ROOT, "/tracing/instances/i", 0o755)
    write(tree, "instances/i/trace_marker", "hello\n")
    assert "hello" in read(tree, "instances/i/trace")
    assert "hello" not in read(tree, "trace")
    assert "record-cmd" not in names(tree, "/tracing/instances/i/options")
    assert "markers" in names(tree, "/tracing/instances/i/options")
    write(tree, "instances/i/events/kprobes/a/enable", "1")
    assert read(tree, "events/kprobes/a/enable") == "0\n"
    number, removed = tree.getattr("/tracing/instances/i").ino, opened(tree, "instances/i/trace")
    tree.release(removed)
    tree.rmdir(ROOT, "/tracing/instances/i")
    assert not kernel.trace_arrays.names()
    with assert_errno(errno.ENOENT):
        tree.rmdir(ROOT, "/tracing/instances/i")
    tree.mkdir(ROOT, "/tracing/instances/i", 0o755)
    assert tree.getattr("/tracing/instances/i").ino != number
    with assert_errno(errno.ENODEV):
        removed.read(1, 0)


def test_an_instance_in_use_stays(tree: NodeTree) -> None:
    tree.mkdir(ROOT, "/tracing/instances/i", 0o755)
    file = opened(tree, "instances/i/per_cpu/cpu0/trace")
    with assert_errno(errno.EBUSY):
        tree.rmdir(ROOT, "/tracing/instances/i")
    tree.release(file)
    tree.rmdir(ROOT, "/tracing/instances/i")


def test_only_instances_are_made_and_removed(tree: NodeTree) -> None:
    tree.mkdir(ROOT, "/tracing/instances/i", 0o755)
    for path in ("/tracing/x", "/tracing/events/x", "/tracing/instances/i/x", "/tracing/per_cpu/cpu9"):
        with assert_errno(errno.EPERM):
            tree.mkdir(ROOT, path, 0o755)
    for path in ("/tracing/instances", "/tracing/instances/i/events", "/tracing/per_cpu/cpu0"):
        with assert_errno(errno.EPERM):
            tree.rmdir(ROOT, path)


def test_commands_come_behind_the_last_function_or_the_note_of_none(tree: NodeTree) -> None:
    """In set_ftrace_filter, commands follow the last function, or the note that there is no function.

    As with t_start() and t_next(), a read(2) that begins at this last function or note does not continue with
    the commands. A read from an earlier function does.
    """
    write(tree, "set_ftrace_filter", "vfs_read:traceoff:3\n")
    file = opened(tree, "set_ftrace_filter")
    note, command = "#### all functions enabled ####\n", "vfs_read:traceoff:count=3\n"
    assert [file.read(4096, at).decode() for at in (0, len(note), len(note + command))] == [note, command, ""]
    write(tree, "set_ftrace_filter", "vfs_open\n")
    file = opened(tree, "set_ftrace_filter")
    assert [file.read(4096, at).decode() for at in (0, 9, 9 + len(command))] == ["vfs_open\n", command, ""]
    write(tree, "set_ftrace_filter", "vfs_read\n")
    assert opened(tree, "set_ftrace_filter").read(4096, 0).decode() == f"vfs_open\nvfs_read\n{command}"


def _directories(tree: NodeTree, path: str) -> list[str]:
    found = (f"{path}/{name}" for name in names(tree, f"/tracing/{path}"))
    return [each for each in found if stat.S_ISDIR(tree.getattr(f"/tracing/{each}").mode)]


def test_ids_of_events_are_none_of_the_host_s(unchanged: NodeTree) -> None:
    """Events have ids from 1 << 15 on, which no event of the host has, so that perf_event_open() fails with
    such an id.

    Only tracing's own entries have Linux's ids.
    """
    ids: dict[int, str] = {}
    for event in _directories(unchanged, "events"):
        for name in _directories(unchanged, event):
            if "id" in names(unchanged, f"/tracing/{name}"):
                ids[int(read(unchanged, f"{name}/id"))] = name.removeprefix("events/")
    assert {ids.pop(1), ids.pop(5)} == {"ftrace/function", "ftrace/print"}
    assert len(ids) > 100
    assert min(ids) >= 1 << 15


def test_the_marker_s_event_is_set_while_it_has_a_trigger(tree: NodeTree) -> None:
    """set_event lists ftrace:print while this event has a trigger, although it cannot be enabled."""
    place = "events/ftrace/print/trigger"
    assert read(tree, "set_event") == ""
    write(tree, place, "snapshot")
    assert read(tree, "set_event") == "ftrace:print\n"
    write(tree, place, "!snapshot")
    assert read(tree, "set_event") == ""


@pytest.mark.parametrize("of_cpu", [False, True])
def test_reads_after_the_end_of_the_trace_find_later_records(
    of_cpu: bool, tree: NodeTree, cpus: tuple[int, int]
) -> None:
    """After the end of the trace, a further read of the descriptor shows later records, as in Linux 6.1.

    Thus, a loop with readline() finds later records.
    """
    path = f"per_cpu/cpu{cpus[0]}/trace" if of_cpu else "trace"

    def marks() -> list[str]:
        nonlocal at
        text = b""
        while data := file.read(100, at):
            text += data
            at += len(data)
        lines = [line for line in text.decode().splitlines() if not line.startswith("#")]
        return [line.rpartition(": ")[2] for line in lines]

    write(tree, "trace_marker", "a\n")
    file = opened(tree, path)
    at = 0
    assert marks() == ["a"]
    assert marks() == []
    write(tree, "trace_marker", "b\n")
    assert marks() == ["b"]
    write(tree, "trace_marker", "c\n")
    write(tree, "trace_marker", "d\n")
    assert marks() == ["c", "d"]
    at = 0
    assert marks() == ["a", "b", "c", "d"]
    files.truncate(tree, f"/tracing/{path}")
    write(tree, "trace_marker", "e\n")
    assert marks() == []
    at = 0
    assert marks() == ["e"]
    tree.release(file)
