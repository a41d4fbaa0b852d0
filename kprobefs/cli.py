"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import errno
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn, TextIO

from kprobefs import __version__
from kprobefs.failure import Exit, Failure, lack, shown

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

    from kprobefs.options import Builder, MountOptions

EPILOG = """\
exit status: 0 done, 1 failed, 2 wrong usage, 3 nothing of ours is mounted;
status: 4 busy, 5 panicked, 6 hung, 7 dead (the highest of all that it shows);
run: the command's own, 125 the mount failed, 126 and 127 the command can't be
run and wasn't found.
"""
MAX_CPUS = 64
FLAGS = ("noexec", "noatime", "sync", "dirsync")
"""Options that mounts of FUSE take from mount(8)."""
SEED_LIMIT = 1 << 63
BENCH_OPTIONS = {
    "hit": ("arch", "hits", "rounds", "cpus"),
    "kinds": ("arch", "hits", "rounds"),
    "probes": ("arch", "rounds", "count"),
    "return": ("arch", "hits", "rounds", "tasks", "cpus", "memory"),
}
"""What each of them measures by."""
IMAGE = ("release", "source", "size")
"""What `images --json` tells of each."""


class _Parser(argparse.ArgumentParser):
    """Wrong usage takes one line."""

    def error(self, message: str) -> NoReturn:
        raise Failure(f"{message} ({self.prog} --help)", Exit.USAGE)

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        # argparse's own hides that nothing could be written.
        (file or sys.stderr).write(message)


def main(arguments: Sequence[str] | None = None, build: Builder | None = None) -> int:
    """Run the program; returns its exit status. `build` replaces what makes the served kernel."""
    _open_standard_streams()
    try:
        status = _run_command(arguments, build)
        sys.stdout.flush()
    except Failure as failure:
        return _complain(str(failure), failure.status)
    except BrokenPipeError:
        # Whoever read our output has enough; the interpreter must not try to flush it again.
        _give_up_output()
        return Exit.FAILURE
    except OSError as error:
        if error.errno == errno.ENOSPC and not error.filename:
            _give_up_output()
        place = f"{error.filename}: " if error.filename else ""
        return _complain(f"{place}{lack(error) or error.strerror or error}", Exit.FAILURE)
    except MemoryError as error:
        return _complain(lack(error), Exit.FAILURE)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return status


def _run_command(arguments: Sequence[str] | None, build: Builder | None) -> int:
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:
        _complete(parser)
    words = list(sys.argv[1:] if arguments is None else arguments)
    if _is_of_mount_fuse(words):
        from kprobefs import mount_helper

        return mount_helper.main(words)
    behind: list[str] = []
    if words[:1] == ["trace"] and "--" in words:
        # argparse takes no options between two lists of words.
        at = words.index("--")
        words, behind = words[:at], words[at + 1 :]
    try:
        parsed, further = parser.parse_known_args(words, argparse.Namespace(behind=behind))
        if further:
            raise Failure(f"unrecognized arguments: {' '.join(further)} ({parsed.prog} --help)", Exit.USAGE)
    except SystemExit as end:
        # --help and --version are done.
        return int(end.code or 0)
    command: Callable[[argparse.Namespace, Builder | None], int] = parsed.function
    return int(command(parsed, build))


def _is_of_mount_fuse(words: Sequence[str]) -> bool:
    """Whether mount.fuse(8) calls, which mount(8) does where there is no mount.fuse.kprobefs in /sbin.

    Mirrors: mount.fuse.c (libfuse 3): SOURCE DIR -o OPTIONS, always with these two words.
    """
    if len(words) != 4 or words[2] != "-o":
        return False
    options = set(words[3].split(","))
    return not options.isdisjoint({"dev", "nodev"}) and not options.isdisjoint({"suid", "nosuid"})


def _complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that completes a command line, and end."""
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(parser)


def _open_standard_streams() -> None:
    """Where the caller has closed one of the three, a file of ours would get its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (for good)


