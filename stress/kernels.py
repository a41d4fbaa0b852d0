"""Check kernels of distributions, with both engines: python -m stress.kernels [--write FILE] IMAGE...

Each check uses the mount like a client. The result is a table with the checks that pass, and the durations of
starts. With --inside N, the answers of the kernel's own kprobes and of kprobefs over the kernel are compared,
too. The questions are N random definitions, N places of probes, N / 2 filters, 3 N / 10 histograms and the
records of a workload. With --selftests FILE, the table also has the results of Linux's own tests that
`python -m stress.kernel_selftests` has kept in FILE. An IMAGE is a file for `--image`; further packages with
its modules may be next to it.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from errno import EINVAL, ENOENT
from pathlib import Path
from time import perf_counter

import tests.own_thread  # noqa: F401 - for kernels in this process
from emulated_kernel.arch.analysis.probe_rules import probe_rules_named
from emulated_kernel.arch.architectures import arch_named
from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.boot_cache import ensure_cached, started_with_kernel
from emulated_kernel.guests.linux.mounts.native_mount import native_mount
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.probing.detect_interface import interface_with, profile_of
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.module_files import ModuleFiles
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount
from stress.kernel_selftests import Selftests
from tests.oracle.inside.definitions import compare_definitions
from tests.oracle.inside.filters import compare_filters
from tests.oracle.inside.histograms import compare_histograms
from tests.oracle.inside.places import compare_places, kernel_places, refused_sites, refuses_entries
from tests.oracle.inside.records import compare_records, recorded_definitions
from tests.oracle.inside.tally import Tally

SEED = 1
CLIENT = Client(4001, 0, 0)
OTHER = Client(4002, 0, 0)
ENGINES = ("kernel", "kprobefs")
TEXT = "hello, kernel"
FILE = "/scratch/checked"
EVENTS = "/tracing/events"
MODULES = ("dummy", "nls_cp437", "nls_utf8")
"""Names of small modules outside of lib/, because functions of lib/ cannot be traced.

Each kernel has at least one of the modules.
"""
REQUESTS = 400
"""Maximum number of requests after which a probe must have become a jump."""
TROUBLE = re.compile(r"\b(?:BUG|Oops|WARNING|Call Trace|general protection fault)\b")
COLUMNS = (
    "kernel", "way of probing", "checks", "failed", "not possible", "differences", "selftests",
    "selftests that fail", "first boot", "start", "date",
)  # fmt: skip
HEAD = f"| {' | '.join(COLUMNS)} |"
RULE = f"| {' | '.join('---' for _ in COLUMNS)} |"
MEASURED = {
    "differences": ("differences",),
    "selftests": ("selftests", "selftests that fail"),
    "first boot": ("first boot",),
}
"""First column of a measurement -> all columns of the measurement.

