"""What the command line takes, command by command."""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING, NoReturn

from emulated_kernel.util.config import MOST_SEED
from kprobefs import __version__
from kprobefs.common.errors import CliError, ExitStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import SupportsWrite

EPILOG = """\
exit status: 0 done, 1 failed, 2 wrong usage, 3 nothing of ours is mounted;
4 busy, 5 panicked, 6 hung, 7 stale (`status` returns the highest of these over
all mounts);
run: the command's own, 125 the mount failed, 126 and 127 the command can't be
run and wasn't found.
"""
MAX_CPUS = 64
FLAGS = ("noexec", "noatime", "sync", "dirsync")
"""Options that mounts of FUSE take from mount(8)."""
BENCH_OPTIONS = {
    "hit": ("arch", "profile", "hits", "rounds", "cpus"),
    "kinds": ("arch", "hits", "rounds"),
    "probes": ("arch", "profile", "rounds", "count"),
    "return": ("arch", "profile", "hits", "rounds", "tasks", "cpus", "memory"),
}
"""What each of them measures by."""
BENCHES = (
    "hit: a hit in each way of taking it; kinds: of each kind of probe; probes: many probes at once; "
    "return: a hooked return with each shadow stack"
)


class _ArgumentParser(argparse.ArgumentParser):
    """Wrong usage takes one line."""

    def error(self, message: str) -> NoReturn:
        raise CliError(f"{message} ({self.prog} --help)", ExitStatus.USAGE)

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        # argparse's own hides that nothing could be written.
        (file or sys.stderr).write(message)


def program_parser() -> argparse.ArgumentParser:
    """What the program takes; `chosen` is the command."""
    from kprobefs.mount_options import ARCHITECTURES

    parser = _ArgumentParser(
        prog="kprobefs",
        description="Linux's kprobes files, mounted anywhere, over an emulated kernel.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"kprobefs {__version__}")
    commands = parser.add_subparsers(title="commands", dest="chosen", required=True, metavar="COMMAND")

    command = commands.add_parser("mount", help="mount on an empty directory; returns when the mount answers")
    _add_mount_arguments(command)

    command = commands.add_parser("umount", help="end the daemon of a mount, and unmount")
    command.add_argument("directory", metavar="DIR")
    command.add_argument("--force", action="store_true", help="kill a daemon that doesn't end")
    command.add_argument(
        "--stale", action="store_true", help="remove only a stale mount whose daemon is gone"
    )

    command = commands.add_parser("status", help="show running mounts")
    command.add_argument("directory", metavar="DIR", nargs="?")
    command.add_argument("--json", action="store_true", help="as a JSON array")

    command = commands.add_parser(
        "trace", help="run a command with probes, and show what they record (p:vfs_read count=$arg3)"
    )
    command.add_argument(
        "probes", metavar="PROBE", nargs="+", help="p:PLACE ARGS, r:PLACE ARGS or t:GROUP:EVENT"
    )
    command.add_argument(
        "-f", "--filter", default="", help="which hits are recorded, as in an event's filter"
    )
    command.add_argument("-m", "--mount", metavar="DIR", help="on this mount (default: one of its own)")
    command.add_argument(
        "-o", "--output", metavar="FILE", help="where records are written (default: standard output)"
    )
    command.add_argument("--json", action="store_true", help="each record as a JSON object in a line")
    _add_machine_options(command)
    command.usage = f"{command.prog} [OPTION...] PROBE [PROBE ...] -- CMD..."

    command = commands.add_parser("tour", help="a walk through probing, step by step, on a mount of its own")
    command.add_argument(
        "--arch", choices=ARCHITECTURES, default="x86_64", help="its processor (default: %(default)s)"
    )

    command = commands.add_parser(
        "top", help="watch the probes of a mount: mode, hits a second, cost, reason"
    )
    command.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        help="which mount (default: $KPROBEFS, or the only one there is)",
    )
    command.add_argument(
        "-d", "--delay", type=_seconds, default=1.0, metavar="S", help="between two looks (default: 1)"
    )
    command.add_argument("-n", "--count", type=_count, metavar="N", help="end after so many looks")
    command.add_argument("--json", action="store_true", help="each look as a JSON array in a line")

    command = commands.add_parser(
        "reboot", help="boot a mount's kernel anew, with what is defined and recorded"
    )
    command.add_argument("directory", metavar="DIR")

    command = commands.add_parser("run", help="run a command with a mount in $KPROBEFS, then unmount")
    command.add_argument(
        "--as-system",
        action="store_true",
        help="in namespaces of its own, with the mount at /sys/kernel/tracing and /sys/kernel/debug too",
    )
    command.add_argument(
        "--real-root",
        action="store_true",
        help="with --as-system: keep root's rights; the host's tracefs is then within reach",
    )
    _add_machine_options(command)
    command.add_argument("command", nargs=argparse.REMAINDER, metavar="[--] CMD...")

    command = commands.add_parser(
        "images", help="list the kernels that have been booted, for mounts to start from"
    )
    form = command.add_mutually_exclusive_group()
    form.add_argument("--clear", action="store_true", help="remove them")
    form.add_argument("--json", action="store_true", help="as a JSON array; sizes in bytes")

    command = commands.add_parser("apply", help="apply probe definitions and settings from files")
    _add_mount_option(command)
    command.add_argument(
        "files",
        metavar="FILE",
        nargs="*",
        help="files to apply (default: *.probes of the probes.d directories; -: stdin)",
    )

    command = commands.add_parser("save", help="print the current probes and settings in `apply` format")
    _add_mount_option(command)
    command.add_argument(
        "file", metavar="FILE", nargs="?", help="where it is written (default: standard output, as -)"
    )

    command = commands.add_parser("install-service", help="put the units where systemd finds them")
    command.add_argument("--user", action="store_true", help="for this user's own manager")
    command.add_argument("--root", metavar="DIR", default="/", help="below DIR, for packages and images")

    command = commands.add_parser("completion", help="print what makes a shell complete kprobefs's commands")
    command.add_argument("shell", choices=("bash", "zsh", "fish"))

    command = commands.add_parser(
        "djprobe-analyze", help="how many bytes of a function djprobe's jump would detour, or why it can't"
    )
    command.add_argument("elf", metavar="ELF", nargs="?", help="a kernel or program for x86")
    command.add_argument("place", metavar="PLACE", help="an address (0x...) or SYMBOL[+OFFSET]")
    command.add_argument(
        "--image", metavar="KERNEL", help="in place of ELF: a vmlinuz, a vmlinux, a Debian package, or host"
    )
    command.add_argument(
        "--debug-info",
        metavar="FILE",
        help="the file of its debug information (default: its own, or the file that debuggers find)",
    )
    command.add_argument(
        "--bug-size",
        type=int,
        default=2,
        metavar="N",
        help="bytes of a BUG(): 8 in kernels for i386 before 2.6.20 (default: %(default)s)",
    )
    command.add_argument("--json", action="store_true", help="as a JSON object")

    _add_bench(commands)
    _add_coverage(commands)
    for action in commands._get_subactions():
        commands.choices[action.dest].description = f"{str(action.help)[:1].upper()}{str(action.help)[1:]}."
    for command in commands.choices.values():
        command.set_defaults(prog=command.prog)
    return parser


