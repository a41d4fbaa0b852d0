"""The command-line parser: each command with its options."""

from __future__ import annotations

import argparse
import os
import re
import sys

from emulated_kernel.util.config import MAX_SEED
from kprobefs import __version__
from kprobefs.common.errors import CliError, ExitStatus

# Not from typing, which takes longer to import than most modules here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

    from _typeshed import SupportsWrite

EPILOG = """\
exit status: 0 success, 1 failure, 2 wrong usage, 3 kprobefs is not mounted;
4 busy, 5 panicked, 6 hung, 7 stale (`status` returns the highest of these over
all mounts);
run: the status of the command, or 125 if the mount failed, 126 if the command
can't be executed, 127 if it doesn't exist.
"""
MAX_CPUS = 64
"""Maximum number of CPUs of an emulated machine."""
_MARGIN = 2
"""Number of columns at the right of help texts that stay free, as in argparse's own formatter."""
FLAGS = ("noexec", "noatime", "sync", "dirsync")
"""Options of mount(8) that `kprobefs mount` accepts, and passes to FUSE."""
REFUSED_FLAGS = {
    "ro": "not possible, since the files are there to be written; restrict access by file modes",
    "suid": "not possible, since FUSE mounts are nosuid; leave it out",
    "dev": "not possible, since FUSE mounts are nodev; leave it out",
}
"""Option of mount(8) that a kprobefs mount cannot have -> reason and remedy."""
_FILES = {"DIR": "a directory", **dict.fromkeys(("ELF", "F", "FILE", "KERNEL", "PATH"), "a file")}
"""Placeholder of an argument in help texts, such as DIR -> what the argument must name."""
BENCH_OPTIONS = {
    "hit": ("arch", "profile", "hits", "rounds", "cpus"),
    "kinds": ("arch", "hits", "rounds"),
    "probes": ("arch", "profile", "rounds", "count"),
    "return": ("arch", "profile", "hits", "rounds", "tasks", "cpus", "memory"),
}
"""Name of a benchmark -> names of the options that it accepts."""
BENCHES = (
    "hit: cost of a hit in each mode; kinds: cost of each kind of probe; "
    "probes: registration of many probes; return: cost of a hooked return with each shadow stack"
)
"""Help text of the benchmarks."""


class _HelpFormatter(argparse.HelpFormatter):
    """Formatter of help texts that finds the terminal's width without shutil, which imports decompressors."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=terminal_columns() - _MARGIN)


class _ArgumentParser(argparse.ArgumentParser):
    """Argument parser that reports wrong usage on one line, as a CliError."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_HelpFormatter, **options)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        # An empty name, as from a variable that is not set, would mean the current directory.
        if not arg_string and action.metavar in _FILES:
            raise argparse.ArgumentError(action, f"empty name; give {_FILES[action.metavar]}")
        return super()._get_value(action, arg_string)

    def error(self, message: str) -> NoReturn:
        raise CliError(f"{message} ({self.prog} --help)", ExitStatus.USAGE)

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        # argparse's own method hides errors of the write.
        (file or sys.stderr).write(message)


class _CommandParser(_ArgumentParser):
    """The parser of one command, which is built when it is used.

    Building the parsers of all commands takes longer than most commands, which use one of them.
    """

    def __init__(self, *, add_arguments: Callable[[argparse.ArgumentParser], object], **options: Any) -> None:
        """Store what builds the parser when it is first used.

        `add_arguments`: function that adds the command's arguments. `options`: arguments of
        argparse.ArgumentParser().
        """
        # The attributes of the base class are missing until __getattr__() builds the parser.
        self._unbuilt: tuple[Callable[[argparse.ArgumentParser], object], dict[str, Any]] | None
        self._unbuilt = add_arguments, options

    def __getattr__(self, name: str) -> Any:
        unbuilt = self.__dict__.get("_unbuilt")
        if unbuilt is None:
            raise AttributeError(name)
        self._unbuilt = None
        add_arguments, options = unbuilt
        super().__init__(**options)
        add_arguments(self)
        self.set_defaults(prog=self.prog)
        return getattr(self, name)