If a run leaves the first column empty, it has not made the measurement, and the table keeps the former values
of all these columns.
"""
_CACHED = 1.0
"""A kernel that starts in fewer seconds has booted before."""
EXAMPLES = 5
"""Maximum number of differences that are printed for each kernel."""
DATE = datetime.now(UTC).strftime("%Y-%m-%d")


class NotBuilt(Exception):
    """Exception of a check that cannot be made.

    The kernel was built without the feature, or the file is not on this machine.
    """


class CheckFailed(Exception):
    """Exception of a check whose kernel answers wrongly; the text describes the answer."""


@dataclass
class Checked:
    """A mounted kernel, and the objects that its checks use."""

    mount: Mount
    kernel: LinuxKernel
    is_native: bool

    def read(self, path: str) -> str:
        """Return a whole file's text."""
        handle = self.mount.open(CLIENT, path, os.O_RDONLY)
        text = b""
        try:
            while piece := self.mount.read(CLIENT, handle, 1 << 17, len(text)):
                text += piece
        finally:
            self.mount.release(handle)
        return text.decode("utf-8", "replace")

    def write(self, path: str, text: str, flags: int = os.O_WRONLY) -> None:
        """Write a text to a file in one piece. Raises: KernelError."""
        handle = self.mount.open(CLIENT, path, flags)
        try:
            self.mount.write(CLIENT, handle, text.encode(), 0)
        finally:
            self.mount.release(handle)

    def register(self, number: int) -> str:
        """Return %NAME of the register that passes argument `number` to a function. The first one is 0."""
        return f"%{arch_named(self.kernel.architecture).registers.arguments[number]}"

    def define(self, *definitions: str) -> None:
        """Replace all events of probes, enable the new ones, and empty the trace."""
        self.disable()
        self.write("/kprobe_events", "\n", os.O_WRONLY | os.O_TRUNC)
        for definition in definitions:
            self.write("/kprobe_events", f"{definition}\n", os.O_WRONLY | os.O_APPEND)
        if definitions:
            self.write(f"{EVENTS}/kprobes/enable", "1")
        self.clear()

    def can_probe_entries(self) -> bool:
        """Return False if the kernel refuses probes at function entries, as that of 6.12 for riscv64 does.

        Such a kernel makes no records of other probes either.
        """
        try:
            self.define("p:kprobes/entry do_sys_openat2")
        except KernelError as error:
            return error.errno != EINVAL
        self.define()
        return True

    def needs_tracer(self, name: str) -> None:
        """Raise NotBuilt if the kernel, or its profile, lacks the tracer `name`."""
        if name not in self.read("/tracing/available_tracers").split():
            raise NotBuilt

    def disable(self) -> None:
        """Disable the events of probes, if there are any."""
        with suppress(KernelError):
            self.write(f"{EVENTS}/kprobes/enable", "0")

    def clear(self) -> None:
        """Empty the trace."""
        self.write("/tracing/trace", "\n", os.O_WRONLY | os.O_TRUNC)

    def work(self) -> None:
        """Write and read a file in scratch/."""
        handle = self.mount.create(CLIENT, FILE, 0o644, os.O_RDWR)
        self.mount.write(CLIENT, handle, TEXT.encode(), 0)
        self.mount.release(handle)
        found = self.read(FILE)
        if found != TEXT:
            raise CheckFailed(f"the file contains {found!r}")

    def hits(self, pattern: str) -> list[re.Match[str]]:
        """Disable the probes, and return the matches of `pattern` in the trace.

        Raises: CheckFailed (no line matches).
        """
        # A probe on a function of reads would record while the trace is read.
        self.disable()
        text = self.read("/tracing/trace")
        found = list(re.finditer(pattern, text, re.MULTILINE))
        if not found:
            lines = [line for line in text.splitlines() if not line.startswith("#")]
            raise CheckFailed(f"no record {pattern!r}; the trace has {len(lines)}: {lines[:1]}")
        return found


def _equal(found: object, wanted: object) -> None:
    if found != wanted:
        raise CheckFailed(f"{found!r} in place of {wanted!r}")


def _inside(checked: Checked, function: str) -> list[int]:
    """Return the offsets of a function's instructions from the third one on."""
    start = checked.kernel.kallsyms.lookup_name(function)
    found = None if start is None else checked.kernel.kallsyms.lookup(start)
    if start is None or found is None:
        raise CheckFailed(f"no function {function}")
    code = checked.kernel.read(start, found.symbol.size)
    boundaries = arch_named(checked.kernel.architecture).instruction_boundaries(code, start)
    return [address - start for address in boundaries][2:]


def scratch(checked: Checked) -> None:
    """Check that a file in scratch/ contains the text that was written to it."""
    checked.work()


def arguments(checked: Checked) -> None:
    """Check that a probe at an entry fetches a register, an argument and the task's name."""
    how = checked.register(2)
    checked.define(f"p:kprobes/opened do_sys_openat2 flags=+0({how}):x64 dfd=$arg1:s32 who=$comm")
    checked.work()
    for hit in checked.hits(r" opened: \(do_sys_openat2\+0x[04]/0x\w+\) flags=(\w+) dfd=(\S+) who=(.*)"):
        if not re.fullmatch(r"0x[0-9a-f]+", hit[1]) or not re.fullmatch(r"-?\d+", hit[2]):
            raise CheckFailed(hit[0])


