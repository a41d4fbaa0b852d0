"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from kprobefs import __version__
from kprobefs.failure import Exit, Failure

if TYPE_CHECKING:
    from kprobefs.options import Builder, MountOptions

EPILOG = """\
exit status: 0 done, 1 failed, 2 wrong usage, 3 nothing of ours is mounted there;
run: the command's own, 125 the mount failed, 126/127 the command can't be run/found.
"""


def main(arguments: Sequence[str] | None = None, build: Builder | None = None) -> int:
    """Run the program; returns its exit status. `build` replaces what makes the served kernel."""
    parsed = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace, Builder | None], int] = parsed.function
    try:
        return int(command(parsed, build))
    except Failure as failure:
        return _complain(str(failure), failure.status)
    except BrokenPipeError:
        # Whoever read our output has enough; the interpreter must not try to flush it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILURE
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _complain(f"{place}{error.strerror or error}", Exit.FAILURE)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _complain(message: str, status: Exit) -> Exit:
    print(f"{_coloured('kprobefs:', '31', sys.stderr)} {message}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kprobefs",
        description="Linux's kprobes files, mounted anywhere, over an emulated kernel.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kprobefs {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    command = commands.add_parser("mount", help="mount on an empty directory; returns when the mount answers")
    command.add_argument("directory", metavar="DIR")
    command.add_argument(
        "-f", "--foreground", action="store_true", help="serve in this process until a signal"
    )
    command.add_argument("--log", metavar="FILE", help="write the daemon's log there")
    _add_machine_options(command)
    command.set_defaults(function=_mount)

    command = commands.add_parser("umount", help="end the daemon of a mount, and unmount")
    command.add_argument("directory", metavar="DIR")
    command.set_defaults(function=_umount)

    command = commands.add_parser("status", help="show running mounts")
    command.add_argument("directory", metavar="DIR", nargs="?")
    command.add_argument("--json", action="store_true", help="as a JSON array")
    command.set_defaults(function=_status)

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
    return parser


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("bench", help="measure what hits and probes cost here")
    command.add_argument("what", choices=("hit", "probes", "return"))
    command.add_argument("--arch", default="x86_64", help="(default: %(default)s)")
    command.add_argument(
        "--hits", type=int, default=20000, metavar="N", help="a round (default: %(default)s)"
    )
    command.add_argument("--rounds", type=int, default=9, metavar="N", help="(default: %(default)s)")
    command.add_argument(
        "--count", type=int, default=10000, metavar="N", help="how many probes (default: %(default)s)"
    )
    command.add_argument(
        "--tasks", type=int, nargs="+", metavar="N", help="return: tasks in the hooked function"
    )
    command.add_argument("--cpus", type=int, nargs="+", metavar="N", help="return: CPUs that call it")
    command.add_argument("--memory", action="store_true", help="return: memory of each shadow stack instead")
    command.add_argument("--json", action="store_true", help="as JSON")
    command.set_defaults(function=_bench)


def _add_machine_options(parser: argparse.ArgumentParser) -> None:
    from kprobefs.options import ARCHITECTURES, CLOCKS, DETOURS, LAYOUTS, PROFILES, RETURN_HOOKS

    group = parser.add_argument_group("the emulated machine")
    group.add_argument("--arch", choices=ARCHITECTURES, default="x86_64", help="(default: %(default)s)")
    group.add_argument("--image", metavar="FILE", help="the kernel to run (default: our own)")
    group.add_argument(
        "--layout",
        choices=LAYOUTS,
        default="full",
        help="full: kprobes/ tracing/ machine/; tracefs: tracefs itself at the root (default: %(default)s)",
    )
    group.add_argument(
        "--private", action="store_true", help="root's mount lets nobody else in; chdir(2) is seen then"
    )
    group.add_argument("--cpus", type=_cpus, default=1, metavar="N", help="(default: %(default)s)")
    group.add_argument("--seed", type=int, default=1, metavar="N", help="same seed, same trace (default: 1)")
    group.add_argument(
        "--clock", choices=CLOCKS, default="virtual", help="what timestamps follow (default: %(default)s)"
    )
    group.add_argument(
        "--profile",
        choices=PROFILES,
        default=PROFILES[0],
        help="which kernel's ways of probing it has (default: %(default)s)",
    )
    group.add_argument(
        "--return-hook",
        choices=RETURN_HOOKS,
        help="where return addresses of probed functions are kept (default: as in the profile)",
    )
    group.add_argument(
        "--detour",
        choices=DETOURS,
        help="which registers a handler in guest code saves (default: as in the profile)",
    )


def _cpus(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 64:
        raise argparse.ArgumentTypeError("between 1 and 64")
    return number


def _mount(parsed: argparse.Namespace, build: Builder | None) -> int:
    from pathlib import Path

    from kprobefs import daemon, mount

    options = _options(parsed, os.path.realpath(parsed.directory))
    log_file = Path(os.path.abspath(parsed.log)) if parsed.log else None
    builder = build or _builder()
    if parsed.foreground:
        daemon.run_in_foreground(options, builder, log_file)
    else:
        # Here too, so that the daemon isn't started in vain.
        mount.prepare(options.directory)
        daemon.start_in_background(options, builder, log_file)
    return Exit.OK


def _umount(parsed: argparse.Namespace, build: Builder | None) -> int:
    del build
    from kprobefs import control

    control.unmount(_directory(parsed.directory))
    return Exit.OK


def _status(parsed: argparse.Namespace, build: Builder | None) -> int:
    del build
    from kprobefs import control

    states = control.states(_directory(parsed.directory) if parsed.directory else None)
    if parsed.json:
        import json

        json.dump([state.as_dict() for state in states], sys.stdout, indent=2)
        print()
    for state in states if not parsed.json else ():
        colour = "32" if state.serving else "31"
        print(_coloured(state.condition, colour, sys.stdout), state.directory, *state.details)
    if parsed.directory and not states:
        raise Failure(f"{parsed.directory}: kprobefs isn't mounted there", Exit.NOT_MOUNTED)
    return Exit.OK


def _run(parsed: argparse.Namespace, build: Builder | None) -> int:
    command = parsed.command[1:] if parsed.command[:1] == ["--"] else parsed.command
    if not command:
        raise Failure("run: which command? kprobefs run -- CMD...", Exit.USAGE)
    from kprobefs.run import run

    return run(_options(parsed, ""), build or _builder(), command, as_system=parsed.as_system)


def _bench(parsed: argparse.Namespace, build: Builder | None) -> int:
    del build
    from kprobefs import bench

    if parsed.arch not in bench.ARCHITECTURES:
        raise Failure(f"bench: no figures for {parsed.arch}", Exit.USAGE)
    if parsed.what == "hit":
        bench.hit(parsed.arch, parsed.hits, parsed.rounds, as_json=parsed.json)
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
    from pathlib import Path

    from emulated_kernel.config import MachineConfig
    from kprobefs.options import MountOptions

    machine = MachineConfig(
        arch=parsed.arch,
        cpus=parsed.cpus,
        clock=parsed.clock,
        seed=parsed.seed,
        profile=parsed.profile,
        image=None if parsed.image is None else Path(os.path.abspath(parsed.image)),
        return_hook=parsed.return_hook,
        detour=parsed.detour,
    )
    return MountOptions(directory, machine, parsed.layout, parsed.private)


def _builder() -> Builder:
    from kprobefs.options import build_kernel

    return build_kernel


def _directory(path: str) -> str:
    """The mount point that `path` means. The last component isn't asked for: its daemon may be dead."""
    absolute = os.path.abspath(path)
    parent, name = os.path.split(absolute)
    return os.path.join(os.path.realpath(parent), name)


def _coloured(text: str, code: str, stream: TextIO) -> str:
    if not stream.isatty() or "NO_COLOR" in os.environ:
        return text
    return f"\033[{code}m{text}\033[0m"