class _OneKernel(argparse.Action):
    """Action of an option that names the one kernel of a command; it refuses a repeated option."""

    several = "kernel; check and coverage compare several"
    """End of the error message about a repeated option: what it names, and the commands that take several."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        del option_string
        if getattr(namespace, self.dest) is not None:
            command = parser.prog.rpartition(" ")[2]
            raise argparse.ArgumentError(self, f"{command} takes one {self.several}")
        setattr(namespace, self.dest, values)


class _OneCpu(_OneKernel):
    """Action of an option that names a CPU: it refuses a repeated option."""

    several = "CPU; check and matrix take several"


def terminal_columns() -> int:
    """Return the width of the terminal: $COLUMNS, else the width of standard output, else 80.

    Mirrors: shutil.get_terminal_size().
    """
    try:
        columns = int(os.environ["COLUMNS"])
    except (KeyError, ValueError):
        columns = 0
    if columns <= 0:
        try:
            columns = os.get_terminal_size(1).columns
        except OSError:
            columns = 0
    return columns or 80


def program_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole program, which stores the name of the command in `chosen`."""
    parser = _ArgumentParser(
        prog="kprobefs",
        description="Mount Linux's kprobes control files over an emulated kernel, in any directory.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"kprobefs {__version__}")
    commands = parser.add_subparsers(
        title="commands", dest="chosen", required=True, metavar="COMMAND", parser_class=_CommandParser
    )
    for name, text, add_arguments in _COMMANDS:
        description = f"{text[:1].upper()}{text[1:]}."
        commands.add_parser(name, help=text, description=description, add_arguments=add_arguments)
    return parser


def machine_options(words: Sequence[str]) -> list[str]:
    """Return the names, such as --arch, of those options in `words` that concern the emulated machine."""
    parser = _ArgumentParser(add_help=False)
    _add_machine_options(parser)
    nothing = argparse.Namespace(**dict.fromkeys(vars(parser.parse_args([]))))
    given, _ = parser.parse_known_args(words, nothing)
    return [f"--{name.replace('_', '-')}" for name, value in vars(given).items() if value is not None]


def mount_parser() -> argparse.ArgumentParser:
    """Return the parser of `kprobefs mount`, for callers that only check its options."""
    parser = _ArgumentParser(prog="kprobefs mount", add_help=False)
    _add_mount_arguments(parser)
    return parser


def _add_mount_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("directory", metavar="DIR", help="empty directory to mount on")
    command.add_argument(
        "-f", "--foreground", action="store_true", help="serve in this process until a signal ends it"
    )
    command.add_argument("--log", metavar="FILE", help="write the daemon's log to FILE")
    command.add_argument("--mkdir", action="store_true", help="create the directory if it does not exist")
    command.add_argument(
        "-o",
        action="extend",
        type=_flags,
        default=[],
        metavar="OPTIONS",
        dest="flags",
        help=f"mount with these options of mount(8), separated by commas: {', '.join(FLAGS)}",
    )
    command.add_argument(
        "--state",
        metavar="DIR",
        help="keep state in this directory: the next daemon restores the probes and "
        "shows the records in instances/last",
    )
    _add_machine_options(command)


def _add_umount(command: argparse.ArgumentParser) -> None:
    _add_directory(command, "directory of the mount")
    command.add_argument("--force", action="store_true", help="kill a daemon that does not end")
    command.add_argument(
        "--stale", action="store_true", help="remove only a stale mount whose daemon is gone"
    )


def _add_status(command: argparse.ArgumentParser) -> None:
    _add_directory(command, "only this mount (default: all)")
    command.add_argument("--json", action="store_true", help="print a JSON array")


def _add_trace(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "probes",
        metavar="PROBE",
        nargs="*",
        help="p:PLACE ARGS, r:PLACE ARGS, a line of kprobe_events, or t:GROUP:EVENT",
    )
    command.add_argument(
        "--graph",
        metavar="FUNCTION",
        action="append",
        default=[],
        help="record the calls within this function; may be repeated",
    )
    command.add_argument("--stack", action="store_true", help="record the stack at each hit")
    command.add_argument(
        "-f",
        "--filter",
        default="",
        help="record only the hits that this event filter accepts (for one probe: PROBE if FILTER)",
    )
    command.add_argument(
        "-m", "--mount", metavar="DIR", help="trace on this mount (default: a temporary mount)"
    )
    command.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write the records to FILE: .json, .trace.json (Perfetto, Speedscope), .folded (flame graphs), "
        ".dat (trace-cmd), or text (default: text to standard output)",
    )
    command.add_argument("--json", action="store_true", help="print each record as a JSON object on a line")
    _add_machine_options(command)
    command.usage = f"{command.prog} [OPTION...] [PROBE...] -- CMD..."