def string(checked: Checked) -> None:
    """Check that a probe fetches a string of user memory."""
    checked.define(f"p:kprobes/named do_sys_openat2 name=+0({checked.register(1)}):ustring")
    checked.work()
    checked.hits(r' named: .* name=".*checked"')


def returned(checked: Checked) -> None:
    """Check that a return probe fetches the result."""
    checked.define("r:kprobes/done do_sys_openat2 fd=$retval:s32")
    checked.work()
    checked.hits(r" done: \(.* <- do_sys_openat2\) fd=\d+")


def middle(checked: Checked) -> None:
    """Check that a probe inside a function is hit."""
    offset = _inside(checked, "do_sys_openat2")[0]
    checked.define(f"p:kprobes/inside do_sys_openat2+{offset}")
    checked.work()
    checked.hits(rf" inside: \(do_sys_openat2\+{offset:#x}/0x\w+\)")


def profile(checked: Checked) -> None:
    """Check that kprobe_profile shows the number of hits."""
    checked.define("p:kprobes/counted do_sys_openat2")
    checked.work()
    count = len(checked.hits(" counted: "))
    found = re.search(r"^\s+counted\s+(\d+)\s+(\d+)$", checked.read("/tracing/kprobe_profile"), re.MULTILINE)
    _equal((int(found[1]) >= count, found[2]) if found else None, (True, "0"))


def listed(checked: Checked) -> None:
    """Check that kprobes/list shows the probes."""
    checked.define("p:kprobes/one do_sys_openat2", "r:kprobes/two vfs_read")
    lines = checked.read("/kprobes/list").splitlines()
    _equal(sorted(line.split()[1] for line in lines), ["k", "r"])


def refused(checked: Checked) -> None:
    """Check that a probe on an unknown function is refused, and that error_log shows the reason."""
    try:
        checked.define("p:kprobes/no no_such_function")
    except KernelError:
        if "Invalid probed address or symbol" not in checked.read("/tracing/error_log"):
            raise CheckFailed("nothing in the error log") from None
    else:
        raise CheckFailed("it was accepted")


def optimized(checked: Checked) -> None:
    """Check that a probe becomes a jump, and that its hits are recorded."""
    debug = {entry.name for entry in checked.mount.readdir("/sysctl/debug")}
    if "kprobes-optimization" not in debug:
        raise NotBuilt
    places = [f"{name}+{at}" for name in ("do_sys_openat2", "vfs_read") for at in _inside(checked, name)[:14]]
    checked.define()
    for number, place in enumerate(places):
        # Some places cannot be probed, such as those of static keys.
        with suppress(KernelError):
            checked.write("/kprobe_events", f"p:kprobes/o{number} {place}\n", os.O_WRONLY | os.O_APPEND)
    checked.write(f"{EVENTS}/kprobes/enable", "1")
    for _ in range(REQUESTS):
        jumps = re.findall(r" (\w+\+0x\w+) .*\[OPTIMIZED\]", checked.read("/kprobes/list"))
        if jumps:
            checked.clear()
            checked.work()
            checked.hits(rf" o\d+: \({re.escape(jumps[0])}/0x\w+\)")
            return
    raise CheckFailed("no probe became a jump")


def switches(checked: Checked) -> None:
    """Check that the event sched_switch is recorded."""
    checked.define()
    checked.write(f"{EVENTS}/sched/sched_switch/enable", "1")
    checked.work()
    # Another task opens the file.
    checked.mount.release(checked.mount.open(OTHER, FILE, os.O_RDONLY))
    checked.write(f"{EVENTS}/sched/sched_switch/enable", "0")
    checked.hits(
        r" sched_switch: prev_comm=\S+ prev_pid=\d+ prev_prio=120 prev_state=\S+ ==> next_comm=.* next_pid="
    )


