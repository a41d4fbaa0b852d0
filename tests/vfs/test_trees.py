"""The trees of files: modes as recorded, and the effect of each file."""

from __future__ import annotations

import errno
import os
import re
import stat

import pytest

from emulated_kernel.guests.builtin.trees.root_layout import RootLayout
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.profile import PROFILES, RETURN_HOOKS, Profile
from emulated_kernel.kprobes.return_hook.return_hooks import SHADOW_STACKS
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.core.node_tree import NodeTree
from tests.vfs import oracle
from tests.vfs.files import assert_errno, names, read, truncate, write

STATS = ["hits", "nmissed", "mode", "enabled", "optimized", "asked"]
STATS += ["reason", "address", "bytes", "detour", "cost"]
EVENTS = "/tracing/events"
BASE = "/kprobes/stats/kprobes/a"


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
def test_modes_as_recorded(unchanged: NodeTree, sample: str, prefix: str, directory: str) -> None:
    tree, recorded = unchanged, oracle.modes(sample, prefix)
    ours = {name: stat.filemode(tree.getattr(f"{directory}/{name}").mode) for name in names(tree, directory)}
    # The recorded kernel has no CONFIG_FUNCTION_PROFILER.
    of_ours_alone = {
        "optimization",
        "stages",
        "return_hook",
        "stats",
        "a",
        "function_profile_enabled",
        "trace_stat",
    }
    assert ours.keys() - recorded.keys() <= of_ours_alone
    assert {name: ours[name] for name in ours.keys() & recorded.keys()} == {
        name: recorded[name] for name in ours.keys() & recorded.keys()
    }
    assert ours.keys() & recorded.keys()


def test_sysctl(kernel: Kernel, tree: NodeTree) -> None:
    assert names(tree, "/sysctl") == ["debug", "kernel"]
    write(tree, "/sysctl/debug/kprobes-optimization", "0\n")
    assert kernel.kprobes.optimizer is not None
    assert (kernel.kprobes.optimizer.allowed, read(tree, "/kprobes/optimization")) == (False, "0\n")
    assert read(tree, "/sysctl/kernel/stack_tracer_enabled") == "0\n"
    assert write(tree, "/sysctl/kernel/stack_tracer_enabled", " -3 rest") == 8
    assert read(tree, "/sysctl/kernel/stack_tracer_enabled") == "-3\n"
    for junk in ("", "x", "1x", str(1 << 31)):
        with assert_errno(errno.EINVAL):
            write(tree, "/sysctl/kernel/stack_tracer_enabled", junk)


def test_a_kernel_without_optimization_has_no_switch_for_it() -> None:
    with Kernel(MachineConfig(profile="kprobes-2010")) as kernel:
        tree = kernel.filesystem()
        assert names(tree, "/sysctl/debug") == []
        assert "optimization" not in names(tree, "/kprobes")


def test_stack_tracer(kernel: Kernel, tree: NodeTree) -> None:
    write(tree, "/tracing/stack_max_size", "100\n")
    assert read(tree, "/tracing/stack_max_size") == "100\n"
    assert "(0 entries)" in read(tree, "/tracing/stack_trace")
    write(tree, "/tracing/stack_trace_filter", "vfs_read\n")
    assert read(tree, "/tracing/stack_trace_filter") == "vfs_read\n"
    truncate(tree, "/tracing/stack_trace_filter")
    assert read(tree, "/tracing/stack_trace_filter") == "#### all functions enabled ####\n"
    write(tree, "/tracing/stack_max_size", "0\n")
    write(tree, "/sysctl/kernel/stack_tracer_enabled", "1")
    kernel.call("gcd", 12, 18)
    assert int(read(tree, "/tracing/stack_max_size")) > 0


def test_the_root_of_tracefs_is_private(kernel: Kernel) -> None:
    tree = kernel.filesystem(RootLayout.TRACEFS)
    assert stat.filemode(tree.getattr("/").mode) == "drwx------"
    assert "kprobe_events" in names(tree, "/")


