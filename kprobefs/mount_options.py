"""MountOptions: the options of a mount, and functions that check the options."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from errno import ENOENT

from emulated_kernel.kprobes import profile
from emulated_kernel.util import config
from emulated_kernel.util.config import DEFAULT_RUN_BUDGET, HOST, IMAGE_LIMIT
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.limits import Limit, Limits, parse_limit
from kprobefs.common.errors import CliError, ExitStatus

# Not from typing, which takes longer to import than most modules here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from emulated_kernel.guests.linux.cpu.production_cpu import ProductionCpu
    from emulated_kernel.util.config import MachineConfig
    from emulated_kernel.vfs.mount import Mount


KERNEL_KPROBES = "kernel"
KPROBES = ("kprobefs", KERNEL_KPROBES)
LAYOUTS = ("full", "tracefs")
ARCHITECTURES = tuple(config.ARCHITECTURES)
REAL_CLOCK = "real"
MODEL_CLOCK = "model"
CLOCKS = ("virtual", REAL_CLOCK, MODEL_CLOCK)
"""Values of --clock. The first one is the default."""
PROFILES = tuple(profile.PROFILES)
LINUX_PROFILES = ("linux-6.1", "linux-6.1-nopreempt")
"""Values of --profile for a distribution's kernel on any processor.

Without --profile, the kernel's version selects the profile.
"""
RETURN_HOOKS = tuple(profile.RETURN_HOOKS)
STRATEGIES = tuple(profile.STRATEGIES)
SAVE_REGS = tuple(saving.value for saving in profile.RegisterSaving)

KERNELS_VERSION = "kernel's version"
"""Text in the output of `status` for a profile that a distribution's kernel selects by its version."""


@dataclass(frozen=True)
class MountOptions:
    """Options of one mount. `directory`: absolute path of the mount point, without symbolic links."""

    directory: str
    machine: MachineConfig
    layout: str = "full"
    allow_other: bool = False
    """Admit other users, subject to file modes."""
    flags: tuple[str, ...] = ()
    """Further mount options of libfuse, such as noexec."""
    isolate: bool = False
    """Ignore host processes that do not use the mount, and number clients from pid 1000 on."""
    is_ordered: bool = False
    """Answer requests in their order with one thread, so that traces do not depend on timing."""
    make_directory: bool = False
    """Create the mount point if it does not exist."""
    kprobes: str = KPROBES[0]
    """Whose kprobes are used: "kprobefs", or "kernel" for those of the kernel in `machine.image`."""
    state: str | None = None
    """Directory that keeps definitions and records beyond the daemon's end; None: they are lost then."""
    modules: tuple[str, ...] = ()
    """Paths of packages and directories with more modules of the distribution's kernel."""
    vmcore: str | None = None
    """Path of the ELF vmcore whose kernel is mounted; None if no vmcore is mounted."""
    cpu: str | None = None
    """Production CPU that a distribution's kernel sees: a model's name, `host`, or the path of an archive.

    An archive is a text file with a CPU's files of /proc and /sys. If `cpu` is None, the kernel sees the
    emulator's own CPU.
    """
    follows_version: bool = False
    """Whether a distribution's kernel is mounted with the tracefs interface of its own version.

    Otherwise it has the interface that belongs to the profile.
    """

    @property
    def source(self) -> str:
        """First field of the mount's line in /proc/mounts, by which tools recognize the file system."""
        return "tracefs" if self.layout == "tracefs" else "debugfs"

    @property
    def kernel_name(self) -> str:
        """Path of the kernel's image or vmcore, or `built-in`, for the output of `status`."""
        return self.vmcore or str(self.machine.image or "built-in")

    @property
    def kernel_words(self) -> list[str]:
        """Options of a command line, and their values, that select this mount's kernel, kprobes and clock."""
        machine = self.machine
        words = ["--arch", machine.arch]
        if self.vmcore is not None:
            words = ["--vmcore", os.path.abspath(self.vmcore)]
        elif machine.image is not None:
            image = str(machine.image)
            words = ["--image", image if image == HOST else os.path.abspath(image), "--kprobes", self.kprobes]
        if self.cpu is not None:
            words += ["--cpu", self.cpu]
        if not self.follows_version:
            words += ["--profile", machine.profile]
        if machine.strategy is not None:
            words += ["--strategy", machine.strategy]
        return [*words, "--clock", machine.clock]

    @property
    def profile_name(self) -> str:
        """Name of the profile, for the output of `status`.

        It is `kernel` if the kernel's own kprobes are used, and KERNELS_VERSION if the kernel's version
        selects the profile.
        """
        if self.kprobes == KERNEL_KPROBES:
            return KERNEL_KPROBES
        is_builtin = self.vmcore is None and self.machine.image is None
        return self.machine.profile if is_builtin or not self.follows_version else KERNELS_VERSION


