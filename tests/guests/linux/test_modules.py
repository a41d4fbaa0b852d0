"""Modules that Debian's kernel loads, with kprobefs's kprobes: their symbols, probes, events and
unloading.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import FrameType

import pytest

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.architectures import linux_arch
from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.initramfs import DEBUGFS, PROC, TRACEFS
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.guests.linux.probing.kernel_tracepoints import REPLACED_FUNCTIONS
from emulated_kernel.guests.linux.probing.probe_engine import KernelEngine, LinuxEngine
from emulated_kernel.guests.linux.probing.unwinder_answers import ANSWERED_FUNCTIONS, return_place
from emulated_kernel.guests.linux.vmcore.vmcore_guest import ensure_core_cached, started_core
from emulated_kernel.guests.linux.vmcore.vmcore_mount import vmcore_mount
from emulated_kernel.image.linux.linked_module import link_modules
from emulated_kernel.image.linux.linux_kernel import ReturnThunks
from emulated_kernel.image.live_image import LiveImage
from emulated_kernel.kprobes.return_hook.hook_sets import return_place_size
from emulated_kernel.trace.events.static_event import StaticEvent
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError, UnusableFile
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount
from kprobefs.measure.coverage_subject import Subject
from kprobefs.measure.verdicts import Judge
from kprobefs.plan.planned_kernel import planned_kernel
from tests import own_thread
from tests.guests.linux import core_dump, debian_kernel
from tests.guests.linux.files import Files
from tests.guests.linux.parts import calls_of, guest_of
from tests.image.linux import debian
from tests.ledger import ledger_mismatches
from tests.sample import fewer, share

CLIENT = Client(4242, 0, 0)
TAKEN = (*REPLACED_FUNCTIONS, *ANSWERED_FUNCTIONS)
"""Kernel functions whose first instruction the engine may replace, and on which there are no probes."""
SUITES = ("", "trixie")
"""Suites of the kernels. A module of the first kernel has two pieces of memory (up to Linux 6.3).

A module of the second kernel has seven.
"""
NLS = "nls_cp437"
CALL = f'{NLS}:uni2char 65 "....." 5'
EVENTS = "/tracing/events/kprobes"
OF_A_MODULE = re.compile(r"\[\w+\]$", re.MULTILINE)
NO_MODULE = re.compile(r"\[(?:bpf|__builtin__\w+)\]$")


EACH, SOME = (
    pytest.mark.parametrize("mount", suites, indirect=True, scope="module")
    for suites in (SUITES, share(SUITES, 0, 2))
)


@pytest.fixture(scope="module")
def mount(request: pytest.FixtureRequest) -> Iterator[Mount]:
    suite = request.param
    engine = LinuxEngine(*debian_kernel.with_kernel(suite=suite))
    modules = debian_kernel.modules(engine.tasks.release, suite=suite)
    made = probed_mount(engine, ProcessWatch(), Owner(0, 0), modules, is_tracefs=False)
    yield made
    made.close()


@pytest.fixture
def engine(mount: Mount) -> LinuxEngine:
    return calls_of(mount).engine


@pytest.fixture
def shell(mount: Mount, engine: LinuxEngine) -> Iterator[Files]:
    """Yield the mount's files.

    Afterwards remove probes and modules, and assert that the kernel's text is the original.
    """
    shell = Files(mount, CLIENT)
    yield shell
    shell.write("/tracing/events/enable", "0")
    shell.write("/tracing/current_tracer", "nop")
    for path in ("/kprobe_events", "/tracing/trace"):
        shell.write(path, "\n", os.O_WRONLY | os.O_TRUNC)
    loaded = [line.split()[0] for line in shell.read("/machine/modules").splitlines()]
    for name in loaded:
        shell.write("/machine/modules", f"unload {name}\n")
    taken = set(map(engine.kernel.kallsyms.lookup_name, TAKEN))
    arch = linux_arch(engine.kernel.architecture)
    for place in return_place(engine.kernel, arch).values():
        taken |= {*range(place, place + return_place_size(arch))}
    assert taken.issuperset(ledger_mismatches(engine.machine.text))
    assert engine.live.text_ranges == engine.kernel.text_ranges
    assert not re.search("BUG|WARN|Oops|cut here", shell.read("/machine/dmesg"))


def guests(shell: Files, path: str) -> list[str]:
    """Return the lines of the file `path` in the tracefs or procfs of the guest's kernel."""
    return guest_of(shell.mount).syscalls.read_all(path).decode().splitlines()