def _add_tour(command: argparse.ArgumentParser) -> None:
    from kprobefs.mount_options import ARCHITECTURES

    command.add_argument(
        "chapter",
        metavar="CHAPTER",
        nargs="?",
        choices=("probes", "optimized"),
        default="probes",
        help="probes: a first probe; optimized: the stages in which a jump is written (default: %(default)s)",
    )
    command.add_argument(
        "--arch",
        choices=ARCHITECTURES,
        default="x86_64",
        help="architecture of the emulated machine (default: %(default)s)",
    )


def _add_top(command: argparse.ArgumentParser) -> None:
    _add_directory(command, "mount to use (default: $KPROBEFS, or the only mount)")
    command.add_argument(
        "-d", "--delay", type=_seconds, default=1.0, metavar="S", help="seconds between updates (default: 1)"
    )
    command.add_argument("-n", "--count", type=_count, metavar="N", help="end after N updates")
    command.add_argument("--json", action="store_true", help="print each update as a JSON array on a line")


def _add_reboot(command: argparse.ArgumentParser) -> None:
    _add_directory(command, "directory of the mount")


def _add_run(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--as-system",
        action="store_true",
        help="run in namespaces with the mount at /sys/kernel/tracing and /sys/kernel/debug too",
    )
    command.add_argument(
        "--real-root",
        action="store_true",
        help="with --as-system: keep root's rights; the host's tracefs is then within reach",
    )
    _add_machine_options(command)
    command.add_argument("command", nargs=argparse.REMAINDER, metavar="[--] CMD...")


def _add_images(command: argparse.ArgumentParser) -> None:
    command.add_argument("action", nargs="?", choices=("fetch",), help="fetch kernels with apt")
    command.add_argument(
        "names",
        metavar="NAME",
        nargs="*",
        help="(fetch) kernels: debian:SUITE[/FLAVOUR], for example debian:bookworm/cloud; "
        "flavours: amd64 (default), cloud, rt, arm64, riscv64",
    )
    form = command.add_mutually_exclusive_group()
    place = "~/.cache/kprobefs/kernels, which $XDG_CACHE_HOME moves"
    form.add_argument("--clear", action="store_true", help=f"remove the cached ones in {place}")
    form.add_argument("--json", action="store_true", help="print a JSON array, with sizes in bytes")


def _add_apply(command: argparse.ArgumentParser) -> None:
    _add_mount_option(command)
    command.add_argument(
        "files",
        metavar="FILE",
        nargs="*",
        help="files to apply; - is standard input (default: *.probes in the probes.d directories)",
    )


def _add_save(command: argparse.ArgumentParser) -> None:
    _add_mount_option(command)
    command.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="write to FILE; - is standard output (default: standard output)",
    )


def _add_install_service(command: argparse.ArgumentParser) -> None:
    command.add_argument("--user", action="store_true", help="install for the service manager of this user")
    command.add_argument(
        "--root", metavar="DIR", default="/", help="install below DIR, for packages and images (default: /)"
    )


def _add_completion(command: argparse.ArgumentParser) -> None:
    command.add_argument("shell", choices=("bash", "zsh", "fish"), help="shell that evaluates the code")