def test_full_layout(unchanged: NodeTree) -> None:
    files = ["kprobe_events", "kprobe_profile"]
    directories = ["tracing", "machine", "sysctl", "scratch", "dev"]
    assert names(unchanged, "/") == ["kprobes", *files, *directories]
    assert names(unchanged, "/kprobes") == [
        "list",
        "enabled",
        "blacklist",
        "optimization",
        "stages",
        "return_hook",
        "stats",
    ]


def test_kprobe_events(tree: NodeTree) -> None:
    for path in ("/kprobe_events", "/tracing/kprobe_events"):
        assert read(tree, path) == "p:kprobes/a vfs_read\n"
    groups = names(tree, EVENTS)
    write(tree, "/kprobe_events", "p:g/b vfs_mkdir\n")
    assert read(tree, "/tracing/available_events").startswith("g:b\nkprobes:a\n")
    assert read(tree, "/kprobe_profile").split() == ["a", "0", "0", "b", "0", "0"]
    assert write(tree, "/kprobe_events", "") == 0
    with assert_errno(errno.ENOENT):
        write(tree, "/kprobe_events", "p:x nosuch\n")
    write(tree, f"{EVENTS}/g/b/enable", "1")
    with assert_errno(errno.EBUSY):
        truncate(tree, "/kprobe_events")
    write(tree, f"{EVENTS}/g/b/enable", "0")
    write(tree, "/kprobe_events", "\n", os.O_WRONLY | os.O_TRUNC)
    assert read(tree, "/kprobe_events") == ""
    assert set(groups) - set(names(tree, EVENTS)) == {"kprobes"}
    assert names(tree, EVENTS)[:3] == ["enable", "header_event", "header_page"]


def test_event_switches(kernel: Kernel, tree: NodeTree) -> None:
    write(tree, "/kprobe_events", "p:b vfs_mkdir\n")
    assert read(tree, f"{EVENTS}/kprobes/a/enable") == "0\n"
    write(tree, f"{EVENTS}/kprobes/a/enable", "1")
    shown = [read(tree, f"{EVENTS}/{path}enable") for path in ("", "kprobes/", "kprobes/a/", "kprobes/b/")]
    assert shown == ["X\n", "X\n", "1\n", "0\n"]
    write(tree, f"{EVENTS}/kprobes/enable", "1\n")
    assert read(tree, f"{EVENTS}/kprobes/enable") == "1\n"
    write(tree, f"{EVENTS}/enable", "1")
    assert read(tree, f"{EVENTS}/enable") == "1\n"
    write(tree, f"{EVENTS}/enable", "0")
    assert read(tree, f"{EVENTS}/enable") == "0\n"
    assert read(tree, f"{EVENTS}/kprobes/b/enable") == "0\n"
    event = kernel.tracing.kprobe_events.find("kprobes", "b")
    assert event is not None
    assert read(tree, f"{EVENTS}/kprobes/b/id") == f"{event.id}\n"
    assert read(tree, f"{EVENTS}/kprobes/b/format").startswith(f"name: b\nID: {event.id}\nformat:\n")
    for text in ("2", "x", ""):
        with assert_errno(errno.EINVAL):
            write(tree, f"{EVENTS}/enable", text)


def test_event_filters(tree: NodeTree) -> None:
    write(tree, "/kprobe_events", "p:b vfs_mkdir\n")
    group = f"{EVENTS}/kprobes"
    assert write(tree, f"{group}/a/filter", "common_pid == 1") == 15
    assert read(tree, f"{group}/a/filter") == "common_pid == 1\n"
    write(tree, f"{group}/filter", "common_pid == 2")
    assert [read(tree, f"{group}/{name}/filter") for name in "ab"] == ["common_pid == 2\n"] * 2
    assert read(tree, f"{group}/filter").startswith("### global filter ###\n")
    assert "filter" not in names(tree, EVENTS)


