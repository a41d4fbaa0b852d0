"""probed_mount: a mount with control files for a distribution's kernel, and the guest's scratch/ and dev/."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from emulated_kernel.components.guest_directories import (
    DENTRIES,
    DirectoryFunctions,
    GuestDirectories,
    eventfs_functions,
)
from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.guest.cpu_report import cpu_text
from emulated_kernel.guests.linux.guest.passing_time import RealTime
from emulated_kernel.guests.linux.initramfs import DEVICES, PROC, TMPFS
from emulated_kernel.guests.linux.mounts.control_calls import LinuxControlCalls
from emulated_kernel.guests.linux.mounts.guest_fs import GuestFs
from emulated_kernel.guests.linux.mounts.guest_paths import LASTING
from emulated_kernel.guests.linux.mounts.linux_guest import LinuxGuest
from emulated_kernel.guests.linux.mounts.probed_tree import engine_tree
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.image.linux.module_files import ModuleFiles
from emulated_kernel.util.lazy_pattern import lazy_pattern
from emulated_kernel.vfs.control_fs import ControlFs
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.command_file import GuestSteppedFile, HostReadingFile, each_line
from emulated_kernel.vfs.core.node import Directory, Owner
from emulated_kernel.vfs.core.open_file import Steps, one_step
from emulated_kernel.vfs.core.seq_file import Records, SeqFile, listing, single
from emulated_kernel.vfs.filesystem import FileSystem
from emulated_kernel.vfs.mount import Mount
from emulated_kernel.vfs.trees.call_file import Calls
from emulated_kernel.vfs.trees.stats import HistoryFile

_ADDRESS = lazy_pattern("0x[0-9a-f]{16}")
_PROBING = frozenset({
    "register_kprobe", "register_kprobes", "register_kretprobe", "register_kretprobes",
    "__kprobe_event_gen_cmd_start", "register_fprobe", "register_fprobe_ips", "register_fprobe_syms",
    "register_ftrace_function", "register_ftrace_function_nolock", "register_ftrace_graph",
    "register_ftrace_direct", "register_ftrace_direct_multi", "modify_ftrace_direct",
    "modify_ftrace_direct_multi", "modify_ftrace_direct_multi_nolock", "klp_enable_patch",
})  # fmt: skip
"""Kernel functions that modules must not call, because they patch text that kprobefs's engine patches."""
GUESTS_OWN = {"/scratch": TMPFS, "/dev": DEVICES}
"""Directory of the mount with the guest's own files -> path in the guest."""
_EVENTS = "trace_array.event_dir"
_MODES = {"scratch": 0o1777, "dev": 0o755}


