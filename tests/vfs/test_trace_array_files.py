"""Files of trace arrays: modes as recorded, what each does, and instances."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import AbstractContextManager

import pytest

from emulated_kernel.errors import KernelError
from emulated_kernel.vfs.mount import Client
from emulated_kernel.vfs.open_file import OpenFile
from emulated_kernel.vfs.parse import cpumask
from emulated_kernel.vfs.trace_array_files import mask_text
from emulated_kernel.vfs.tree import Filesystem
from tests.vfs import oracle
from tests.vfs.fakes import FakeKernel

ROOT = Client(1, 0, 0)


@pytest.fixture
def kernel() -> FakeKernel:
    return FakeKernel()


@pytest.fixture
def tree(kernel: FakeKernel) -> Filesystem:
    return kernel.filesystem()


def opened(tree: Filesystem, path: str, flags: int = os.O_RDONLY) -> OpenFile:
    return tree.open(f"/tracing/{path}", flags, ROOT)


def read(tree: Filesystem, path: str) -> str:
    file = opened(tree, path)
    text = file.read(1 << 20, 0).decode()
    tree.release(file)
    return text


def write(tree: Filesystem, path: str, text: str) -> None:
    file = opened(tree, path, os.O_WRONLY)
    file.write(text.encode(), 0)
    tree.release(file)


def assert_errno(number: int) -> AbstractContextManager[object]:
    return pytest.raises(KernelError, match=rf"Errno {number}\b")


def test_modes_of_a_cpu_as_recorded(tree: Filesystem) -> None:
    prefix = "/sys/kernel/tracing/per_cpu/cpu0/"
    recorded = oracle.modes("ls_tracefs_options_percpu_instances.txt", prefix)
    ours = tree.readdir("/tracing/per_cpu/cpu0")
    assert {n: stat.filemode(tree.getattr(f"/tracing/per_cpu/cpu0/{n}").mode) for n in ours} == recorded
    assert tree.readdir("/tracing/per_cpu") == ["cpu0", "cpu1"]


def test_modes_of_an_instance_as_recorded(tree: Filesystem) -> None:
    tree.mkdir("/tracing/instances/i", 0o755)
    recorded = {}
    for line in oracle.oracle_path("samples/ls_instance.txt").read_text().splitlines():
        mode, _, name = line.partition(" ")
        recorded[name] = mode
    base = "/tracing/instances/i"
    ours = {name: stat.filemode(tree.getattr(f"{base}/{name}").mode) for name in tree.readdir(base)}
    assert ours.items() <= recorded.items()
    assert {name for name in recorded.keys() - ours.keys() if "ftrace" not in name} == set()


def test_per_cpu(kernel: FakeKernel, tree: Filesystem) -> None:
    assert read(tree, "per_cpu/cpu1/trace") == "CPU 1\n"
    assert read(tree, "per_cpu/cpu1/stats") == "entries: 1\n"
    assert read(tree, "per_cpu/cpu1/snapshot") == "snapshot 1\n"
    write(tree, "per_cpu/cpu0/snapshot", "2")
    write(tree, "snapshot", "1\n")
    assert kernel.trace.snapshot.written == [(2, 0), (1, None)]
    write(tree, "per_cpu/cpu0/buffer_size_kb", "64")
    assert read(tree, "buffer_size_kb") == "64\n"


def test_values(kernel: FakeKernel, tree: Filesystem) -> None:
    write(tree, "buffer_percent", "75")
    assert read(tree, "buffer_percent") == "75\n"
    write(tree, "trace_clock", "global\n")
    assert read(tree, "trace_clock") == "[global]\n"
    for text in ("bogus", "x" * 64):
        with assert_errno(errno.EINVAL):
            write(tree, "trace_clock", text)
    write(tree, "tracing_max_latency", "7")
    assert (kernel.trace.max_latency_ns, read(tree, "tracing_max_latency")) == (7000, "7\n")
    write(tree, "saved_cmdlines_size", "10")
    assert read(tree, "saved_cmdlines") == "117 bash\n"
    assert read(tree, "saved_tgids") == "117 117\n"
    assert read(tree, "printk_formats") == ""
    assert read(tree, "timestamp_mode") == "[delta] absolute\n"
    write(tree, "trace_marker_raw", "abcd")
    assert kernel.trace.raw_markers == [b"abcd"]


def test_options(tree: Filesystem) -> None:
    write(tree, "options/record-cmd", "0")
    assert read(tree, "options/record-cmd") == "0\n"
    assert read(tree, "trace_options") == "nopause-on-trace\nnorecord-cmd\n"
    write(tree, "trace_options", "record-cmd\n")
    assert read(tree, "options/record-cmd") == "1\n"
    for text in ("2", "x", ""):
        with assert_errno(errno.EINVAL):
            write(tree, "options/record-cmd", text)


def test_option_files_are_among_the_recorded(tree: Filesystem) -> None:
    prefix = "/sys/kernel/tracing/options/"
    recorded = oracle.modes("ls_tracefs_options_percpu_instances.txt", prefix)
    assert set(tree.readdir("/tracing/options")) <= recorded.keys()


def test_lists(kernel: FakeKernel, tree: Filesystem) -> None:
    for name, port in (
        ("set_event", kernel.events.chosen),
        ("set_event_pid", kernel.trace.pids.traced),
        ("set_event_notrace_pid", kernel.trace.pids.untraced),
        ("dynamic_events", kernel.dynamic_events),
    ):
        write(tree, name, "x\n")
        assert read(tree, name) == "x\n"
        opened(tree, name, os.O_WRONLY | os.O_TRUNC)
        assert port.lines == []


def test_the_trace_stands_still_for_its_readers(kernel: FakeKernel, tree: Filesystem) -> None:
    trace = kernel.trace
    tree.release(opened(tree, "trace"))
    assert trace.stopped == 0
    write(tree, "options/pause-on-trace", "1")
    reader = opened(tree, "trace")
    writer = opened(tree, "trace", os.O_WRONLY)
    assert trace.stopped == 1
    tree.release(writer)
    assert trace.stopped == 1
    tree.release(reader)
    assert trace.stopped == 0


def test_free_buffer_acts_when_it_is_closed(kernel: FakeKernel, tree: Filesystem) -> None:
    file = opened(tree, "free_buffer", os.O_WRONLY)
    assert file.write(b"anything", 0) == 8
    assert not kernel.trace.is_freed
    tree.release(file)
    assert kernel.trace.is_freed
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
    ],
)
def test_wrong_masks(text: bytes, number: int) -> None:
    with assert_errno(number):
        cpumask(text, 2)


def test_cpumask_file(kernel: FakeKernel, tree: Filesystem) -> None:
    assert read(tree, "tracing_cpumask") == "3\n"
    write(tree, "tracing_cpumask", "2\n")
    assert kernel.trace.cpumask == 2


def test_instances(kernel: FakeKernel, tree: Filesystem) -> None:
    tree.mkdir("/tracing/instances/i", 0o755)
    assert tree.readdir("/tracing/instances") == ["i"]
    with assert_errno(errno.EEXIST):
        tree.mkdir("/tracing/instances/i", 0o755)
    write(tree, "instances/i/trace_marker", "hello\n")
    assert "hello" in read(tree, "instances/i/trace")
    assert "hello" not in read(tree, "trace")
    assert tree.readdir("/tracing/instances/i/options") == ["pause-on-trace"]
    tree.rmdir("/tracing/instances/i")
    assert not kernel.instances.made
    with assert_errno(errno.ENOENT):
        tree.rmdir("/tracing/instances/i")


def test_an_instance_in_use_stays(tree: Filesystem) -> None:
    tree.mkdir("/tracing/instances/i", 0o755)
    file = opened(tree, "instances/i/per_cpu/cpu0/trace")
    with assert_errno(errno.EBUSY):
        tree.rmdir("/tracing/instances/i")
    tree.release(file)
    tree.rmdir("/tracing/instances/i")


def test_only_instances_are_made_and_removed(tree: Filesystem) -> None:
    tree.mkdir("/tracing/instances/i", 0o755)
    for path in ("/tracing/x", "/tracing/events/x", "/tracing/instances/i/x", "/tracing/per_cpu/cpu9"):
        with assert_errno(errno.EPERM):
            tree.mkdir(path, 0o755)
    for path in ("/tracing/instances", "/tracing/instances/i/events", "/tracing/per_cpu/cpu0"):
        with assert_errno(errno.EPERM):
            tree.rmdir(path)