def _give_up_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str, status: Exit) -> Exit:
    _tell(shown(message))
    return status


def _tell(message: str) -> None:
    from kprobefs.terminal import folded

    head, _, rest = folded(f"kprobefs: {message}", sys.stderr).partition(":")
    print(f"{_coloured(f'{head}:', '31', sys.stderr)}{rest}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kprobefs",
        description="Linux's kprobes files, mounted anywhere, over an emulated kernel.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"kprobefs {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    command = commands.add_parser("mount", help="mount on an empty directory; returns when the mount answers")
    _add_mount_arguments(command)
    command.set_defaults(function=_mount)

    command = commands.add_parser("umount", help="end the daemon of a mount, and unmount")
    command.add_argument("directory", metavar="DIR")
    command.add_argument("--force", action="store_true", help="kill a daemon that doesn't end")
    command.add_argument(
        "--dead", action="store_true", help="only what a killed daemon left; anything else stays as it is"
    )
    command.set_defaults(function=_umount)

    command = commands.add_parser("status", help="show running mounts")
    command.add_argument("directory", metavar="DIR", nargs="?")
    command.add_argument("--json", action="store_true", help="as a JSON array")
    command.set_defaults(function=_status)

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
    command.add_argument("-o", "--output", metavar="FILE", help="(default: standard output)")
    command.add_argument("--json", action="store_true", help="each record as a JSON object in a line")
    _add_machine_options(command)
    command.usage = f"{command.prog} [OPTION...] PROBE [PROBE ...] -- CMD..."
    command.set_defaults(function=_trace)

    command = commands.add_parser("tour", help="a walk through probing, step by step, on a mount of its own")
    _add_machine_options(command)
    command.set_defaults(function=_tour)

    command = commands.add_parser(
        "top", help="watch the probes of a mount: mode, hits a second, cost, reason"
    )
    command.add_argument(
        "directory", metavar="DIR", nargs="?", help="(default: $KPROBEFS, or the only mount there is)"
    )
    command.add_argument(
        "-d", "--delay", type=_seconds, default=1.0, metavar="S", help="between two looks (default: 1)"
    )
    command.add_argument("-n", "--count", type=_count, metavar="N", help="end after so many looks")
    command.add_argument("--json", action="store_true", help="each look as a JSON array in a line")
    command.set_defaults(function=_top)

    command = commands.add_parser(
        "reboot", help="boot a mount's kernel anew, with what is defined and recorded"
    )
    command.add_argument("directory", metavar="DIR")
    command.set_defaults(function=_reboot)

    command = commands.add_parser("run", help="run a command with a mount in $KPROBEFS, then unmount")
    command.add_argument(
        "--as-system",
        action="store_true",
        help="in a mount namespace with the mount at /sys/kernel/tracing and /sys/kernel/debug too",
    )
    _add_machine_options(command)
    command.add_argument("command", nargs=argparse.REMAINDER, metavar="[--] CMD...")
    command.set_defaults(function=_run)

    command = commands.add_parser(
        "images", help="list the kernels that have been booted, for mounts to start from"
    )
    form = command.add_mutually_exclusive_group()
    form.add_argument("--clear", action="store_true", help="remove them")
    form.add_argument("--json", action="store_true", help="as a JSON array; sizes in bytes")
    command.set_defaults(function=_images)

    command = commands.add_parser("load", help="define and switch on what files say")
    _add_mount_option(command)
    command.add_argument(
        "files", metavar="FILE", nargs="*", help="(default: *.probes of the probes.d directories; -: stdin)"
    )
    command.set_defaults(function=_load)

    command = commands.add_parser("save", help="write what is defined and switched on, for load")
    _add_mount_option(command)
    command.add_argument("file", metavar="FILE", nargs="?", help="(default: standard output, as -)")
    command.set_defaults(function=_save)

    command = commands.add_parser("install-service", help="put the units where systemd finds them")
    command.add_argument("--user", action="store_true", help="for this user's own manager")
    command.add_argument("--root", metavar="DIR", default="/", help="below DIR, for packages and images")
    command.set_defaults(function=_install_service)

    command = commands.add_parser("completion", help="print what makes a shell complete kprobefs's commands")
    command.add_argument("shell", choices=("bash", "zsh", "fish"))
    command.set_defaults(function=_completion)

    command = commands.add_parser(
        "djprobe-analyze", help="how many bytes of a function djprobe's jump would detour, or why it can't"
    )
    command.add_argument("elf", metavar="ELF", help="a kernel or program for x86 with debug information")
    command.add_argument("place", metavar="PLACE", help="an address (0x...) or SYMBOL[+OFFSET]")
    command.add_argument("--debug-info", metavar="FILE", help="debug information that stands in another file")
    command.add_argument(
        "--bug-size",
        type=int,
        default=2,
        metavar="N",
        help="bytes of a BUG(): 8 in kernels for i386 before 2.6.20 (default: %(default)s)",
    )
    command.add_argument("--json", action="store_true", help="as a JSON object")
    command.set_defaults(function=_djprobe_analyze)

    _add_bench(commands)
    _add_coverage(commands)
    for command in commands.choices.values():
        command.set_defaults(prog=command.prog)
    return parser


def mount_parser() -> argparse.ArgumentParser:
    """What `kprobefs mount` takes."""
    parser = _Parser(prog="kprobefs mount", add_help=False)
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


def _add_coverage(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = commands.add_parser("coverage", help="how much of a kernel can be probed, and by a jump")
    what = command.add_mutually_exclusive_group()
    what.add_argument("--arch", metavar="A", help="our own kernel for it (default: x86_64)")
    what.add_argument(
        "--image", metavar="F", help="a vmlinuz, a vmlinux, a Debian package, or host: the one that runs here"
    )
    what.add_argument("--functions", metavar="FILE", help="recorded functions with their tables, as JSON")
    command.add_argument(
        "--profile", metavar="P", help="(default: linux-6.1; for RISC-V riscv-optprobes-2023)"
    )
    command.add_argument("--json", action="store_true", help="all that was counted, by symbol too")
    command.set_defaults(function=_coverage)


def _add_bench(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = commands.add_parser("bench", help="measure what hits and probes cost here")
    command.add_argument("what", choices=tuple(BENCH_OPTIONS), metavar="WHAT", help=", ".join(BENCH_OPTIONS))
    command.add_argument("--arch", help="(default: x86_64)")
    command.add_argument("--hits", type=_count, metavar="N", help="a round (default: 20000)")
    command.add_argument("--rounds", type=_count, metavar="N", help="(default: 9)")
    command.add_argument("--count", type=_count, metavar="N", help="probes: how many probes (default: 10000)")
    command.add_argument(
        "--tasks", type=_count, nargs="+", metavar="N", help="return: tasks in the hooked function"
    )
    command.add_argument("--cpus", type=_cpus, nargs="+", metavar="N", help="hit, return: on so many CPUs")
    command.add_argument("--memory", action="store_true", help="return: memory of each shadow stack instead")
    command.add_argument("--json", action="store_true", help="as JSON")
    command.set_defaults(function=_bench)


def _add_machine_options(parser: argparse.ArgumentParser) -> None:
    from kprobefs.options import ARCHITECTURES, CLOCKS, DETOURS, ENGINES, LAYOUTS, PROFILES, RETURN_HOOKS

    group = parser.add_argument_group("the emulated machine")
    group.add_argument("--arch", choices=ARCHITECTURES, default="x86_64", help="(default: %(default)s)")
    group.add_argument(
        "--image",
        metavar="FILE",
        help="the kernel to run (default: our own); a distribution's vmlinuz or .deb too, or host",
    )
    group.add_argument(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help="whose kprobes answer: ours, or those of a distribution's kernel (default: %(default)s)",
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
        "--clients-only",
        action="store_true",
        help="see no other processes, number them from 1000 on: the same requests give the same trace",
    )
    group.add_argument("--cpus", type=_cpus, default=1, metavar="N", help="(default: %(default)s)")
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
        "--detour",
        choices=DETOURS,
        help="which registers a handler in guest code saves (default: as in the profile)",
    )


def _cpus(text: str) -> int:
    return _between(text, 1, MAX_CPUS)


def _count(text: str) -> int:
    return _between(text, 1, 1_000_000_000)


def _seed(text: str) -> int:
    return _between(text, 0, SEED_LIMIT - 1)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text) or not float(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return float(text)


def _between(text: str, least: int, most: int) -> int:
    # int() alone takes underscores, blanks and the digits of all scripts.
    if not re.fullmatch("[0-9]{1,20}", text) or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from {least} to {most}")
    return int(text)


def _mount(parsed: argparse.Namespace, build: Builder | None) -> int:
    from pathlib import Path

    from kprobefs import daemon, load, mount
    from kprobefs.options import check_engine, check_state, runs_linux

    options = replace(
        _options(parsed, mount.resolve(parsed.directory)),
        make_directory=parsed.mkdir,
        flags=tuple(parsed.flags),
        state=os.path.abspath(parsed.state) if parsed.state else None,
    )
    check_engine(options)
    check_state(options)
    if options.state is not None and runs_linux(options):
        _complain_of(["--state: a distribution's kernel keeps none, nothing outlives the daemon"])
        options = replace(options, state=None)
    log_file = Path(os.path.abspath(parsed.log)) if parsed.log else None
    builder = build or _builder(options)
    if parsed.foreground:
        daemon.run_in_foreground(options, builder, log_file)
        return Exit.OK
    # Here too, so that the daemon isn't started in vain.
    mount.prepare(options.directory, make=parsed.mkdir, allow_other=options.allow_other)
    daemon.start_in_background(options, builder, log_file)
    if options.state is not None:
        from kprobefs.state_directory import told

        _complain_of([f"--state {shown(options.state)}: {each}" for each in told(options.directory)])
    _complain_of(load.load(options.directory, []))
    return Exit.OK


def _images(parsed: argparse.Namespace, build: Builder | None) -> int:
    del build
    from emulated_kernel.linux import snapshot

    if parsed.clear:
        removed = snapshot.clear()
        print(f"{removed} removed from {shown(str(snapshot.directory()))}")
        return Exit.OK
    found = snapshot.cached()
    if parsed.json:
        import json

        print(json.dumps([{name: getattr(kernel, name) for name in IMAGE} for kernel in found], indent=2))
        return Exit.OK
    for kernel in found:
        release, source = shown(kernel.release or "damaged"), shown(kernel.source or "?")
        print(f"{kernel.size >> 20} MiB  {release}  {source}")
    return Exit.OK


def _load(parsed: argparse.Namespace, build: Builder | None) -> int:
    del build
    from kprobefs import dropins, load

    directory = load.which_mount(parsed.mount)
    if not parsed.files and not dropins.files():
        # No warning: a daemon that begins with nothing doesn't tell of it.
        print(f"nothing to load: no *.probes in {' '.join(map(shown, dropins.directories()))}")
    failed = load.load(directory, parsed.files)
    _complain_of(failed)
    return Exit.FAILURE if failed else Exit.OK


def _save(parsed: argparse.Namespace, build: Builder | None) -> int:
    del build
    from pathlib import Path

    from kprobefs import load

    text = load.saved(load.which_mount(parsed.mount))
    if parsed.file not in (None, "-"):
        Path(parsed.file).write_bytes(text)
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(text)
    return Exit.OK


def _complain_of(failed: Sequence[str]) -> None:
    for message in failed:
        # A message has lines of its own, each escaped already.
        _tell(message)


def _install_service(parsed: argparse.Namespace, build: Builder | None) -> int:
    del build
    from kprobefs.install_service import install

    print("\n".join(map(shown, install(parsed.root, user=parsed.user))))
    return Exit.OK


def _completion(parsed: argparse.Namespace, build: Builder | None) -> int:
    del build
    try:
        from argcomplete.shell_integration import shellcode
    except ImportError:
        raise Failure("the Python package argcomplete is missing: pip install argcomplete") from None
    print(shellcode(["kprobefs"], shell=parsed.shell))
    return Exit.OK


def _umount(parsed: argparse.Namespace, build: Builder | None) -> int:
    del build
    from kprobefs import control, mount

    directory = mount.resolve(parsed.directory)
    if parsed.dead:
        control.unmount_dead(directory)
    else:
        control.unmount(directory, force=parsed.force)
    return Exit.OK


def _status(parsed: argparse.Namespace, build: Builder | None) -> int:
    del build
    from kprobefs import control, mount

    states = control.states(mount.resolve(parsed.directory) if parsed.directory else None)
    if parsed.json:
        import json

        json.dump([state.as_dict() for state in states], sys.stdout, indent=2)
        print()
    elif sys.stdout.isatty() and states:
        from kprobefs.status_table import print_table

        print_table(states)
    else:
        for state in states:
            print(state.condition.value, shown(state.directory), *map(shown, state.details))
    if parsed.directory and not states:
        raise Failure(f"{parsed.directory}: kprobefs isn't mounted there", Exit.NOT_MOUNTED)
    return max((state.condition.status for state in states), default=Exit.OK)


def _trace(parsed: argparse.Namespace, build: Builder | None) -> int:
    if not parsed.behind:
        raise Failure("trace: which command? kprobefs trace PROBE... -- CMD...", Exit.USAGE)
    from contextlib import nullcontext

    from kprobefs import load
    from kprobefs.run import run, run_traced
    from kprobefs.trace import OneLiner

    with open(parsed.output, "w", encoding="utf-8") if parsed.output else nullcontext(sys.stdout) as output:
        tracing = OneLiner(parsed.probes, parsed.filter, output, as_json=parsed.json)
        if parsed.mount:
            return run_traced(load.which_mount(parsed.mount), parsed.behind, tracing)
        options = _options(parsed, "")
        return run(options, build or _builder(options), parsed.behind, tracing=tracing)


def _tour(parsed: argparse.Namespace, build: Builder | None) -> int:
    from kprobefs.run import mounted
    from kprobefs.tour import tour

    options = _options(parsed, "")
    with mounted(options, build or _builder(options)) as base:
        tour(f"{base}/mnt")
    return Exit.OK


def _top(parsed: argparse.Namespace, build: Builder | None) -> int:
    del build
    from kprobefs import load
    from kprobefs.top import top

    top(load.which_mount(parsed.directory), parsed.delay, parsed.count, as_json=parsed.json)
    return Exit.OK


def _reboot(parsed: argparse.Namespace, build: Builder | None) -> int:
    del build
    from kprobefs import control, mount

    control.reboot(mount.resolve(parsed.directory))
    return Exit.OK


def _run(parsed: argparse.Namespace, build: Builder | None) -> int:
    command = parsed.command[1:] if parsed.command[:1] == ["--"] else parsed.command
    if not command:
        raise Failure("run: which command? kprobefs run -- CMD...", Exit.USAGE)
    from kprobefs.run import run

    options = _options(parsed, "")
    return run(options, build or _builder(options), command, as_system=parsed.as_system)


def _bench(parsed: argparse.Namespace, build: Builder | None) -> int:
    del build
    from kprobefs import bench

    _check_bench(parsed)
    parsed.arch, parsed.hits = parsed.arch or bench.ARCHITECTURES[0], parsed.hits or 20000
    parsed.rounds, parsed.count = parsed.rounds or 9, parsed.count or 10000
    if parsed.arch not in bench.ARCHITECTURES:
        raise Failure(f"bench: no figures for {parsed.arch}", Exit.USAGE)
    if parsed.what == "hit" and parsed.cpus:
        from kprobefs.bench_cpus import hits_on

        hits_on(parsed.arch, parsed.hits, parsed.rounds, parsed.cpus, as_json=parsed.json)
    elif parsed.what == "hit":
        bench.hit(parsed.arch, parsed.hits, parsed.rounds, as_json=parsed.json)
    elif parsed.what == "kinds":
        from kprobefs.bench_kinds import kinds

        kinds(parsed.arch, parsed.hits, parsed.rounds, as_json=parsed.json)
    elif parsed.what == "return" and parsed.memory:
        from kprobefs.return_memory import memory

        memory(as_json=parsed.json)
    elif parsed.what == "return":
        from kprobefs import bench_return

        tasks, cpus = parsed.tasks or bench_return.TASKS, parsed.cpus or bench_return.CPUS
        bench_return.returns(parsed.arch, parsed.hits, parsed.rounds, tasks, cpus, as_json=parsed.json)
    else:
        bench.probes(parsed.arch, parsed.count, parsed.rounds, as_json=parsed.json)
    return Exit.OK


def _check_bench(parsed: argparse.Namespace) -> None:
    """Raises: Failure for an option that would change nothing."""
    known = {name for names in BENCH_OPTIONS.values() for name in names}
    taken = {"memory"} if parsed.memory and parsed.what == "return" else set(BENCH_OPTIONS[parsed.what])
    for name in sorted(known - taken):
        if getattr(parsed, name):
            what = f"{parsed.what} --memory" if taken == {"memory"} else parsed.what
            raise Failure(f"bench {what} takes no --{name} (kprobefs bench --help)", Exit.USAGE)


def _coverage(parsed: argparse.Namespace, build: Builder | None) -> int:
    del build
    from kprobefs import coverage

    coverage.run(parsed.arch, parsed.image, parsed.functions, parsed.profile, as_json=parsed.json)
    return Exit.OK


def _djprobe_analyze(parsed: argparse.Namespace, build: Builder | None) -> int:
    del build
    from pathlib import Path

    from kprobefs.djprobe_analyze import analyze

    debug_info = Path(parsed.debug_info) if parsed.debug_info else None
    answer = analyze(Path(parsed.elf), parsed.place, debug_info, parsed.bug_size)
    if parsed.json:
        import json

        print(json.dumps(answer.as_dict()))
    else:
        print(answer.text())
    return Exit.OK


def _options(parsed: argparse.Namespace, directory: str) -> MountOptions:
    """Raises: Failure for a kernel that the engine can't run."""
    from pathlib import Path

    from emulated_kernel.config import HOST, MachineConfig
    from kprobefs.options import MountOptions, check_engine, parsed_limits

    image = None
    if parsed.image is not None:
        image = Path(HOST if parsed.image == HOST else os.path.abspath(parsed.image))
    limits, run_budget = parsed_limits(parsed.limit)
    machine = MachineConfig(
        arch=parsed.arch,
        cpus=parsed.cpus,
        clock=parsed.clock,
        pauses=not parsed.clients_only,
        seed=parsed.seed,
        profile=parsed.profile,
        image=image,
        return_hook=parsed.return_hook,
        detour=parsed.detour,
        limits=limits,
        run_budget=run_budget,
    )
    options = MountOptions(
        directory,
        machine,
        parsed.layout,
        parsed.allow_other,
        clients_only=parsed.clients_only,
        engine=parsed.engine,
    )
    check_engine(options, is_limited=bool(parsed.limit))
    return options


def _builder(options: MountOptions) -> Builder:
    """What makes the served kernel; one that takes seconds to boot has booted then."""
    from kprobefs.options import build_kernel, runs_linux

    if runs_linux(options):
        from kprobefs.native import prepare

        prepare(options)
    return build_kernel


def _coloured(text: str, code: str, stream: TextIO) -> str:
    from kprobefs.terminal import has_colours

    if not has_colours(stream):
        return text
    return f"\033[{code}m{text}\033[0m"