def machine_options(words: Sequence[str]) -> list[str]:
    """Those of the emulated machine that are among a command's words."""
    parser = _ArgumentParser(add_help=False)
    _add_machine_options(parser)
    nothing = argparse.Namespace(**dict.fromkeys(vars(parser.parse_args([]))))
    given, _ = parser.parse_known_args(words, nothing)
    return [f"--{name.replace('_', '-')}" for name, value in vars(given).items() if value is not None]


def mount_parser() -> argparse.ArgumentParser:
    """What `kprobefs mount` takes."""
    parser = _ArgumentParser(prog="kprobefs mount", add_help=False)
    _add_mount_arguments(parser)
    return parser


def _add_mount_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("directory", metavar="DIR")
    command.add_argument(
        "-f", "--foreground", action="store_true", help="serve in this process until a signal"
    )
    command.add_argument("--log", metavar="FILE", help="write the daemon's log there")
    command.add_argument("--mkdir", action="store_true", help="make the directory where there is none")
    command.add_argument(
        "-o",
        action="append",
        choices=FLAGS,
        default=[],
        dest="flags",
        help="as mount(8)'s option of that name; more than once",
    )
    command.add_argument(
        "--state",
        metavar="DIR",
        help="keep probes and records there: the next daemon has the probes, and instances/last the records",
    )
    _add_machine_options(command)


def _add_mount_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-m", "--mount", metavar="DIR", help="which mount (default: $KPROBEFS, or the only one there is)"
    )