def probed_mount(
    engine: LinuxEngine,
    watch: ProcessWatch,
    owner: Owner,
    modules: ModuleFiles | None = None,
    *,
    is_tracefs: bool,
    keeps_tracefs: bool = False,
    time: RealTime | None = None,
) -> Mount:
    """Return a mount of kprobefs's control files and of the guest's own scratch/ and dev/.

    `modules`: module files of this kernel; None: clients cannot load modules.
    `is_tracefs`: tracefs is the root of the mount, which shows nothing else; if False, tracefs is at
    tracing/.
    `keeps_tracefs`: the guest's own tracefs stays mounted in the guest, for other users. Then the guest makes
    no calls on control files, so probes can't see such calls. If it is False, the guest makes these calls
    once a probe could see them. `time`: object that makes the guest's time follow the real time; it must have
    been created before `engine`. If `time` is None, the guest's time is virtual.
    """

    def request_begins() -> None:
        if time is not None:
            time.request_begins()
        engine.request_begins()

    guest = LinuxGuest(
        engine.tasks,
        watch,
        owner,
        modules,
        lock=engine.lock,
        begins=request_begins if time is not None else engine.request_begins,
        ended=engine.guest.events.call_ended,
    )

    def call_function(function: str, *arguments: int | str) -> int:
        with guest.running:
            return engine.kernel_calls.call_function(function, *arguments)

    calls = Calls(call_function, engine.machine.memory.word_size)
    machine = {
        "cpu": SeqFile(0o444, single(lambda: cpu_text(engine.tasks))),
        "call": GuestSteppedFile(0o600, single(lambda: calls.result), calls.execute),
        "load": GuestSteppedFile(
            0o644, listing(guest.loads.text), each_line(guest.say, "load", guest.loads.parsed)
        ),
        "modules": HostReadingFile(0o644, partial(_module_lines, guest), partial(_prepare_modules, guest)),
        "meminfo": SeqFile(0o444, single(partial(_meminfo, guest))),
        "history": HistoryFile(engine.components, lambda: mount.past),
    }
    # Mount points for the guest's own directories.
    further = {name: Directory(mode, {}) for name, mode in _MODES.items()}
    tree = engine_tree(engine, owner, guest.log_text, machine, further, is_tracefs=is_tracefs)
    strategy = LinuxControlCalls(guest, engine, is_tracefs=is_tracefs, is_refused=keeps_tracefs)
    table: dict[str, FileSystem] = {"/": ControlFs(tree, guest.lock, strategy)}
    if not is_tracefs:
        table |= dict.fromkeys(GUESTS_OWN, GuestFs(guest, GUESTS_OWN))
    mount = Mount(table, limits=engine.limits, lasting=() if is_tracefs else LASTING)
    engine.machine.text.before_first_change.append(mount.open_in_guest)
    if not keeps_tracefs:
        functions = _directory_functions(engine)
        GuestDirectories(
            engine.components.tracing.system.events,
            call_function,
            partial(_sees_directories, engine, strategy, functions.makes),
            lambda: guest.tasks.machine.is_running,
            functions,
        )
    return mount


def _directory_functions(engine: LinuxEngine) -> DirectoryFunctions:
    """Return the functions with which the guest's kernel creates and removes directories of events."""
    kernel = engine.kernel
    if kernel.kallsyms.lookup_name("eventfs_create_dir") is None or not kernel.btf.has(_EVENTS):
        return DENTRIES
    at = kernel.required("global_trace") + kernel.btf.offset(_EVENTS)
    return eventfs_functions(engine.machine.memory.read_word(at))


def _sees_directories(engine: LinuxEngine, calls: LinuxControlCalls, makes: str) -> bool:
    """Return True if a probe could see how the guest creates the directories of events.

    `makes`: name of the function that creates the directories. A probe could see its calls if the function's
    text is patched. Otherwise the guest creates no directories, because that takes longer than registering
    the event.
    """
    if not calls.is_watched:
        return False
    ledger = engine.machine.text.ledger
    symbols = engine.kernel.kallsyms.by_name(makes)
    return any(
        not ledger.keys().isdisjoint(range(each.address, each.address + each.size)) for each in symbols
    )


def _meminfo(guest: LinuxGuest) -> str:
    """Return the content of the guest's /proc/meminfo."""
    with guest.running:
        return guest.syscalls.read_all(f"{PROC}/meminfo").decode()


def _prepare_modules(guest: LinuxGuest, client: Client, data: bytes) -> Callable[[], Steps]:
    """Read the module files for a client's write to machine/modules, without the control lock.

    Return a function that returns a generator (see open_file.Steps). The generator has one step, which
    executes the command in `data`.
    """
    execute = guest.prepared_modules(client, data, refused=_PROBING)
    return lambda: one_step(execute)


def _module_lines(guest: LinuxGuest, client: Client) -> Records:
    """Return the guest's /proc/modules; addresses are 0 unless the client is root or the mount's owner."""

    def shown() -> str:
        with guest.running:
            text = guest.syscalls.read_all(f"{PROC}/modules").decode()
        return text if guest.owner.is_privileged(client) else _ADDRESS.sub("0x0000000000000000", text)

    return single(shown)