def system_calls(checked: Checked) -> None:
    """Check that the event of a system call is recorded with its arguments."""
    checked.define()
    checked.write(f"{EVENTS}/syscalls/sys_enter_openat/enable", "1")
    checked.work()
    checked.write(f"{EVENTS}/syscalls/sys_enter_openat/enable", "0")
    checked.hits(r" sys_openat\(dfd: .*filename: ")


def functions(checked: Checked) -> None:
    """Check that the function tracer records the functions that its filter selects."""
    checked.define()
    checked.needs_tracer("function")
    checked.write("/tracing/set_ftrace_filter", "do_sys_openat2\n", os.O_WRONLY | os.O_TRUNC)
    checked.write("/tracing/current_tracer", "function")
    checked.work()
    try:
        checked.hits(r": do_sys_openat2 <-\w+")
    finally:
        checked.write("/tracing/current_tracer", "nop")
        checked.write("/tracing/set_ftrace_filter", "\n", os.O_WRONLY | os.O_TRUNC)


def graph(checked: Checked) -> None:
    """Check that the function graph tracer records a function and the calls that it makes."""
    checked.needs_tracer("function_graph")
    checked.write("/tracing/set_graph_function", "do_sys_openat2\n", os.O_WRONLY | os.O_TRUNC)
    checked.write("/tracing/current_tracer", "function_graph")
    checked.work()
    try:
        checked.hits(r"\| +do_sys_openat2\(\) \{")
        checked.hits(r" us +\| +\}")
    finally:
        checked.write("/tracing/current_tracer", "nop")
        checked.write("/tracing/set_graph_function", "\n", os.O_WRONLY | os.O_TRUNC)


def _load_module(checked: Checked) -> str:
    error = KernelError(ENOENT)
    missing: list[bool] = []
    for name in MODULES:
        try:
            checked.write("/machine/modules", f"load {name}")
        except KernelError as why:
            error = why
            missing.append(why.errno == ENOENT)
        else:
            return name
    if all(missing):
        raise NotBuilt
    raise CheckFailed(f"no module could be loaded: {error}")


def module_loads(checked: Checked) -> None:
    """Check that a module can be loaded, and that it is listed then."""
    name = _load_module(checked)
    if not re.search(rf"^{name} ", checked.read("/machine/modules"), re.MULTILINE):
        raise CheckFailed(f"{name} is not listed")


def module_probed(checked: Checked) -> None:
    """Check that a probe on a function of the module is hit."""
    try:
        traceable = checked.read("/tracing/available_filter_functions")
        functions = re.findall(r"^(\w+) \[\w+\]$", traceable, re.MULTILINE)
    except KernelError:
        # The profile has no ftrace.
        symbols = checked.read("/machine/kallsyms")
        functions = re.findall(r"^\w+ [tT] (\w+)\t\[\w+\]$", symbols, re.MULTILINE)
    for function in functions:
        # A name can occur in several modules, and init functions are gone.
        with suppress(KernelError):
            checked.define(f"p:kprobes/inmod {function}")
            if function not in checked.read("/kprobes/list"):
                raise CheckFailed(f"{function} is not listed")
            checked.define()
            return
    if not functions:
        raise NotBuilt
    raise CheckFailed(f"no function of the module can be probed: {functions}")


def module_goes(checked: Checked) -> None:
    """Check that the module can be unloaded."""
    names = [line.split()[0] for line in checked.read("/machine/modules").splitlines()]
    loaded = [name for name in names if name in MODULES]
    if not loaded:
        raise NotBuilt
    for name in loaded:
        checked.write("/machine/modules", f"unload {name}")
    if set(MODULES) & {line.split()[0] for line in checked.read("/machine/modules").splitlines()}:
        raise CheckFailed("the module is still listed")