def _add_djprobe_analyze(command: argparse.ArgumentParser) -> None:
    command.add_argument("elf", metavar="ELF", nargs="?", help="kernel or program for x86")
    command.add_argument("place", metavar="PLACE", help="address (0x...) or SYMBOL[+OFFSET]")
    command.add_argument(
        "--image",
        metavar="KERNEL",
        help="analyze this vmlinuz, vmlinux or Debian package instead of ELF, or the host's (host)",
    )
    command.add_argument(
        "--debug-info",
        metavar="FILE",
        help="file with the debug information (default: ELF itself, or the file that debuggers use)",
    )
    command.add_argument(
        "--bug-size",
        type=int,
        default=2,
        metavar="N",
        help="bytes of a BUG(); i386 kernels before 2.6.20 need 8 (default: %(default)s)",
    )
    command.add_argument("--json", action="store_true", help="print a JSON object")


def _add_directory(command: argparse.ArgumentParser, about: str) -> None:
    """Add the mount to a command's arguments: as the argument DIR, or by option -m.

    `about`: help text.
    """
    command.add_argument("directory", metavar="DIR", nargs="?", help=about)
    command.add_argument("-m", "--mount", metavar="DIR", dest="mount", help="the same as DIR")


def _add_mount_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-m", "--mount", metavar="DIR", help="mount to use (default: $KPROBEFS, or the only mount)"
    )


def _add_matrix(command: argparse.ArgumentParser) -> None:
    from kprobefs.mount_options import ARCHITECTURES, CLOCKS, KPROBES, PROFILES

    command.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="a distribution's kernel, as for run; may be repeated",
    )
    command.add_argument(
        "--kprobes",
        choices=KPROBES,
        action="append",
        default=[],
        help="way of probing the distributions' kernels; may be repeated (default: kprobefs)",
    )
    command.add_argument(
        "--arch",
        choices=ARCHITECTURES,
        action="append",
        default=[],
        help="kprobefs's own kernel for this architecture; may be repeated",
    )
    command.add_argument(
        "--profile",
        choices=PROFILES,
        metavar="NAME",
        action="append",
        default=[],
        help="profile of kprobefs's own kernels; may be repeated",
    )
    _add_cpu(command, several=True)
    command.add_argument("--clock", choices=CLOCKS, help="time that timestamps follow (default: virtual)")
    command.add_argument("--jobs", type=_count, metavar="N", help="number of kernels at a time (default: 1)")
    _add_scheduler(command, "run the command on the workers of the Dask cluster with this scheduler")
    command.add_argument(
        "--logs", metavar="DIR", default="kprobefs-matrix", help="directory for logs (default: %(default)s)"
    )
    command.add_argument("--junit", metavar="FILE", help="write a JUnit report to FILE")
    command.add_argument("--json", action="store_true", help="print a JSON array in place of the table")
    command.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD...")


def _add_coverage(command: argparse.ArgumentParser) -> None:
    what = command.add_mutually_exclusive_group()
    what.add_argument(
        "--arch", metavar="A", help="the built-in kernel of this architecture (default: x86_64)"
    )
    what.add_argument(
        "--image",
        metavar="F",
        action="append",
        default=[],
        help="a vmlinuz, a vmlinux, a Debian package, or host (the running kernel); may be repeated",
    )
    what.add_argument("--functions", metavar="FILE", help="recorded functions with their tables, in JSON")
    what.add_argument("--vmcore", metavar="F", help="the kernel in this ELF vmcore, as it was running")
    command.add_argument(
        "--profile",
        metavar="P",
        help="profile whose rules apply (default: by the kernel's version and architecture)",
    )
    _add_cpu(command)
    _add_planned_kprobes(command)
    _add_strategy(command)
    command.add_argument(
        "--function", metavar="PATTERN", help="count only functions with such names, as tcp_*"
    )
    command.add_argument(
        "--jobs", type=_count, metavar="N", help="number of processes (default: one for each CPU)"
    )
    _add_scheduler(command, "count on the workers of the Dask cluster with this scheduler")
    command.add_argument(
        "--results", metavar="FILE", help="keep what is finished in FILE; the next run only does the rest"
    )
    command.add_argument("--json", action="store_true", help="print all counts as JSON, also by function")
    command.add_argument(
        "--compare",
        action="store_true",
        help="print one table for all kernels, with the functions that differ",
    )
    command.add_argument(
        "--html", metavar="DIR", help="write pages to DIR: an index, and a listing for each function"
    )
    command.add_argument("--plot", metavar="FILE", help="write the shares as a picture (SVG) to FILE")