def of_modules(lines: list[str]) -> list[str]:
    return [line for line in lines if OF_A_MODULE.search(line) and not NO_MODULE.search(line)]


@EACH
def test_the_kernel_says_the_same(shell: Files) -> None:
    """kprobefs shows the same symbols, blacklist and traceable functions of modules as the kernel."""
    shell.write("/machine/modules", "load dm-zero\n")
    symbols = of_modules(guests(shell, f"{PROC}/kallsyms"))
    assert len(symbols) > 700
    assert of_modules(shell.read("/machine/kallsyms").splitlines()) == symbols
    functions = of_modules(guests(shell, f"{TRACEFS}/available_filter_functions"))
    assert len(functions) > 300
    ours = of_modules(shell.read("/tracing/available_filter_functions").splitlines())
    assert sorted(ours) == sorted(functions)
    lists = guests(shell, f"{DEBUGFS}/kprobes/blacklist"), shell.read("/kprobes/blacklist").splitlines()
    forbidden, told = ({line for line in lines if line.split()[1] not in TAKEN} for lines in lists)
    assert told == forbidden
    stranger = Files(shell.mount, Client(4243, 1000, 1000)).read("/machine/kallsyms")
    assert {line.split()[0] for line in of_modules(stranger.splitlines())} == {"0" * 16}


def optimizable(engine: LinuxEngine, function: str) -> int:
    """Return the first offset in a function at which a probe can be optimized."""
    (symbol,) = engine.live.kallsyms.by_name(function)
    verdict = engine.kprobes.probe_checker
    found = (
        at
        for at, refused, region in verdict.check_each_insn(symbol)
        if not refused and isinstance(region, Region)
    )
    return next(found) - symbol.address


@EACH
def test_functions_are_called_and_probed(shell: Files, engine: LinuxEngine) -> None:
    assert shell.call(CALL).startswith("ENOENT")
    shell.write("/machine/modules", f"load {NLS}\n")
    assert shell.call(CALL) == f"{NLS}:uni2char = 0x1 (1)\n"
    offset = optimizable(engine, f"{NLS}:uni2char")
    places = {
        "p:entered": "uni2char code=%di",
        "r:left": "uni2char result=$retval:s32",
        "p:within": f"uni2char+{offset}",
    }
    for event, place in places.items():
        shell.write("/kprobe_events", f"{event} {NLS}:{place}", os.O_WRONLY | os.O_APPEND)
    shell.write(f"{EVENTS}/enable", "1")
    shell.write(f"{EVENTS}/within/trigger", "stacktrace\n")
    guest_of(shell.mount).tasks.idle(1_000_000)
    for _ in range(3):
        assert shell.call(CALL) == f"{NLS}:uni2char = 0x1 (1)\n"
    shell.write(f"{EVENTS}/within/trigger", "!stacktrace\n")
    listed, text = shell.read("/kprobes/list"), shell.read("/tracing/trace")
    assert re.search(rf"  k  uni2char\+0x[04]  {NLS} \[FTRACE\]$", listed, re.MULTILINE), listed
    assert re.search(rf"  k  uni2char\+{offset:#x}  {NLS} \[OPTIMIZED\]$", listed, re.MULTILINE), listed
    entered = rf"entered: \(uni2char\+0x[04]/0x\w+ \[{NLS}\]\) code=0x41$"
    assert len(re.findall(entered, text, re.MULTILINE)) == 3, text
    assert len(re.findall(r"left: \(.+ <- uni2char\) result=1$", text, re.MULTILINE)) == 3, text
    assert text.count(" => uni2char\n") == 3, text
    profile = sorted(line.split() for line in shell.read("/kprobe_profile").splitlines())
    assert profile == [["entered", "3", "0"], ["left", "3", "0"], ["within", "3", "0"]]
    assert shell.errno("/kprobe_events", f"p:no {NLS}:uni2char+{offset + 1}") == errno.EILSEQ
    assert shell.errno("/kprobe_events", f"p:no {NLS}:no_such") == errno.ENOENT