def histogram(checked: Checked) -> None:
    """Check that a hist trigger counts the hits."""
    checked.define("p:kprobes/h do_sys_openat2")
    if "hist" not in {entry.name for entry in checked.mount.readdir(f"{EVENTS}/kprobes/h")}:
        raise NotBuilt
    checked.write(f"{EVENTS}/kprobes/h/trigger", "hist:keys=common_pid")
    checked.work()
    text = checked.read(f"{EVENTS}/kprobes/h/hist")
    checked.write(f"{EVENTS}/kprobes/h/trigger", "!hist:keys=common_pid")
    found = re.search(r"common_pid: +\d+ +\} hitcount: +(\d+)", text)
    _equal(int(found[1]) >= 2 if found else text[-200:], True)


def instance(checked: Checked) -> None:
    """Check that an instance has its own trace, separate from the top one."""
    checked.mount.mkdir(CLIENT, "/tracing/instances/checked", 0o755)
    checked.define("p:kprobes/i do_sys_openat2")
    checked.write("/tracing/instances/checked/events/kprobes/i/enable", "1")
    checked.work()
    text = checked.read("/tracing/instances/checked/trace")
    checked.mount.rmdir(CLIENT, "/tracing/instances/checked")
    _equal(" i: (do_sys_openat2" in text, True)


def formats(checked: Checked) -> None:
    """Check that the format file of an event contains its fields."""
    text = checked.read(f"{EVENTS}/sched/sched_switch/format")
    _equal(bool(re.search(r"field:char prev_comm\[(16|TASK_COMM_LEN)\];\toffset:\d+;\tsize:16;", text)), True)


def filtered(checked: Checked) -> None:
    """Check that a filter drops records."""
    checked.define(f"p:kprobes/f do_sys_openat2 flags=+0({checked.register(2)}):x64")
    checked.write(f"{EVENTS}/kprobes/f/filter", "flags == 12345")
    checked.clear()
    checked.work()
    _equal(" f: " in checked.read("/tracing/trace"), False)


def called(checked: Checked) -> None:
    """Check that a function of the kernel is called by name."""
    checked.write("/machine/call", "int_sqrt 144\n")
    _equal(checked.read("/machine/call"), "int_sqrt = 0xc (12)\n")


def removed(checked: Checked) -> None:
    """Check that all probes can be removed."""
    checked.define()
    _equal((checked.read("/kprobe_events"), checked.read("/kprobes/list")), ("", ""))


def log(checked: Checked) -> None:
    """Check that the kernel's log contains no report of an error."""
    text = checked.read("/machine/dmesg")
    found = TROUBLE.search(text)
    if not text or found:
        raise CheckFailed(found[0] if found else "the log is empty")


CHECKS: tuple[Callable[[Checked], None], ...] = (
    scratch, arguments, string, returned, middle, profile, listed, refused, optimized, switches,
    system_calls, functions, graph, module_loads, module_probed, module_goes, histogram, instance, formats,
    filtered, removed, log,
)  # fmt: skip
PROBE_CHECKS = frozenset({
    arguments, string, returned, middle, profile, listed, optimized, module_probed, histogram, instance,
    filtered,
})  # fmt: skip
"""Checks that need probes at function entries, or records of probes."""
OWN_CHECKS = (*CHECKS[:-2], called, *CHECKS[-2:])
"""Checks of kprobefs's own engine, which has machine/call."""


@dataclass
class Result:
    """Results of a kernel's checks with one engine. `boot` and `start`: seconds."""

    release: str
    engine: str
    count: int
    boot: float
    start: float
    failed: dict[str, str] = field(default_factory=dict)
    differences: str = ""
    """Text "N of M": of M answers, N differ from the kernel's own ones; "" if no question was asked."""
    examples: list[str] = field(default_factory=list)
    """Some of the differences."""
    selftests: tuple[str, str] = ("", "")
    """The number of Linux's tests that passed, and the names of those that fail."""
    missing: list[str] = field(default_factory=list)
    """Names of the checks that were not possible.

    The kernel was built without the feature, or modules are not on this machine.
    """

    def row(self) -> str:
        """Return the row of the table."""
        possible = self.count - len(self.missing)
        passed = possible - len(self.failed)
        return (
            f"| {self.release} | `{self.engine}` | {passed} of {possible} | {', '.join(self.failed)} "
            f"| {', '.join(self.missing)} | {self.differences} | {' | '.join(self.selftests)} "
            f"| {f'{self.boot:.1f} s' if self.boot >= _CACHED else ''} | {self.start:.2f} s | {DATE} |"
        )