def _add_scheduler(command: argparse._ActionsContainer, text: str) -> None:
    command.add_argument("--scheduler", metavar="ADDRESS", help=f"{text} (needs kprobefs[cluster])")


def _add_cpu(command: argparse._ActionsContainer, *, several: bool = False) -> None:
    """Add option --cpu, which may be repeated if `several` is true."""
    text = (
        "CPU of the machine with the distribution's kernel: a model (milan, ice-lake-sp, ...), host, or an "
        "archive of the machine's files"
    )
    if several:
        command.add_argument(
            "--cpu", metavar="C", action="append", default=[], help=f"{text}; may be repeated"
        )
    else:
        command.add_argument("--cpu", metavar="C", action=_OneCpu, help=text)


def _add_planned_kprobes(command: argparse._ActionsContainer) -> None:
    from kprobefs.mount_options import KPROBES

    command.add_argument(
        "--kprobes",
        choices=KPROBES,
        default=KPROBES[0],
        help="answer for kprobefs's kprobes, or for those of the kernel itself; they differ on arm64 and "
        "RISC-V (default: %(default)s)",
    )


def _add_debug_info(command: argparse.ArgumentParser) -> None:
    what = command.add_mutually_exclusive_group()
    what.add_argument(
        "--arch", metavar="A", help="the built-in kernel of this architecture (default: x86_64)"
    )
    what.add_argument(
        "--image",
        metavar="F",
        action=_OneKernel,
        help="a vmlinuz, a vmlinux, a Debian package, or host (the running kernel)",
    )
    command.add_argument(
        "-o", "--output", metavar="FILE", help="file to write (default: vmlinux-RELEASE.debug)"
    )


def _add_explain(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "places",
        metavar="PLACE",
        nargs="+",
        help="SYMBOL, SYMBOL+OFFSET, MODULE:SYMBOL[+OFFSET], FILE:LINE or an address (0x...)",
    )
    what = command.add_mutually_exclusive_group()
    what.add_argument(
        "--arch", metavar="A", help="the built-in kernel of this architecture (default: x86_64)"
    )
    what.add_argument(
        "--image",
        metavar="F",
        action=_OneKernel,
        help="a vmlinuz, a vmlinux, a Debian package, or host (the running kernel)",
    )
    what.add_argument(
        "--vmcore", metavar="F", action=_OneKernel, help="the kernel in this ELF vmcore, as it was running"
    )
    command.add_argument(
        "--profile",
        metavar="P",
        help="profile whose rules apply (default: by the kernel's version and architecture)",
    )
    _add_cpu(command)
    _add_planned_kprobes(command)
    _add_strategy(command)
    command.add_argument(
        "--debug-info",
        metavar="FILE",
        help="file with the kernel's debug information, for FILE:LINE (default: an installed one, or from "
        "DEBUGINFOD_URLS)",
    )
    command.add_argument(
        "--function", action="store_true", help="list all instructions of the function, not only those nearby"
    )
    command.add_argument("--json", action="store_true", help="print a JSON array")
    command.add_argument("--svg", metavar="FILE", help="write a picture of the listing to FILE, not the text")
    command.add_argument(
        "--html", metavar="FILE", help="write a page with all its parts to FILE, not the text"
    )
    command.add_argument(
        "--stages",
        metavar="FILE",
        help="write a picture of the text while the jump is written and removed, in kprobefs's own kernel",
    )