def _add_coverage(commands: argparse._SubParsersAction[_ArgumentParser]) -> None:
    command = commands.add_parser("coverage", help="how much of a kernel can be probed, and by a jump")
    what = command.add_mutually_exclusive_group()
    what.add_argument("--arch", metavar="A", help="our own kernel for it (default: x86_64)")
    what.add_argument(
        "--image", metavar="F", help="a vmlinuz, a vmlinux, a Debian package, or host: the one that runs here"
    )
    what.add_argument("--functions", metavar="FILE", help="recorded functions with their tables, as JSON")
    command.add_argument(
        "--profile",
        metavar="P",
        help="with whose rules (default: linux-6.1; for RISC-V riscv-optprobes-2023)",
    )
    command.add_argument("--json", action="store_true", help="all that was counted, by symbol too")


def _add_bench(commands: argparse._SubParsersAction[_ArgumentParser]) -> None:
    from kprobefs.mount_options import ARCHITECTURES, PROFILES

    command = commands.add_parser("bench", help="measure what hits and probes cost here")
    command.add_argument("what", choices=tuple(BENCH_OPTIONS), metavar="WHAT", help=BENCHES)
    command.add_argument("--arch", choices=ARCHITECTURES, help="whose kernel is measured (default: x86_64)")
    command.add_argument(
        "--profile", choices=PROFILES, metavar="P", help="hit, probes, return: in the ways of that one alone"
    )
    command.add_argument("--hits", type=_count, metavar="N", help="hits in a round (default: 20000)")
    command.add_argument("--rounds", type=_count, metavar="N", help="of which medians are shown (default: 9)")
    command.add_argument("--count", type=_count, metavar="N", help="probes: how many probes (default: 10000)")
    command.add_argument(
        "--tasks", type=_count, nargs="+", metavar="N", help="return: tasks in the hooked function"
    )
    command.add_argument("--cpus", type=_cpus, nargs="+", metavar="N", help="hit, return: on so many CPUs")
    command.add_argument("--memory", action="store_true", help="return: memory of each shadow stack instead")
    command.add_argument("--json", action="store_true", help="as JSON")


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
        "--arch", choices=ARCHITECTURES, default="x86_64", help="its processor (default: %(default)s)"
    )
    group.add_argument(
        "--image",
        metavar="FILE",
        help="the kernel to run (default: our own); a distribution's vmlinuz or .deb too, or host",
    )
    group.add_argument(
        "--vmcore",
        metavar="FILE",
        help="mount the kernel captured in this ELF vmcore "
        "(QEMU dump-guest-memory, virsh dump --memory-only)",
    )
    group.add_argument(
        "--kprobes",
        choices=KPROBES,
        default=KPROBES[0],
        help="use kprobefs's kprobes, or those of the kernel that --image names (default: %(default)s)",
    )
    group.add_argument(
        "--layout",
        choices=LAYOUTS,
        default="full",
        help="full: kprobes/ tracing/ machine/; tracefs: tracefs itself at the root (default: %(default)s)",
    )
    group.add_argument(
        "--allow-other", action="store_true", help="let other users in, as far as the files' modes allow"
    )
    group.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what users may take, as in machine/limits: probes, instances, open_files, scratch_bytes, "
        "run_budget_ms; more than once",
    )
    group.add_argument(
        "--isolate",
        action="store_true",
        help="ignore host processes that do not use the mount and number clients from PID 1000, "
        "for reproducible traces",
    )
    group.add_argument(
        "--cpus", type=_cpus, default=1, metavar="N", help="how many it has (default: %(default)s)"
    )
    group.add_argument(
        "--seed", type=_seed, default=1, metavar="N", help="same seed, same trace (default: 1)"
    )
    group.add_argument(
        "--clock", choices=CLOCKS, default="virtual", help="what timestamps follow (default: %(default)s)"
    )
    group.add_argument(
        "--profile",
        choices=PROFILES,
        default=PROFILES[0],
        metavar="NAME",
        help="which kernel's ways of probing it has: %(choices)s (default: %(default)s)",
    )
    group.add_argument(
        "--return-hook",
        choices=RETURN_HOOKS,
        metavar="NAME",
        help="where return addresses of probed functions are kept: %(choices)s (default: as in the profile)",
    )
    group.add_argument(
        "--save-regs",
        choices=SAVE_REGS,
        help="registers that a handler in guest code saves: live ones, or all (default: as in the profile)",
    )


def _cpus(text: str) -> int:
    return _between(text, 1, MAX_CPUS)


def _count(text: str) -> int:
    return _between(text, 1, 1_000_000_000)


def _seed(text: str) -> int:
    return _between(text, 0, MOST_SEED)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text) or not float(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return float(text)


def _between(text: str, least: int, most: int) -> int:
    # int() alone takes underscores, blanks and the digits of all scripts.
    if not re.fullmatch("[0-9]{1,20}", text) or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from {least} to {most}")
    return int(text)