def check(image: Path, engine: str, boot: float) -> Result:
    """Run all checks of the kernel in the file `image`, whose snapshot is in the boot cache.

    `engine`: one of ENGINES. `boot`: seconds that the first boot took, for the result.
    """
    began = perf_counter()
    tasks, kernel = started_with_kernel(str(image), SEED)
    modules = ModuleFiles(image, tasks.release)
    owner = Owner(0, 0)
    if engine == ENGINES[0]:
        mount = native_mount(tasks, ProcessWatch(), owner, modules, is_tracefs=False)
    else:
        probing = LinuxEngine(tasks, kernel, profile_of(kernel))
        mount = probed_mount(probing, ProcessWatch(), owner, modules, is_tracefs=False)
    checks = CHECKS if engine == ENGINES[0] else OWN_CHECKS
    checked = Checked(mount, kernel, engine == ENGINES[0])
    result = Result(tasks.release, engine, len(checks), boot, perf_counter() - began)
    has_probes = checked.can_probe_entries()
    for each in checks:
        try:
            if each in PROBE_CHECKS and not has_probes:
                raise NotBuilt
            each(checked)
        except NotBuilt:
            result.missing.append(each.__name__)
        except (CheckFailed, KernelError) as error:
            result.failed[each.__name__] = str(error)
    mount.close()
    return result