Builder = Callable[[MountOptions], "Mount"]
"""Function that builds the served mount from options. Tests pass builders of smaller mounts."""


def check_image(path: Path) -> None:
    """Check that a kernel image is a regular file of an allowed size, without reading it.

    Raises: CliError (the image is not such a file, or does not exist).
    """
    try:
        found = path.stat()
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}", ExitStatus.USAGE) from None
    if not stat.S_ISREG(found.st_mode):
        raise CliError(f"{path}: not a regular file", ExitStatus.USAGE)
    if found.st_size > IMAGE_LIMIT:
        size = f"{found.st_size >> 20} MiB; a kernel image has at most {IMAGE_LIMIT >> 20} MiB"
        raise CliError(f"{path}: {size}", ExitStatus.USAGE)


def parsed_limits(words: Sequence[str]) -> tuple[Limits, float]:
    """Return the limits of `--limit NAME=VALUE`, and the run budget.

    The run budget is the maximum time in seconds of one run of the guest. `words`: the values of the options,
    as NAME=VALUE. Raises: CliError (an unknown name or a wrong value).
    """
    found: dict[Limit, int | None] = {}
    for word in words:
        name, _, text = word.partition("=")
        try:
            limit, value = parse_limit(name, text)
        except KernelError as error:
            raise CliError(f"--limit {word}: {error.strerror}", ExitStatus.USAGE) from None
        found[limit] = value
    budget = found.pop(Limit.RUN_BUDGET_MS, None)
    return Limits(found), DEFAULT_RUN_BUDGET if budget is None else budget / 1000


def check_kprobes(options: MountOptions, *, is_limited: bool = False) -> None:
    """Check that the chosen kernel supports the chosen kprobes and options. Raises: CliError.

    `is_limited`: whether option --limit is given.
    """
    machine = options.machine
    if options.vmcore is not None and (machine.image is not None or options.kprobes == KERNEL_KPROBES):
        why = "not possible with --image or --kprobes kernel; leave these out"
        raise CliError(f"--vmcore: {why}", ExitStatus.USAGE)
    if options.vmcore is not None and machine.clock != CLOCKS[0]:
        raise CliError(f"--clock {machine.clock}: not possible with --vmcore; leave it out", ExitStatus.USAGE)
    _check_strategy(options)
    if options.modules and machine.image is None:
        why = "no distribution's kernel given; add --image, or leave it out"
        raise CliError(f"--modules: {why}", ExitStatus.USAGE)
    if options.kprobes == KERNEL_KPROBES and machine.image is None:
        why = "no kernel given; add --image with a vmlinuz, a vmlinux, a .deb or host"
        raise CliError(f"--kprobes kernel: {why}", ExitStatus.USAGE)
    if options.cpu is not None and (options.vmcore is not None or not runs_linux(options)):
        why = "only possible with a distribution's kernel; add --image, or leave it out"
        raise CliError(f"--cpu: {why}", ExitStatus.USAGE)
    for path in options.modules:
        if not os.path.exists(path):
            raise CliError(f"--modules: {path}: {os.strerror(ENOENT)}", ExitStatus.USAGE)
    if not runs_linux(options):
        try:
            profile.check_architecture(machine.profile, machine.arch)
        except KernelError as error:
            raise CliError(f"--profile: {error.strerror}", ExitStatus.USAGE) from error
        if machine.clock == MODEL_CLOCK and machine.arch == "i386":
            raise CliError("--clock model: not on i386; use --arch x86_64 or riscv64", ExitStatus.USAGE)
        if options.modules:
            why = "only possible with a distribution's kernel; leave it out"
            raise CliError(f"--modules: {why}", ExitStatus.USAGE)
        return
    if options.isolate:
        raise CliError("--isolate: not possible with a distribution's kernel; leave it out", ExitStatus.USAGE)
    if is_limited:
        raise CliError(
            "--limit: not possible with a distribution's kernel; leave it out",
            ExitStatus.USAGE,
        )
    if machine.arch != "x86_64" or machine.cpus != 1:
        why = "a distribution's kernel has one CPU, of the architecture in its file; leave these out"
        raise CliError(f"--arch, --cpus: {why}", ExitStatus.USAGE)
    if options.kprobes == KERNEL_KPROBES:
        _check_kernel_decides(options)
        return
    if machine.profile not in (*LINUX_PROFILES, *profile.RISCV_PROFILES):
        known = " or ".join(LINUX_PROFILES)
        remedy = f"use {known}, or leave it out: the kernel's version decides"
        raise CliError(f"--profile: not possible with a distribution's kernel; {remedy}", ExitStatus.USAGE)
    for option, value in (("--return-hook", machine.return_hook), ("--save-regs", machine.save_regs)):
        if value is not None:
            why = "not possible with kprobefs's kprobes over a distribution's kernel; leave it out"
            raise CliError(f"{option}: {why}", ExitStatus.USAGE)