def test_triggers(tree: NodeTree) -> None:
    event = f"{EVENTS}/kprobes/a"
    assert read(tree, f"{event}/trigger").startswith("# Available triggers:\n")
    for trigger in ("hist:keys=common_pid\n", "traceoff:count=3\n", "traceoff:3\n"):
        if "count" in trigger:
            with assert_errno(errno.EINVAL):
                write(tree, f"{event}/trigger", trigger)
        else:
            assert write(tree, f"{event}/trigger", trigger) == len(trigger)
    assert "traceoff:count=3" in read(tree, f"{event}/trigger")
    assert "# event histogram" in read(tree, f"{event}/hist")
    truncate(tree, f"{event}/trigger")
    assert read(tree, f"{event}/hist") == ""


def test_buffer_files(tree: NodeTree) -> None:
    write(tree, "/tracing/trace_marker", "hello\n")
    assert read(tree, "/tracing/trace").startswith("# tracer: nop\n")
    assert "hello" in read(tree, "/tracing/trace")
    assert write(tree, "/tracing/trace", "anything") == 8
    assert "hello" in read(tree, "/tracing/trace")
    truncate(tree, "/tracing/trace")
    assert "hello" not in read(tree, "/tracing/trace")
    write(tree, "/tracing/tracing_on", "0")
    assert read(tree, "/tracing/tracing_on") == "0\n"
    write(tree, "/tracing/buffer_size_kb", "64")
    assert read(tree, "/tracing/buffer_total_size_kb") == "134\n"
    with assert_errno(errno.EINVAL):
        write(tree, "/tracing/buffer_size_kb", "0")
    with assert_errno(errno.ENOENT):
        write(tree, "/kprobe_events", "p:x nosuch")
    assert re.match(r"\[ +\d+\.\d+\] trace_kprobe: error: ", read(tree, "/tracing/error_log"))
    truncate(tree, "/tracing/error_log")
    assert read(tree, "/tracing/error_log") == ""


def test_tracers(tree: NodeTree) -> None:
    assert read(tree, "/tracing/available_tracers") == "function_graph function nop\n"
    for name in ("function", "nop"):
        write(tree, "/tracing/current_tracer", f"{name}\n")
        assert read(tree, "/tracing/current_tracer") == f"{name}\n"
    for text in ("bogus", "\n"):
        with assert_errno(errno.EINVAL):
            write(tree, "/tracing/current_tracer", text)


def test_graph_files(tree: NodeTree) -> None:
    for name, note in (
        ("set_graph_function", "all functions enabled"),
        ("set_graph_notrace", "no functions disabled"),
    ):
        assert read(tree, f"/tracing/{name}") == f"#### {note} ####\n"
        write(tree, f"/tracing/{name}", "vfs_read")
        assert read(tree, f"/tracing/{name}") == "vfs_read\n"
    write(tree, "/tracing/max_graph_depth", "3")
    assert read(tree, "/tracing/max_graph_depth") == "3\n"
    write(tree, "/tracing/max_graph_depth", "4294967295")
    assert read(tree, "/tracing/max_graph_depth") == "-1\n"
    write(tree, "/tracing/tracing_thresh", "7")
    assert read(tree, "/tracing/tracing_thresh") == "7\n"


def test_debugfs(kernel: Kernel, tree: NodeTree) -> None:
    write(tree, f"{EVENTS}/kprobes/a/enable", "1")
    assert "  k  vfs_read+0x0" in read(tree, "/kprobes/list")
    start, end, name = re.split(r"[-\t]", read(tree, "/kprobes/blacklist").splitlines()[0])
    assert int(start, 16) < int(end, 16)
    assert name
    write(tree, "/kprobes/enabled", "off\n")
    assert (not kernel.kprobes.table.all_disarmed, read(tree, "/kprobes/enabled")) == (False, "0\n")
    write(tree, "/kprobes/optimization", "0\n")
    assert kernel.kprobes.optimizer is not None
    assert (kernel.kprobes.optimizer.allowed, read(tree, "/kprobes/optimization")) == (False, "0\n")


