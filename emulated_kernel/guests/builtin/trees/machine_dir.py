"""machine/: files about the emulated computer, such as tasks and memory, and a file that calls functions."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from time import monotonic

from emulated_kernel.guests.builtin.builtin_kernel import BuiltinKernel
from emulated_kernel.guests.builtin.guest import Guest
from emulated_kernel.guests.builtin.kernel_components import BuiltinKernelComponents
from emulated_kernel.guests.builtin.modules import Modules
from emulated_kernel.guests.builtin.readers.vmcoreinfo import vmcoreinfo
from emulated_kernel.guests.builtin.trees.clock_file import clock_text, parsed_clock
from emulated_kernel.guests.common.gdb_file import gdb_file
from emulated_kernel.guests.common.vmcore_file import VmcoreFile
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.limits import UNLIMITED, Limit
from emulated_kernel.util.safe_read import PATIENCE
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.command_file import GuestSteppedFile, HostReadingFile, SteppedFile, each_line
from emulated_kernel.vfs.core.kstrtox import ascii_lines
from emulated_kernel.vfs.core.node import Node, Owner
from emulated_kernel.vfs.core.open_file import Steps
from emulated_kernel.vfs.core.seq_file import Records, SeqFile, listing, single
from emulated_kernel.vfs.trees.call_file import Calls
from emulated_kernel.vfs.trees.limits_file import GuestLimit, limits_file
from emulated_kernel.vfs.trees.root import machine_files

MAX_LOADS = 16
"""Maximum number of modules that one write can load; all their files are read before the first is loaded."""


def machine_tree(
    kernel: BuiltinKernelComponents, owner: Owner, further: Mapping[str, Node]
) -> dict[str, Node]:
    """Return the files of machine/ and the files in `further`: name -> file.

    Only root and `owner`, the owner of the mount's files, see addresses.
    """
    image = kernel.live.core
    guest = kernel.guest
    reader = kernel.guest.kernel
    modules = kernel.modules
    calls = Calls(guest.call_function, kernel.machine.memory.word_size)
    profile = kernel.engine.kprobes.profile
    version = image.version.rstrip()
    if not profile.preemption:
        version = version.replace(" PREEMPT", "")
    banner = f"{version}\nprofile {profile.title}\n"

    def addressed(show: Callable[[bool], Iterable[str]]) -> Callable[[Client], Records]:
        """Return a function that lists the records of `show` for a client.

        `show(True)` yields records with 0 in place of addresses, for clients that may not see addresses.
        `show(False)` yields records with the addresses.
        """
        return lambda client: listing(lambda: show(not owner.is_privileged(client)))

    def log() -> Iterator[str]:
        return (line for message in guest.messages() for line in message.lines())

    return {
        **machine_files(banner, kernel.tracing.symbols, log, owner),
        "modules": HostReadingFile(
            0o644,
            addressed(lambda zero: [module.line(zero_address=zero) for module in modules.loaded()]),
            partial(_prepare_modules, modules),
        ),
        "tasks": SeqFile(0o444, listing(lambda: _task_lines(reader))),
        "cpus": SeqFile(0o444, listing(lambda: _cpu_lines(reader, guest))),
        "meminfo": SeqFile(0o444, listing(lambda: reader.memory().text())),
        "clock": SteppedFile(
            0o644,
            single(partial(clock_text, kernel)),
            each_line(guest.log, "clock", partial(parsed_clock, kernel)),
        ),
        "load": GuestSteppedFile(
            0o644, listing(kernel.loads.text), each_line(guest.log, "load", kernel.loads.parsed)
        ),
        "limits": limits_file(kernel, kernel.config.limits, guest.log, _guest_limits(kernel)),
        "call": GuestSteppedFile(0o600, single(lambda: calls.result), calls.execute),
        "gdb": gdb_file(kernel.machine, kernel.lock),
        "vmcore": VmcoreFile(kernel.machine, lambda: vmcoreinfo(kernel.machine, image)),
        **further,
    }


def _guest_limits(kernel: BuiltinKernelComponents) -> dict[Limit, GuestLimit]:
    """Return the limits that exist only with kprobefs's own kernel.

    They are the total size in bytes of the files in scratch/ and dev/, and the maximum CPU time of one run of
    the guest in milliseconds.
    """
    limits = kernel.config.limits
    machine = kernel.machine
    reader = kernel.guest.kernel

    def show_scratch() -> str:
        most = limits[Limit.SCRATCH_BYTES]
        return f"{UNLIMITED if most is None else most} {reader.file_pages() * PAGE_SIZE}"

    def set_scratch(value: int | None) -> None:
        reader.limit_file_pages(None if value is None else value // PAGE_SIZE)
        limits[Limit.SCRATCH_BYTES] = value

    def set_run_budget(value: int | None) -> None:
        assert value is not None
        machine.run_budget = value / 1000

    return {
        Limit.SCRATCH_BYTES: GuestLimit(show_scratch, set_scratch),
        Limit.RUN_BUDGET_MS: GuestLimit(lambda: str(round(machine.run_budget * 1000)), set_run_budget),
    }


def _task_lines(reader: BuiltinKernel) -> Iterator[str]:
    tasks = reader.tasks()
    yield f"{'PID':>7} {'PPID':>7} {'UID':>6} STATE COMM\n"
    for task in tasks:
        yield f"{task.pid:>7} {task.parent:>7} {task.uid:>6} {task.state:<5} {task.comm}\n"


def _cpu_lines(reader: BuiltinKernel, guest: Guest) -> Iterator[str]:
    cpus = reader.cpus()
    yield f"{'CPU':>3} {'STATE':<7} {'RUNNABLE':>8} {'SWITCHES':>9} {'INTERRUPTS':>10} {'PID':>7} COMM\n"
    for cpu in cpus:
        state = "dead" if guest.is_dead else "idle" if cpu.is_idle else "running"
        yield (
            f"{cpu.number:>3} {state:<7} {cpu.runnable:>8} {cpu.switches:>9} {cpu.interrupts:>10} "
            f"{cpu.task.pid:>7} {cpu.task.comm}\n"
        )


def _prepare_modules(modules: Modules, _client: Client, data: bytes) -> Callable[[], Steps]:
    """Read the module files that the commands in `data` name; return a function that executes the commands.

    The commands are `load NAME`, `load PATH` and `unload NAME`, one step each. All modules to load are
    checked before any command is executed. If a command fails later, the earlier commands have been executed.

    Raises: KernelError EINVAL (not ASCII). The returned function raises: KernelError EINVAL (malformed),
    E2BIG (more than MAX_LOADS), and as Modules.check, Modules.load and Modules.unload.
    """
    commands = [line.split(maxsplit=1) for line in ascii_lines(data)]
    for words in commands:
        if len(words) != 2 or words[0] not in ("load", "unload"):
            # Log the refusal later: that takes the control lock, which is not held here.
            why = f"modules: {' '.join(words)!r} is neither load NAME nor unload NAME"
            return partial(modules.refuse, errno.EINVAL, why)
    names = dict.fromkeys(name for verb, name in commands if verb == "load")
    if len(names) > MAX_LOADS:
        return partial(modules.refuse, errno.E2BIG, f"modules: more than {MAX_LOADS} in one write")
    deadline = monotonic() + PATIENCE
    files = {name: modules.read(name, deadline) for name in names}

    def execute() -> Steps:
        # Read once: to walk the guest's list for each line would take seconds in this one step.
        loaded = modules.names()
        for verb, name in commands:
            if verb == "load":
                modules.check(files[name], loaded)
            else:
                loaded.discard(name.replace("-", "_"))
        for number, (verb, name) in enumerate(commands):
            if number:
                yield
            if verb == "load":
                modules.load(files[name])
            else:
                modules.unload(name)
        return len(data)

    return execute
