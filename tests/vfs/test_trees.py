"""The trees: modes as recorded, and what each file does."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import AbstractContextManager

import pytest

from emulated_kernel.errors import KernelError
from emulated_kernel.vfs.layout import Layout
from emulated_kernel.vfs.mount import Client
from emulated_kernel.vfs.node import Owner
from emulated_kernel.vfs.tree import Filesystem
from tests.vfs import oracle
from tests.vfs.fakes import FakeKernel

ROOT = Client(1, 0, 0)
STATS = ["hits", "nmissed", "mode", "enabled", "optimized", "reason", "address", "bytes", "detour", "cost"]


@pytest.fixture
def kernel() -> FakeKernel:
    made = FakeKernel()
    made.events.command("p:a vfs_read")
    return made


@pytest.fixture
def tree(kernel: FakeKernel) -> Filesystem:
    return kernel.filesystem()


def read(tree: Filesystem, path: str, client: Client = ROOT) -> str:
    return tree.open(path, os.O_RDONLY, client).read(1 << 20, 0).decode()


def write(tree: Filesystem, path: str, text: str, flags: int = os.O_WRONLY) -> int:
    return tree.open(path, flags, ROOT).write(text.encode(), 0)


def assert_errno(number: int) -> AbstractContextManager[object]:
    return pytest.raises(KernelError, match=rf"Errno {number}\b")


@pytest.mark.parametrize(
    ("sample", "prefix", "directory"),
    [
        ("ls_tracefs_top.txt", "/sys/kernel/tracing/", "/tracing"),
        ("ls_debugfs_kprobes.txt", "/sys/kernel/debug/kprobes/", "/kprobes"),
        ("ls_events_kprobes.txt", "/sys/kernel/tracing/events/kprobes/", "/tracing/events/kprobes"),
        (
            "ls_events_kprobes.txt",
            "/sys/kernel/tracing/events/kprobes/p_vfs_mkdir_0/",
            "/tracing/events/kprobes/a",
        ),
    ],
)
def test_modes_as_recorded(tree: Filesystem, sample: str, prefix: str, directory: str) -> None:
    recorded = oracle.modes(sample, prefix)
    ours = {name: stat.filemode(tree.getattr(f"{directory}/{name}").mode) for name in tree.readdir(directory)}
    of_ours_alone = {"optimization", "return_hook", "stats", "a"}
    assert ours.keys() - recorded.keys() <= of_ours_alone
    assert {name: ours[name] for name in ours.keys() & recorded.keys()} == {
        name: recorded[name] for name in ours.keys() & recorded.keys()
    }
    assert ours.keys() & recorded.keys()


def test_sysctl(kernel: FakeKernel, tree: Filesystem) -> None:
    assert tree.readdir("/sysctl") == ["debug", "kernel"]
    write(tree, "/sysctl/debug/kprobes-optimization", "0\n")
    assert (kernel.kprobes.optimization, read(tree, "/kprobes/optimization")) == (False, "0\n")
    assert read(tree, "/sysctl/kernel/stack_tracer_enabled") == "0\n"
    assert write(tree, "/sysctl/kernel/stack_tracer_enabled", " -3 rest") == 8
    assert read(tree, "/sysctl/kernel/stack_tracer_enabled") == "-3\n"
    for junk in ("", "x", "1x", str(1 << 31)):
        with assert_errno(errno.EINVAL):
            write(tree, "/sysctl/kernel/stack_tracer_enabled", junk)


def test_stack_tracer(kernel: FakeKernel, tree: Filesystem) -> None:
    write(tree, "/tracing/stack_max_size", "100\n")
    assert (kernel.stack.max_size, read(tree, "/tracing/stack_max_size")) == (100, "100\n")
    assert read(tree, "/tracing/stack_trace") == "100 bytes\n"
    write(tree, "/tracing/stack_trace_filter", "f\n")
    assert read(tree, "/tracing/stack_trace_filter") == "f\n"


def test_the_root_of_tracefs_is_private(kernel: FakeKernel) -> None:
    root = kernel.filesystem(Layout.TRACEFS).getattr("/")
    assert stat.filemode(root.mode) == "drwx------"
    assert "kprobe_events" in kernel.filesystem(Layout.TRACEFS).readdir("/")


def test_full_layout(tree: Filesystem) -> None:
    files = ["kprobe_events", "kprobe_profile"]
    assert tree.readdir("/") == ["kprobes", *files, "tracing", "machine", "sysctl"]
    assert tree.readdir("/kprobes") == [
        "list",
        "enabled",
        "blacklist",
        "optimization",
        "return_hook",
        "stats",
    ]


def test_kprobe_events(kernel: FakeKernel, tree: Filesystem) -> None:
    for path in ("/kprobe_events", "/tracing/kprobe_events"):
        assert read(tree, path) == "p:kprobes/a vfs_read\n"
    write(tree, "/kprobe_events", "p:g/b vfs_mkdir\n")
    assert read(tree, "/tracing/available_events") == "g:b\nkprobes:a\n"
    assert write(tree, "/kprobe_events", "") == 0
    with assert_errno(errno.ENOENT):
        write(tree, "/kprobe_events", "p:x nosuch\n")
    kernel.events.all()[0].enabled = True
    with assert_errno(errno.EBUSY):
        tree.open("/kprobe_events", os.O_WRONLY | os.O_TRUNC, ROOT)
    kernel.events.all()[0].enabled = False
    write(tree, "/kprobe_events", "\n", os.O_WRONLY | os.O_TRUNC)
    assert read(tree, "/kprobe_events") == ""
    assert tree.readdir("/tracing/events") == ["enable", "header_event", "header_page"]


def test_event_switches(tree: Filesystem) -> None:
    write(tree, "/kprobe_events", "p:b vfs_mkdir\n")
    events = "/tracing/events"
    assert read(tree, f"{events}/kprobes/a/enable") == "0\n"
    write(tree, f"{events}/kprobes/a/enable", "1")
    shown = [read(tree, f"{events}/{path}enable") for path in ("", "kprobes/", "kprobes/a/", "kprobes/b/")]
    assert shown == ["X\n", "X\n", "1\n", "0\n"]
    write(tree, f"{events}/kprobes/enable", "1\n")
    assert read(tree, f"{events}/enable") == "1\n"
    write(tree, f"{events}/enable", "0")
    assert read(tree, f"{events}/kprobes/b/enable") == "0\n"
    assert read(tree, f"{events}/kprobes/b/id") == "1410\n"
    assert read(tree, f"{events}/kprobes/b/format") == "name: b\nID: 1410\n"
    for text in ("2", "x", ""):
        with assert_errno(errno.EINVAL):
            write(tree, f"{events}/enable", text)


def test_event_filters(kernel: FakeKernel, tree: Filesystem) -> None:
    write(tree, "/kprobe_events", "p:b vfs_mkdir\n")
    group = "/tracing/events/kprobes"
    assert write(tree, f"{group}/a/filter", "x == 1") == 6
    assert read(tree, f"{group}/a/filter") == "x == 1\n"
    write(tree, f"{group}/filter", "y == 1")
    assert [event.filter for event in kernel.events.all()] == ["y == 1"] * 2
    assert read(tree, f"{group}/filter") == "global filter\n"
    assert "filter" not in tree.readdir("/tracing/events")


def test_buffer_files(kernel: FakeKernel, tree: Filesystem) -> None:
    write(tree, "/tracing/trace_marker", "hello\n")
    assert read(tree, "/tracing/trace") == "# tracer: nop\nhello\n"
    assert write(tree, "/tracing/trace", "anything") == 8
    assert "hello" in read(tree, "/tracing/trace")
    tree.open("/tracing/trace", os.O_WRONLY | os.O_TRUNC, ROOT)
    assert "hello" not in read(tree, "/tracing/trace")
    write(tree, "/tracing/tracing_on", "0")
    assert read(tree, "/tracing/tracing_on") == "0\n"
    write(tree, "/tracing/buffer_size_kb", "64")
    assert read(tree, "/tracing/buffer_total_size_kb") == "128\n"
    with assert_errno(errno.EINVAL):
        write(tree, "/tracing/buffer_size_kb", "0")
    kernel.trace.errors.lines.append("[1.0] trace_kprobe: error: x\n")
    assert read(tree, "/tracing/error_log").startswith("[1.0]")
    tree.open("/tracing/error_log", os.O_WRONLY | os.O_TRUNC, ROOT)
    assert read(tree, "/tracing/error_log") == ""


def test_tracers(tree: Filesystem) -> None:
    assert read(tree, "/tracing/available_tracers") == "nop\n"
    write(tree, "/tracing/current_tracer", "nop\n")
    assert read(tree, "/tracing/current_tracer") == "nop\n"
    for text in ("bogus", "\n"):
        with assert_errno(errno.EINVAL):
            write(tree, "/tracing/current_tracer", text)


def test_debugfs(kernel: FakeKernel, tree: Filesystem) -> None:
    assert "[OPTIMIZED]" in read(tree, "/kprobes/list")
    write(tree, "/kprobes/enabled", "off\n")
    assert (kernel.kprobes.enabled, read(tree, "/kprobes/enabled")) == (False, "0\n")
    write(tree, "/kprobes/optimization", "0\n")
    assert (kernel.kprobes.optimization, read(tree, "/kprobes/optimization")) == (False, "0\n")


def test_stats(kernel: FakeKernel, tree: Filesystem) -> None:
    base = "/kprobes/stats/kprobes/a"
    assert sorted(tree.readdir(base)) == sorted(STATS)
    assert read(tree, f"{base}/hits") == "3\n"
    write(tree, f"{base}/hits", "0")
    assert read(tree, f"{base}/hits") == "0\n"
    with assert_errno(errno.EINVAL):
        write(tree, f"{base}/nmissed", "5")
    assert read(tree, f"{base}/reason") == ""
    assert read(tree, f"{base}/bytes") == "original 55\npatched  cc\n"
    with assert_errno(errno.EOPNOTSUPP):
        write(tree, f"{base}/optimized", "1")
    write(tree, f"{base}/optimized", "0")
    assert not kernel.events.all()[0].optimized
    with assert_errno(errno.EINVAL):
        write(tree, f"{base}/mode", "int3")


def test_stats_of_a_return_probe(kernel: FakeKernel, tree: Filesystem) -> None:
    kernel.events.all()[0].is_return = True
    base = "/kprobes/stats/kprobes/a"
    files = ("active", "maxactive", "high_water", "memory")
    assert set(tree.readdir(base)) == {*STATS, *files}
    assert [read(tree, f"{base}/{name}") for name in files] == ["1\n", "10\n", "4\n", "480\n"]


def test_return_hook(kernel: FakeKernel, tree: Filesystem) -> None:
    path = "/kprobes/return_hook"
    assert read(tree, path) == "[rethook] fgraph busy\n"
    write(tree, path, "fgraph\n")
    assert (kernel.hooks.return_hook, read(tree, path)) == ("fgraph", "rethook [fgraph] busy\n")
    for name, error in (("busy", errno.EBUSY), ("other", errno.EINVAL)):
        with assert_errno(error):
            write(tree, path, name)


def test_addresses_are_for_the_privileged(kernel: FakeKernel) -> None:
    tree = kernel.filesystem(owner=Owner(1000, 1000))
    kernel.machine.command_module("load fake")
    for path, start in (
        ("/machine/kallsyms", "{} T "),
        ("/machine/modules", "fake 4096 0 - Live 0x{}\n"),
    ):
        shown = {uid: read(tree, path, Client(5, uid, uid)) for uid in (0, 1000, 1001)}
        assert shown[1001].startswith(start.format("0" * 16))
        for uid in (0, 1000):
            address = "ffffffffc0000000" if "modules" in path else "ffffffff81000000"
            assert shown[uid].startswith(start.format(address))


def test_modules(tree: Filesystem, kernel: FakeKernel) -> None:
    write(tree, "/machine/modules", "load one\n\n load two \n")
    assert kernel.machine.loaded == ["one", "two"]
    with assert_errno(errno.ENOENT):
        write(tree, "/machine/modules", "unload one\nunload three\nunload two\n")
    assert kernel.machine.loaded == ["two"]
    with assert_errno(errno.EINVAL):
        tree.open("/machine/modules", os.O_WRONLY, ROOT).write(b"load \xff", 0)


def test_call(tree: Filesystem) -> None:
    write(tree, "/machine/call", "add 1 2\nadd 3 4\n")
    assert read(tree, "/machine/call") == "3\n7\n"
    with assert_errno(errno.ENOENT):
        write(tree, "/machine/call", "nosuch 1\n")
    with assert_errno(errno.EINVAL):
        tree.open("/machine/call", os.O_WRONLY, ROOT).write(b"\xff", 0)
    assert read(tree, "/machine/version").startswith("Linux version")


# What Linux's selftests require of README, and what perf-probe looks for in it (as its glob patterns).
@pytest.mark.parametrize(
    "feature",
    [
        "Create/append/",
        "place: [<module>:]<symbol>[+<offset>]|<memaddr>",
        "place (kretprobe): [<module>:]<symbol>[+<offset>]%return|<memaddr>",
        "r[maxactive]",
        "x8/16/32/64,",
        "[u]<offset>(<fetcharg>)",
        "\\imm-value,",
        "$arg<N>",
        "symstr",
        "<type>\\[<array-size>\\]",
    ],
)
def test_readme_names_features(tree: Filesystem, feature: str) -> None:
    text = read(tree, "/tracing/README")
    assert feature in text
    assert feature in oracle.oracle_path("samples/README.tracefs").read_text()


def test_readme_is_silent_about_what_is_not_there() -> None:
    text = read(FakeKernel(return_probes=False).filesystem(), "/tracing/README")
    assert "place: [<module>:]<symbol>" in text
    for word in ("maxactive", "kretprobe", "$retval", "?return"):
        assert word not in text


def test_readme_names_every_file(tree: Filesystem) -> None:
    text = read(tree, "/tracing/README")
    for name in tree.readdir("/tracing"):
        assert name in text or name == "README"