def test_stats(kernel: Kernel, tree: NodeTree) -> None:
    write(tree, "/kprobe_events", "p:g gcd\n")
    base = "/kprobes/stats/kprobes/g"
    assert names(tree, base) == STATS
    write(tree, f"{EVENTS}/kprobes/g/enable", "1")
    kernel.call("gcd", 12, 18)
    assert read(tree, f"{base}/hits") == "1\n"
    write(tree, f"{base}/hits", "0")
    assert read(tree, f"{base}/hits") == "0\n"
    with assert_errno(errno.EINVAL):
        write(tree, f"{base}/nmissed", "5")
    assert read(tree, f"{base}/mode") == "ftrace\n"
    assert "ftrace calls the probe" in read(tree, f"{base}/reason")
    original, current = read(tree, f"{base}/bytes").splitlines()
    assert original.startswith("original ")
    assert current.startswith("current  e8 ")
    with assert_errno(errno.EOPNOTSUPP):
        write(tree, f"{base}/optimized", "1")
    write(tree, f"{base}/enabled", "0")
    assert (read(tree, f"{base}/enabled"), read(tree, f"{base}/mode")) == ("0\n", "disarmed\n")
    with assert_errno(errno.EINVAL):
        write(tree, f"{base}/mode", "int3")


def test_stats_of_several_probes(kernel: Kernel, tree: NodeTree) -> None:
    """For an event with several probes, files in stats/ show the sum of counters, and a line of text for each
    probe.
    """
    write(tree, "/kprobe_events", "p:g gcd\np:g gcd+5\n")
    base = "/kprobes/stats/kprobes/g"
    write(tree, f"{EVENTS}/kprobes/g/enable", "1")
    kernel.call("gcd", 12, 18)
    assert read(tree, f"{base}/hits") == "2\n"
    assert [line.split()[1].split("/")[0] for line in read(tree, f"{base}/address").splitlines()] == [
        "gcd+0x0",
        "gcd+0x5",
    ]
    assert read(tree, f"{base}/mode") == "ftrace\nint3\n"


def test_stats_of_a_pending_probe(tree: NodeTree) -> None:
    write(tree, "/kprobe_events", "p:late kmod:function\n")
    base = "/kprobes/stats/kprobes/late"
    assert [read(tree, f"{base}/{name}") for name in ("hits", "mode", "enabled", "optimized", "address")] == [
        "0\n",
        "pending\n",
        "0\n",
        "0\n",
        "",
    ]
    assert "it may be in a module" in read(tree, f"{base}/reason")


def test_groups_in_stats_have_kprobe_events(tree: NodeTree) -> None:
    write(tree, "/kprobe_events", "p:g/b vfs_mkdir\n")
    assert names(tree, "/kprobes/stats") == ["kprobes", "g"]
    with assert_errno(errno.ENOENT):
        tree.lookup("/kprobes/stats/sched")
    truncate(tree, "/kprobe_events")
    assert names(tree, "/kprobes/stats") == []


def test_stats_of_a_return_probe(kernel: Kernel, tree: NodeTree) -> None:
    write(tree, "/kprobe_events", "r10:back gcd\n")
    base = "/kprobes/stats/kprobes/back"
    files = ("active", "maxactive", "high_water", "memory")
    assert names(tree, base) == [*STATS, *files]
    write(tree, f"{EVENTS}/kprobes/back/enable", "1")
    kernel.call("gcd", 12, 18)
    active, maxactive, high_water, memory = (int(read(tree, f"{base}/{name}")) for name in files)
    assert (active, maxactive, high_water) == (0, 10, 1)
    assert memory > 0