@SOME
def test_definitions_wait_and_probes_go(shell: Files) -> None:
    """Probes on a module that is not loaded hit from its init function on, and vanish and return with the
    module.
    """
    definitions = f"p:init {NLS}:init_nls_{NLS.removeprefix('nls_')}\np:body {NLS}:uni2char+11\n"
    shell.write("/kprobe_events", definitions)
    assert shell.read("/kprobes/list") == ""
    shell.write("/tracing/set_ftrace_filter", f"*2char:mod:{NLS}")
    assert shell.read("/tracing/set_ftrace_filter") == f"*2char:mod:{NLS}\n"
    shell.write("/tracing/current_tracer", "function")
    for turn in range(1, 3):
        shell.write("/machine/modules", f"load {NLS}\n")
        if turn == 1:
            shell.write(f"{EVENTS}/enable", "1")
        assert shell.call(CALL) == f"{NLS}:uni2char = 0x1 (1)\n"
        init, body = sorted(shell.read("/kprobes/list").splitlines(), key=lambda line: "uni2char" in line)
        assert init.endswith("[GONE][FTRACE]")
        assert f"uni2char+0xb  {NLS}" in body
        text = shell.read("/tracing/trace")
        assert text.count("body: (uni2char+0xb") == text.count(": uni2char <-") == turn, text
        assert shell.read("/tracing/set_ftrace_filter") == f"uni2char [{NLS}]\n"
        # The probe of the init function was hit when the module was loaded again.
        assert text.count("init: (") == turn - 1
        shell.write("/machine/modules", f"unload {NLS}\n")
        lines = shell.read("/kprobes/list").splitlines()
        assert len(lines) == 2
        assert all("[GONE]" in line for line in lines)
        assert shell.call(CALL).startswith("ENOENT")
        shell.write("/tracing/set_ftrace_filter", f"*2char:mod:{NLS}", os.O_WRONLY | os.O_TRUNC)
    shell.write("/tracing/current_tracer", "nop")
    shell.write("/tracing/set_ftrace_filter", "\n", os.O_WRONLY | os.O_TRUNC)


@SOME
def test_one_whose_init_fails(shell: Files) -> None:
    """A module whose init function fails, because the CPU lacks an instruction, leaves no symbols and no
    probe.
    """
    shell.write("/kprobe_events", "p:begins crc32c_intel:crc32c_intel_mod_init\n")
    with pytest.raises(KernelError) as refused:
        shell.write("/machine/modules", "load crc32c-intel\n")
    assert refused.value.errno == errno.ENODEV
    assert not of_modules(shell.read("/machine/kallsyms").splitlines())
    (line,) = shell.read("/kprobes/list").splitlines()
    assert "[GONE]" in line


@SOME
def test_one_whose_init_measures_how_fast_it_is(shell: Files) -> None:
    """An init function that loops until the next tick gets this tick, although the CPU halts nowhere."""
    said = []
    for name in ("raid6_pq", "xor") * 2:
        shell.write("/machine/modules", f"load {name}\n")
        said.append(shell.read("/machine/dmesg").splitlines()[-1])
        shell.write("/machine/modules", f"unload {name}\n")
    assert [line.split("] ")[1].split()[0] for line in said] == ["raid6:", "xor:"] * 2
    assert re.search(r"raid6: using algorithm sse2x4 gen\(\) [1-9]\d* MB/s", shell.read("/machine/dmesg"))