def _add_check(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="file of definitions, as for apply; - is standard input",
    )
    what = command.add_mutually_exclusive_group()
    what.add_argument(
        "--arch", metavar="A", help="the built-in kernel of this architecture (default: x86_64)"
    )
    what.add_argument(
        "--image",
        metavar="F",
        action="append",
        default=[],
        help="a vmlinuz, a vmlinux, a Debian package, or host (the running kernel); may be repeated",
    )
    what.add_argument("--vmcore", metavar="F", help="the kernel in this ELF vmcore, as it was running")
    command.add_argument(
        "--profile",
        metavar="P",
        help="profile whose rules apply (default: by the kernel's version and architecture)",
    )
    _add_cpu(command, several=True)
    _add_planned_kprobes(command)
    _add_strategy(command)
    command.add_argument("--strict", action="store_true", help="exit with status 1 for a warning, too")
    command.add_argument(
        "--allow",
        metavar="RULE",
        action="append",
        default=[],
        help="leave out the warnings of this rule, such as needs-module; may be repeated",
    )
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON array")
    form.add_argument("--sarif", action="store_true", help="print a SARIF 2.1.0 log, for code hosts")


def _add_bench(command: argparse.ArgumentParser) -> None:
    from kprobefs.mount_options import ARCHITECTURES, PROFILES

    command.add_argument("what", choices=tuple(BENCH_OPTIONS), metavar="WHAT", help=BENCHES)
    command.add_argument("--arch", choices=ARCHITECTURES, help="architecture to measure (default: x86_64)")
    command.add_argument(
        "--profile",
        choices=PROFILES,
        metavar="P",
        help="(hit, probes, return) measure only this profile's modes",
    )
    command.add_argument("--hits", type=_count, metavar="N", help="number of hits per round (default: 20000)")
    command.add_argument(
        "--rounds", type=_count, metavar="N", help="number of rounds; medians are reported (default: 9)"
    )
    command.add_argument(
        "--count", type=_count, metavar="N", help="(probes) number of probes (default: 10000)"
    )
    command.add_argument(
        "--tasks",
        type=_count,
        nargs="+",
        metavar="N",
        help="(return) numbers of tasks in the hooked function",
    )
    command.add_argument("--cpus", type=_cpus, nargs="+", metavar="N", help="(hit, return) numbers of CPUs")
    command.add_argument(
        "--memory", action="store_true", help="(return) print the memory of each shadow stack instead"
    )
    command.add_argument("--json", action="store_true", help="print JSON")


def _add_machine_options(parser: argparse.ArgumentParser) -> None:
    from kprobefs.mount_options import (
        ARCHITECTURES,
        CLOCKS,
        KPROBES,
        LAYOUTS,
        PROFILES,
        RETURN_HOOKS,
        SAVE_REGS,
    )

    group = parser.add_argument_group("the emulated machine")
    group.add_argument(
        "--arch",
        choices=ARCHITECTURES,
        default="x86_64",
        help="architecture of the emulated machine (default: %(default)s)",
    )
    group.add_argument(
        "--image",
        metavar="FILE",
        help="kernel to run: an image, a distribution's vmlinuz or package, or host (default: built in)",
    )
    group.add_argument(
        "--modules",
        metavar="PATH",
        action="append",
        default=[],
        help="package or directory with more modules of the distribution's kernel; can be repeated",
    )
    group.add_argument(
        "--vmcore",
        metavar="FILE",
        help="mount the kernel captured in this ELF vmcore "
        "(QEMU dump-guest-memory, virsh dump --memory-only)",
    )
    _add_cpu(group)
    group.add_argument(
        "--kprobes",
        choices=KPROBES,
        default=KPROBES[0],
        help="use kprobefs's kprobes, or those of the kernel given by --image (default: %(default)s)",
    )
    group.add_argument(
        "--layout",
        choices=LAYOUTS,
        default="full",
        help="full: kprobes/ tracing/ machine/; tracefs: tracefs at the root (default: %(default)s)",
    )
    group.add_argument("--allow-other", action="store_true", help="admit other users, subject to file modes")
    group.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="limit a resource, as in machine/limits: probes, instances, open_files, "
        "scratch_bytes or run_budget_ms; may be repeated",
    )
    group.add_argument(
        "--isolate",
        action="store_true",
        help="ignore host processes that do not use the mount and number clients from PID 1000, "
        "for reproducible traces",
    )
    group.add_argument(
        "--cpus",
        type=_cpus,
        metavar="N",
        help="number of CPUs (default: 1; with run --as-system that of the host)",
    )
    group.add_argument(
        "--seed",
        type=_seed,
        metavar="N",
        help="seed of the virtual clock; the same seed gives the same trace (default: 1)",
    )
    group.add_argument(
        "--clock",
        choices=CLOCKS,
        default="virtual",
        help="time that timestamps follow (default: %(default)s)",
    )
    group.add_argument(
        "--profile",
        choices=PROFILES,
        metavar="NAME",
        help=f"kprobes feature set to emulate: %(choices)s (default: {PROFILES[0]}, or with a distribution's "
        "kernel that of its version)",
    )
    _add_strategy(group)
    group.add_argument(
        "--return-hook",
        choices=RETURN_HOOKS,
        metavar="NAME",
        help="shadow stack that keeps the return addresses of probed functions: %(choices)s "
        "(default: that of the profile)",
    )
    group.add_argument(
        "--save-regs",
        choices=SAVE_REGS,
        help="registers that a handler in guest code saves (default: those of the profile)",
    )