def test_return_hook(kernel: Kernel, tree: NodeTree) -> None:
    path = "/kprobes/return_hook"
    shown = read(tree, path).split()
    used = kernel.kretprobes.hooks.return_hook
    assert [name.strip("[]") for name in shown] == list(SHADOW_STACKS)
    assert f"[{used}]" in shown
    other = next(name for name in shown if name != f"[{used}]")
    write(tree, path, f"{other}\n")
    assert f"[{other}]" in read(tree, path).split()
    with assert_errno(errno.EINVAL):
        write(tree, path, "bogus")
    write(tree, "/kprobe_events", "r:back vfs_read\n")
    with assert_errno(errno.EBUSY):
        write(tree, path, used)


def test_addresses_are_for_the_privileged(kernel: Kernel) -> None:
    tree = kernel.filesystem(owner=Owner(1000, 1000))
    kernel.load_module("counter")
    write(tree, f"{EVENTS}/kprobes/a/enable", "1")
    for path in (
        "/machine/kallsyms",
        "/machine/modules",
        f"{BASE}/address",
        f"{BASE}/detour",
    ):
        shown = {uid: read(tree, path, Client(5, uid, uid)) for uid in (0, 1000, 1001)}
        assert shown[0] == shown[1000]
        assert re.search("ffffffff[0-9a-f]{8}", shown[0])
        assert not re.search("ffffffff[0-9a-f]{8}", shown[1001])
        assert len(shown[1001].splitlines()) == len(shown[0].splitlines())


def test_modules(tree: NodeTree) -> None:
    def loaded() -> list[str]:
        return [line.split()[0] for line in read(tree, "/machine/modules").splitlines()]

    assert loaded() == []
    write(tree, "/machine/modules", "load counter\n\n load ktgt \n")
    assert loaded() == ["ktgt", "counter"]
    with assert_errno(errno.ENOENT):
        write(tree, "/machine/modules", "unload ktgt\nunload three\nunload counter\n")
    assert loaded() == ["counter"]
    for text in (b"load \xff", b"laod x", b"load"):
        with assert_errno(errno.EINVAL):
            write(tree, "/machine/modules", text)


def test_call(tree: NodeTree) -> None:
    write(tree, "/machine/call", "gcd 12 18\ngcd 0x10 24\n")
    assert read(tree, "/machine/call") == "gcd = 0x6 (6)\ngcd = 0x8 (8)\n"
    with assert_errno(errno.ENOENT):
        write(tree, "/machine/call", "gcd 3 6\nnosuch 1\ngcd 1 1\n")
    assert read(tree, "/machine/call") == "gcd = 0x3 (3)\nnosuch: no symbol named nosuch\n"
    for text, number in (
        (b"\xff 1", errno.ENOENT),
        (b"gcd 'x", errno.EINVAL),
        (b"gcd x y", errno.EINVAL),
        (b"gcd 1 2 3 4 5 6 7", errno.E2BIG),
        (f"gcd {1 << 64} 1".encode(), errno.ERANGE),
    ):
        with assert_errno(number):
            write(tree, "/machine/call", text)
    write(tree, "/machine/call", b'strlen "\xc3\xbc\xff"\n')
    assert read(tree, "/machine/call") == "strlen = 0x3 (3)\n"
    with assert_errno(errno.ENOENT):
        write(tree, "/machine/call", b"\xc3\xbc\xff")
    assert read(tree, "/machine/call") == "\u00fc\udcff: no symbol named \u00fc\udcff\n"
    assert read(tree, "/machine/version").startswith("Linux version")