def inside(image: Path, count: int) -> Tally:
    """Compare the answers of kprobefs over a kernel with the kernel's own answers; return the differences.

    `count`: the N of the option --inside.
    """
    tasks, kernel = started_with_kernel(str(image), SEED)
    owner = Owner(0, 0)
    linux = native_mount(tasks, ProcessWatch(), owner, is_tracefs=False)
    profile = profile_of(kernel)
    engine = LinuxEngine(*started_with_kernel(str(image), SEED), profile)
    ours = probed_mount(engine, ProcessWatch(), owner, is_tracefs=False)
    interface = interface_with(kernel, profile)
    sites = refused_sites(kernel)
    rules = probe_rules_named(profile.probe_rules)
    places = kernel_places(kernel, count, SEED)
    tallies = [
        compare_definitions(linux, ours, count, SEED, interface, kernel),
        compare_filters(linux, ours, count // 2, SEED),
        compare_histograms(linux, ours, count * 3 // 10, SEED),
        compare_places(linux, kernel, places, rules, kernel.architecture, sites),
    ]
    # A kernel that refuses probes at entries has no return probes either.
    if not refuses_entries(kernel):
        tallies.append(compare_records(linux, ours, recorded_definitions(engine, interface)))
    linux.close()
    ours.close()
    return Tally(
        sum(tally.compared for tally in tallies),
        sum(tally.refused for tally in tallies),
        [difference for tally in tallies for difference in tally.differences],
    )


def results(images: list[Path], engines: Sequence[str], questions: int) -> Iterator[Result | str]:
    """Yield the result for each kernel and engine, or a line with the reason why a kernel cannot be used.

    `questions`: the N of the option --inside.
    """
    for image in images:
        began = perf_counter()
        try:
            ensure_cached(str(image), SEED, lambda _done, _total: None)
            boot = perf_counter() - began
            for engine in engines:
                result = check(image, engine, boot)
                if questions and engine == ENGINES[-1]:
                    tally = inside(image, questions)
                    result.differences = f"{len(tally.differences)} of {tally.compared}"
                    result.examples = tally.differences[:EXAMPLES]
                yield result
        except KernelError as error:
            yield f"{image.name}: {error.strerror}"


def main() -> int:
    """Print a row for each kernel and engine; return 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="python -m stress.kernels", description=__doc__)
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the rows into the table in this file, too"
    )
    parser.add_argument(
        "--inside", metavar="N", type=int, default=0, help="compare N answers with the kernel's own probing"
    )
    parser.add_argument(
        "--selftests", metavar="FILE", type=Path, help="results of stress.kernel_selftests for the table"
    )
    parser.add_argument("--cache", metavar="DIR", help="directory of booted kernels (default: a new one)")
    parser.add_argument("--kprobes", choices=ENGINES, action="append", help="only this way (default: both)")
    parser.add_argument("images", metavar="IMAGE", type=Path, nargs="+")
    options = parser.parse_args()
    kept = Selftests(options.selftests) if options.selftests else None
    with tempfile.TemporaryDirectory(prefix="kprobefs-kernels-") as new:
        os.environ["XDG_CACHE_HOME"] = options.cache or new
        is_good = True
        print(HEAD, RULE, sep="\n")
        for result in results(options.images, options.kprobes or ENGINES, options.inside):
            if isinstance(result, str):
                is_good = False
                print(result, flush=True)
                continue
            if kept is not None:
                result.selftests = kept.cells(result.release, result.engine)
            print(result.row(), flush=True)
            if options.write:
                before = options.write.read_text(encoding="utf-8") if options.write.exists() else ""
                options.write.write_text(page(merged(before, [result.row()])), encoding="utf-8")
            for name, why in result.failed.items():
                is_good = False
                print(f"    {name}: {why}", flush=True)
            for example in result.examples:
                is_good = False
                print(f"    {example}", flush=True)
    return 0 if is_good else 1


def merged(text: str, rows: Sequence[str]) -> list[str]:
    """Return the rows of the table in `text` together with new rows, sorted by version.

    A new row replaces the row for the same kernel and engine. Columns that were not measured keep their old
    values.
    """
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in (*text.partition(f"{RULE}\n")[2].splitlines(), *rows):
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        new = dict(zip(COLUMNS, cells, strict=True))
        former = found.get(tuple(cells[:2]), new)
        for column, columns in MEASURED.items():
            if not new[column]:
                new |= {name: former[name] for name in columns}
        found[tuple(cells[:2])] = new
    ordered = sorted(found, key=lambda key: (_numbers(key[0]), key))
    return [f"| {' | '.join(found[key].values())} |" for key in ordered]


def _numbers(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)]


def page(rows: Sequence[str]) -> str:
    """Return the text of the page with the table of results."""
    names = ", ".join(f"`{each.__name__}`" for each in OWN_CHECKS)
    about = (
        "`python -m stress.kernels --inside 1000 --selftests FILE --write PAGE IMAGE...` makes the rows of "
        "this table. A way "
        "of probing is a value of `--kprobes`. A check is not possible if the kernel was built without its "
        "subject, if the package with modules was not at hand, or if the kernel's own kprobes refuse entries "
        "of functions (6.12 for riscv64). Differences are those between the "
        "kernel's own answers to definitions, filters, histograms and places of probes, and its own "
        "records, and those of kprobefs over it. Selftests are the runs of Linux's own ftrace selftests that "
        "pass, and all runs; the others fail or need what the kernel was built without. Names of directories "
        "mean that only their tests were run. An empty column was not measured. Times "
        f"depend on the load of the machine, which had {os.cpu_count()} CPUs of {platform.machine()} and "
        f"other work. The checks are {names}."
    )
    paragraph = textwrap.fill(about, 140, break_on_hyphens=False)
    return "\n".join(("# Kernels that `--image` runs", "", paragraph, "", HEAD, RULE, *rows, ""))


if __name__ == "__main__":
    sys.exit(main())