def _add_strategy(command: argparse._ActionsContainer) -> None:
    from kprobefs.mount_options import STRATEGIES

    command.add_argument(
        "--strategy",
        choices=STRATEGIES,
        help="optimization policy; extended also optimizes where Linux refuses (default: Linux's)",
    )


def _flags(text: str) -> list[str]:
    words = text.split(",")
    for word in words:
        if word not in FLAGS:
            why = REFUSED_FLAGS.get(word, f"no such option; use {', '.join(FLAGS)}")
            raise argparse.ArgumentTypeError(f"{word}: {why}")
    return words


def _cpus(text: str) -> int:
    return _between(text, 1, MAX_CPUS)


def _count(text: str) -> int:
    return _between(text, 1, 1_000_000_000)


def _seed(text: str) -> int:
    return _between(text, 0, MAX_SEED)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text) or not float(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return float(text)


def _between(text: str, least: int, most: int) -> int:
    # int() also accepts underscores, blanks and the digits of all scripts.
    if not re.fullmatch("[0-9]{1,20}", text) or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
    return int(text)


_COMMANDS: tuple[tuple[str, str, Callable[[argparse.ArgumentParser], object]], ...] = (
    ("mount", "mount on an empty directory, and return when the mount answers", _add_mount_arguments),
    ("umount", "end the daemon of a mount, and unmount", _add_umount),
    ("status", "show the mounts and their conditions", _add_status),
    ("trace", "run a command with probes (p:vfs_read count=$arg3), and show their records", _add_trace),
    ("tour", "walk through probing, step by step, on a temporary mount", _add_tour),
    ("top", "watch the probes of a mount: mode, hits per second, cost, reason", _add_top),
    ("reboot", "boot the kernel of a mount again, keeping definitions and records", _add_reboot),
    ("run", "mount, run a command with the path in $KPROBEFS, and unmount", _add_run),
    ("matrix", "run a command on several kernels, and report the results", _add_matrix),
    ("images", "list the distributions' kernels that can be mounted, or fetch a kernel", _add_images),
    ("apply", "apply probe definitions and settings from files", _add_apply),
    ("save", "print the current probes and settings in `apply` format", _add_save),
    ("install-service", "install the systemd units", _add_install_service),
    ("completion", "print the completion code for a shell", _add_completion),
    (
        "djprobe-analyze",
        "print how many bytes a djprobe's jump would replace, or why it can't",
        _add_djprobe_analyze,
    ),
    ("bench", "measure the cost of probes on this machine", _add_bench),
    ("coverage", "count how many instructions of a kernel can be probed and optimized", _add_coverage),
    (
        "explain",
        "explain what a probe at a place of a kernel would do, without running the kernel",
        _add_explain,
    ),
    ("check", "check probe definitions for kernels, without running the kernels", _add_check),
    ("debug-info", "write a kernel's symbols and types to a file for drgn, gdb and crash", _add_debug_info),
)
"""Each command: its name, its help text, and the function that adds its arguments to a parser."""