def test_what_the_machine_tells_of_itself(tree: NodeTree) -> None:
    assert read(tree, "/machine/version").splitlines()[1] == "profile linux-6.1"
    assert re.match(r"\[ +\d+\.\d{6}\] ", read(tree, "/machine/dmesg"))
    assert read(tree, "/machine/tasks").splitlines()[0].split() == ["PID", "PPID", "UID", "STATE", "COMM"]
    assert "swapper/0" in read(tree, "/machine/tasks")
    assert len(read(tree, "/machine/cpus").splitlines()) == 3
    assert read(tree, "/machine/meminfo").startswith("MemTotal: ")
    assert read(tree, "/machine/clock").startswith("mode virtual\nseed ")
    assert read(tree, "/machine/load") == ""
    for path in (
        "/machine/clock",
        "/machine/load",
        "/machine/limits",
        "/machine/modules",
        "/kprobes/return_hook",
        "/kprobes/stages",
    ):
        with assert_errno(errno.EINVAL):
            write(tree, path, "bogus")
        assert f" {path.rpartition('/')[2]}: " in read(tree, "/machine/dmesg").splitlines()[-1]


@pytest.mark.parametrize("seed", ["-1", str(1 << 63), "9" * 30, "1_0", "0b1", "٣", "", "x"])
def test_seeds_are_those_of_the_command_line(tree: NodeTree, seed: str) -> None:
    before = read(tree, "/machine/clock").splitlines()[1]
    with assert_errno(errno.EINVAL):
        write(tree, "/machine/clock", f"seed {seed}")
    for good in ("0", str((1 << 63) - 1), "0x10"):
        write(tree, "/machine/clock", f"seed {good}")
        assert read(tree, "/machine/clock").splitlines()[1] == f"seed {int(good, 0)}" != before


def test_a_damaged_task_list_is_shown_as_far_as_it_leads(kernel: Kernel, tree: NodeTree) -> None:
    whole = read(tree, "/machine/tasks")
    first = kernel.image.kallsyms.lookup_name("init_task")
    assert first is not None
    link = first + kernel.image.abi["task_struct.tasks"]
    kernel.machine.memory.write(link, (0x1000).to_bytes(8, "little"))
    shown = read(tree, "/machine/tasks").splitlines()
    assert 0 < len(shown) < len(whole.splitlines())
    assert set(shown) <= set(whole.splitlines())


# Texts that Linux's selftests require in README, and glob patterns that perf-probe searches for there.
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
def test_readme_names_features(unchanged: NodeTree, feature: str) -> None:
    assert feature in read(unchanged, "/tracing/README")
    assert feature in oracle.oracle_path("samples/README.tracefs").read_text()


def test_readme_names_every_file(unchanged: NodeTree) -> None:
    text = read(unchanged, "/tracing/README")
    for name in names(unchanged, "/tracing"):
        assert name in text or name == "README"


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_the_version_says_whether_the_kernel_is_preempted(profile: Profile) -> None:
    with Kernel(MachineConfig(arch="i386"), profile=profile) as kernel:
        banner, name = read(kernel.filesystem(), "/machine/version").splitlines()
    assert name == f"profile {profile.name}"
    assert banner.endswith("#1 PREEMPT") is profile.preemption
    assert ("PREEMPT" in banner) is profile.preemption


@pytest.mark.parametrize("stack", RETURN_HOOKS)
def test_memory_of_return_probes(stack: str) -> None:
    """The file `memory` shows the memory of the event's hooks and the memory that all hooks share. The sum is
    never 0.
    """
    with Kernel(profile=Profile("returns", return_hook=stack)) as kernel:
        tree = kernel.filesystem()
        write(tree, "/kprobe_events", "r:g gcd\nr:g lcm\np:h gcd\n")
        write(tree, f"{EVENTS}/kprobes/g/enable", "1")
        own = [rp.hook.memory for rp in kernel.kprobes if isinstance(rp, Kretprobe) and rp.hook is not None]
        shared = kernel.kretprobes.hooks.stack.shared_memory
        memory = int(read(tree, "/kprobes/stats/kprobes/g/memory"))
        assert memory == sum(own) + shared > 0