def _check_kernel_decides(options: MountOptions) -> None:
    """Check that no option asks for properties that the kernel's own kprobes determine. Raises: CliError."""
    machine = options.machine
    for option, is_given in (
        ("--profile", not options.follows_version),
        ("--return-hook", machine.return_hook is not None),
        ("--save-regs", machine.save_regs is not None),
    ):
        if is_given:
            why = "not possible with --kprobes kernel, whose kernel decides; leave it out"
            raise CliError(f"{option}: {why}", ExitStatus.USAGE)


def chosen_cpu(name: str) -> ProductionCpu:
    """Return the CPU that option --cpu names: a known model, `host`, or the path of a CPU's archive.

    Such an archive is a text file with the contents of files in /proc and /sys. Raises: CliError (unknown, or
    an unreadable archive).
    """
    from emulated_kernel.guests.linux.cpu.cpu_archive import production_cpu
    from emulated_kernel.guests.linux.cpu.cpu_models import MODELS

    try:
        return production_cpu(name)
    except KernelError as error:
        raise CliError(f"--cpu {name}: {error.strerror}", ExitStatus.USAGE) from error
    except OSError as error:
        known = f"give {HOST}, the archive of a CPU, or one of {', '.join(MODELS)}"
        raise CliError(f"--cpu {name}: {error.strerror or error}; {known}", ExitStatus.USAGE) from error


def _check_strategy(options: MountOptions) -> None:
    machine = options.machine
    if machine.strategy is None:
        return
    if options.kprobes == KERNEL_KPROBES or options.vmcore is not None:
        why = "not possible with --kprobes kernel or --vmcore; leave it out"
        raise CliError(f"--strategy: {why}", ExitStatus.USAGE)
    try:
        profile.with_strategy(profile.profile_named(machine.profile), machine.strategy)
    except KernelError as error:
        raise CliError(f"--strategy: {error.strerror}", ExitStatus.USAGE) from error


def runs_linux(options: MountOptions) -> bool:
    """Return True if the options select a distribution's kernel or a vmcore."""
    image = options.machine.image
    if options.kprobes == KERNEL_KPROBES or options.vmcore is not None:
        return True
    return image is not None and _is_linux(image)


def _is_linux(image: Path) -> bool:
    if str(image) == HOST:
        return True
    from emulated_kernel.image.linux.open_image import is_linux

    try:
        return is_linux(image)
    except OSError:
        return False


def check_state(options: MountOptions) -> None:
    """Check that --state is outside of kprobefs's mounts, because a daemon could otherwise wait for itself.

    Raises: CliError (the directory is inside a mount).
    """
    from kprobefs.common import mountpoints

    if options.state is not None and mountpoints.is_inside(options.state, options.directory):
        raise CliError(f"--state {options.state}: inside a mount point", ExitStatus.USAGE)