@SOME
def test_its_code_needs_no_python_after_its_load(shell: Files) -> None:
    """Code of a module runs without a Python callback for each new block of code.

    Such callbacks occur only while a module is loaded or unloaded.
    """
    counted = LinuxMachine._count.__code__
    entries = 0

    def note(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal entries
        entries += event == "call" and frame.f_code is counted

    for _ in range(2):
        found = []
        for work in (
            lambda: shell.write("/machine/modules", f"load {NLS}\n"),
            lambda: [shell.call(CALL) for _ in range(3)],
            lambda: shell.write("/machine/modules", f"unload {NLS}\n"),
        ):
            entries = 0
            sys.setprofile(note)
            try:
                work()
            finally:
                sys.setprofile(None)
            found.append(entries > 0)
        assert found == [True, False, True]


@SOME
def test_others_at_its_address(shell: Files) -> None:
    """A module at the address of an unloaded module has no patches and no hits of the unloaded module."""
    for number in range(6):
        name = (NLS, "nls_cp850", "nls_ascii")[number % 3]
        shell.write("/machine/modules", f"load {name}\n")
        shell.write("/kprobe_events", f"p:h{number} {name}:uni2char+11\n", os.O_WRONLY | os.O_APPEND)
        shell.write(f"{EVENTS}/h{number}/enable", "1")
        assert shell.call(f'{name}:uni2char 65 "....." 5').endswith(" = 0x1 (1)\n")
        shell.write("/machine/modules", f"unload {name}\n")
    hits = dict(line.split()[:2] for line in shell.read("/kprobe_profile").splitlines())
    # The first three were armed again when their modules came again.
    assert hits == {f"h{number}": "2" if number < 3 else "1" for number in range(6)}


@SOME
def test_branches_of_the_kernels_keys(shell: Files, engine: LinuxEngine) -> None:
    """Code of a module for a tracepoint of the kernel is switched with the event, also if the event is
    enabled first.
    """
    enable = "/tracing/events/xdp/xdp_exception/enable"

    def changed() -> set[int]:
        module = engine.live.find("veth")
        assert module is not None
        return {label.code for label in module.jump_labels if label.code in engine.machine.text.ledger}

    shell.write(enable, "1")
    shell.write("/machine/modules", "load veth\n")
    there = changed()
    assert len(there) > 1
    shell.write(enable, "0")
    assert not changed()
    shell.write(enable, "1")
    assert changed() == there
    shell.write("/machine/modules", "unload veth\n")
    shell.write(enable, "0")


@pytest.fixture
def linux(request: pytest.FixtureRequest) -> Iterator[Files]:
    """Yield the files of a mount that shows the same kernel's own tracefs."""
    native = debian_kernel.mount(suite=request.node.callspec.params["mount"])
    yield Files(native, CLIENT)
    native.close()


CACHES = "/tracing/events/sunrpc"
UPDATE = f"{CACHES}/cache_entry_update"
WHO_AND_WHEN = re.compile(r"^.*?-(?=\d+ )| +\d+\.\d{6}:|entry=\S+$|^ID: \d+$", re.MULTILINE)
"""Pattern of what may differ: tasks, times, IDs of events, and hashed addresses."""


def update(shell: Files, domain: str) -> None:
    """Write an entry for `domain` to sunrpc's cache auth.unix.ip, as rpc.mountd does."""
    syscalls, init = guest_of(shell.mount).syscalls, guest_of(shell.mount).tasks.init
    channel = syscalls.open(init, f"{PROC}/net/rpc/auth.unix.ip/channel", os.O_RDWR)
    syscalls.write(init, channel, f"nfsd 127.0.0.1 9999999999 {domain}\n".encode(), None)
    syscalls.close(init, channel)


def try_unload(shell: Files, name: str) -> tuple[int | None, list[str]]:
    """Unload a module. Return the errno or None, and the modules that are loaded afterwards."""
    try:
        shell.write("/machine/modules", f"unload {name}\n")
        number = None
    except KernelError as error:
        number = error.errno
    return number, [" ".join(line.split()[:3]) for line in shell.read("/machine/modules").splitlines()]


def told(shell: Files, path: str) -> list[str]:
    return [WHO_AND_WHEN.sub("", line) for line in shell.read(path).splitlines() if line[:1] != "#"]


def events_come_and_go(shell: Files) -> dict[str, object]:
    """Load sunrpc, use its events, and unload sunrpc.

    Return what files show, which must be the same for both engines.
    """
    seen: dict[str, object] = {}

    def of_sunrpc(path: str) -> list[str]:
        return [line for line in shell.read(path).splitlines() if line.startswith("sunrpc:")]

    assert shell.errno("/tracing/set_event", "sunrpc:*\n") == errno.EINVAL
    shell.write("/machine/modules", "load sunrpc\n")
    names = seen["events"] = of_sunrpc("/tracing/available_events")
    seen["formats"] = [
        told(shell, f"/tracing/events/{name.replace(':', '/')}/format") for name in share(names, 1, 6)
    ]
    shell.write(f"{UPDATE}/enable", "1")
    shell.write(f"{UPDATE}/filter", 'name ~ "*.ip"')
    shell.write(f"{UPDATE}/trigger", "hist:keys=name\n")
    update(shell, "someone")
    seen["trace"] = told(shell, "/tracing/trace")
    seen["hist"] = told(shell, f"{UPDATE}/hist")
    seen["refused"] = shell.errno(f"{UPDATE}/filter", "no_such == 1")
    shell.write(f"{UPDATE}/filter", 'name == "other"')
    update(shell, "someone")
    assert told(shell, "/tracing/trace") == seen["trace"]
    shell.write(f"{UPDATE}/trigger", "!hist:keys=name\n")
    # A trigger that switches the event keeps the module.
    switch = "enable_event:sunrpc:cache_entry_update"
    shell.write("/tracing/events/sched/sched_switch/trigger", f"{switch}\n")
    shell.write("/tracing/set_ftrace_filter", f"vfs_statx:{switch}\n", os.O_WRONLY | os.O_APPEND)
    seen["held"] = try_unload(shell, "sunrpc")
    shell.write("/tracing/events/sched/sched_switch/trigger", f"!{switch}\n")
    seen["held by one"] = try_unload(shell, "sunrpc")
    shell.write("/tracing/set_ftrace_filter", f"!vfs_statx:{switch}\n", os.O_WRONLY | os.O_APPEND)
    seen["set_event"] = of_sunrpc("/tracing/set_event")
    opened = shell.mount.open(CLIENT, f"{UPDATE}/enable", os.O_RDONLY)
    seen["unloaded"] = try_unload(shell, "sunrpc")
    with pytest.raises(KernelError) as gone:
        shell.mount.read(CLIENT, opened, 100, 0)
    shell.mount.release(opened)
    with pytest.raises(KernelError) as absent:
        shell.read(f"{UPDATE}/enable")
    seen["gone"] = gone.value.errno, absent.value.errno
    seen["left"] = told(shell, "/tracing/trace"), of_sunrpc("/tracing/available_events")
    return seen


@SOME
def test_its_events_come_and_go(shell: Files, linux: Files) -> None:
    """Events of a module come and go with the module as in the kernel's own tracefs."""
    ours, native = events_come_and_go(shell), events_come_and_go(linux)
    assert ours == native
    assert len(native["trace"]) == 1
    assert native["unloaded"] == (None, [])
    # An unload with triggers leaves nothing. The kernel checks the tracepoints of a module that it unloads.
    shell.write("/machine/modules", "load sunrpc\n")
    assert (shell.read(f"{UPDATE}/enable"), shell.read(f"{UPDATE}/filter")) == ("0\n", "none\n")
    shell.write("/tracing/events/sunrpc/enable", "1")
    for trigger in ("stacktrace", "traceoff:1 if h == 0", "hist:keys=name"):
        shell.write(f"{UPDATE}/trigger", f"{trigger}\n")
    assert try_unload(shell, "sunrpc") == (None, [])
    with pytest.raises(KernelError):
        shell.read(f"{UPDATE}/trigger")


@SOME
def test_histograms_that_refer_to_its_events(shell: Files) -> None:
    """Histograms that refer to an unloaded module's events stay, and can be removed. No new histogram uses
    their variables.

    Linux: such a histogram refers to freed memory, and its removal ends in an oops.
    """
    switch = "/tracing/events/sched/sched_switch/trigger"
    variable = "hist:keys=common_pid:began=common_timestamp.usecs"
    refers = "hist:keys=common_pid:took=common_timestamp.usecs-$began"
    action = ":onmatch(sunrpc.cache_entry_update).late($took,name)"
    shell.write("/tracing/synthetic_events", "late u64 took; char name[]\n")
    for _ in range(2):
        shell.write("/machine/modules", "load sunrpc\n")
        assert shell.read(f"{UPDATE}/trigger").startswith("# Available")
        shell.write(f"{UPDATE}/trigger", f"{variable}\n")
        update(shell, "someone")
        shell.write(switch, f"{refers}{action}\n")
        assert try_unload(shell, "sunrpc") == (None, [])
        guest_of(shell.mount).tasks.idle(10_000)
        assert "onmatch(sunrpc.cache_entry_update)" in shell.read(switch)
        assert shell.errno(switch, f"{refers}:other=common_cpu\n") == errno.EINVAL
        shell.mount.release(shell.mount.open(CLIENT, switch, os.O_WRONLY | os.O_TRUNC))
        assert "hist:" not in shell.read(switch)
    shell.write("/tracing/synthetic_events", "!late u64 took; char name[]\n", os.O_WRONLY | os.O_APPEND)


@SOME
def test_formats_name_enumerators_of_the_module(shell: Files, engine: LinuxEngine) -> None:
    """The formats of a module's events contain enumerators, which are known only from the types of the
    module.
    """
    name = "fscache" if engine.kernel.release.startswith("6.1.") else "netfs"
    shell.write("/machine/modules", f"load {name}\n")
    event = engine.components.tracing.system.events.find("fscache", "fscache_active")
    assert isinstance(event, StaticEvent)
    assert "{ fscache_active_use, " in event.print_fmt
    # _print() raises ValueError for an unknown name.
    vars(StaticEvent)["_print"].func(event)


@pytest.mark.parametrize("suite", share(("", "trixie", "sid"), 2, 3))
def test_modules_of_a_dump(suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of a dump's kernel and of its modules can be called and probed as soon as the dump is
    mounted.

    In newer kernels, per-CPU variables are linked into the image, and the flags of tasks are renumbered.
    The mount itself takes the control lock wherever a method needs the lock, as outside of tests.
    """
    running = debian_kernel.mount(suite=suite)
    flag = guest_of(running).tasks.need_resched
    files = Files(running, CLIENT)
    files.write("/machine/modules", f"load {NLS}\n")
    known = of_modules(files.read("/machine/kallsyms").splitlines())
    core_dump.dump_of(guest_of(running).tasks, tmp_path / "core", has_info=True)
    running.close()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ensure_core_cached(str(tmp_path / "core"))
    guest, kernel = started_core(str(tmp_path / "core"))
    with monkeypatch.context() as strict:
        strict.setattr(ControlLock, "assert_held", own_thread.assert_held)
        core = vmcore_mount(guest, KernelEngine(guest, kernel), Owner(0, 0), is_tracefs=False)
    dump = Files(core, CLIENT)
    try:
        assert guest.need_resched == flag
        assert of_modules(dump.read("/machine/kallsyms").splitlines()) == known
        dump.write("/kprobe_events", f"p:body {NLS}:uni2char+11\np:called int_sqrt x=%di:u64\n")
        dump.write(f"{EVENTS}/enable", "1")
        assert dump.call(CALL) == f"{NLS}:uni2char = 0x1 (1)\n"
        assert dump.call("int_sqrt 144") == "int_sqrt = 0xc (12)\n"
        profile = sorted(line.split() for line in dump.read("/kprobe_profile").splitlines())
        assert profile == [["body", "1", "0"], ["called", "1", "0"]]
        assert re.search(r" called: \(int_sqrt\+0x[04]/0x\w+\) x=144\n", dump.read("/tracing/trace"))
        assert f"uni2char [{NLS}]\n" in dump.read("/tracing/available_filter_functions")
        assert dump.read("/files/scratch/dir/note") == core_dump.TEXT
        assert kernel.release in dump.read("/machine/dmesg")
    finally:
        core.close()


@pytest.mark.parametrize("module", share([NLS, "tcp_bbr", "nf_conntrack"], 1, 3))
@SOME
def test_a_module_linked_offline_has_the_verdicts_of_the_loaded_one(
    shell: Files, engine: LinuxEngine, module: str, request: pytest.FixtureRequest
) -> None:
    """For at least 19 of 20 functions of a module, verdicts from its file equal those of the loaded module.

    The others differ because of alternatives, which the kernel patches at the load.
    """
    suite = request.node.callspec.params["mount"]
    package = debian.package(debian.META_PACKAGES[0], suite)
    planned = planned_kernel(None, str(package), None, None).with_modules([module])
    shell.write("/machine/modules", f"load {module}\n")
    live = engine.live.find(module)
    assert live is not None
    running = Judge(Subject("", "x86_64", engine.live), planned.profile)
    offline = planned.whole.judge
    names = Counter(symbol.name for symbol in live.symbols)
    same = different = 0
    for symbol in live.symbols:
        if not symbol.size or symbol.address not in range(*live.text) or names[symbol.name] > 1:
            continue
        (linked,) = planned.tables.kallsyms.by_name(f"{module}:{symbol.name}")
        found, wanted = (
            {addr - each.address: verdict.outcome for addr, verdict in judge.verdicts(each).items()}
            for judge, each in ((offline, linked), (running, symbol))
        )
        if found == wanted:
            same += 1
        else:
            different += 1
    assert same > 3
    assert different <= same / 20


@SOME
def test_damaged_modules_are_refused_or_linked(engine: LinuxEngine, request: pytest.FixtureRequest) -> None:
    suite = request.node.callspec.params["mount"]
    ((name, data),) = debian_kernel.modules(engine.tasks.release, suite=suite).read(NLS)
    rng = Random(4)
    outcomes = Counter[str]()
    for _ in range(fewer(600, 4)):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 3, 20))):
            # The section headers are at the end.
            at = len(data) - rng.randrange(4096) if rng.random() < 0.6 else rng.randrange(len(data))
            damaged[at - 1] = rng.choice((0, 255, rng.randrange(256)))
        try:
            (linked,) = link_modules(engine.kernel, [(name, bytes(damaged))])
        except UnusableFile:
            outcomes["refused"] += 1
        else:
            LiveImage(engine.kernel).put(linked.booted(ReturnThunks.PLAIN))
            outcomes["linked"] += 1
    assert min(outcomes.values()) > 5
