"""The program: runs one command. Each command imports large modules only when they are needed."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence

from emulated_kernel.util.config import HOST
from emulated_kernel.util.fast_dataclass import replace
from kprobefs.cli.parser import BENCH_OPTIONS, MAX_CPUS, machine_options, program_parser
from kprobefs.common.errors import CliError, ExitStatus, escape_for_terminal, resource_hint

# Not from typing, which takes longer to import than most modules here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

    from kprobefs.mount_options import Builder, MountOptions


def main(arguments: Sequence[str] | None = None, build: Builder | None = None) -> int:
    """Run the program and return its exit status.

    `arguments`: words of the command line after the name of the program; None: those of this process.
    `build`: function that builds the served kernel; None: the options select one.
    """
    try:
        _open_standard_streams()
        status = _run_command(arguments, build)
        sys.stdout.flush()
    except CliError as failure:
        return _complain(str(failure), failure.status)
    except BrokenPipeError:
        # The reader has closed the pipe; the interpreter must not flush the output again.
        _give_up_output()
        return ExitStatus.FAILURE
    except OSError as error:
        if error.errno == errno.ENOSPC and not error.filename:
            _give_up_output()
            error.filename = "standard output"
        place = f"{error.filename}: " if error.filename else ""
        return _complain(f"{place}{resource_hint(error) or error.strerror or error}", ExitStatus.FAILURE)
    except (MemoryError, RuntimeError, SystemError, ImportError) as error:
        if not (hint := resource_hint(error)):
            raise
        return _complain(hint, ExitStatus.FAILURE)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return status


def _run_command(arguments: Sequence[str] | None, build: Builder | None) -> int:
    parser = program_parser()
    if "_ARGCOMPLETE" in os.environ:
        _complete(parser)
    words = list(sys.argv[1:] if arguments is None else arguments)
    if _is_of_mount_fuse(words):
        from kprobefs.cli import mount_helper

        return mount_helper.main(words)
    behind: list[str] = []
    if words[:1] == ["trace"] and "--" in words:
        # argparse accepts no options between two lists of words.
        at = words.index("--")
        behind = words[at + 1 :]
        words = words[:at]
    known = argparse.Namespace(behind=behind, build=build, words=words)
    try:
        parsed, further = parser.parse_known_args(words, known)
        if parsed.chosen == "trace" and not any(word.startswith("-") for word in further):
            # argparse stops at the first list of probes.
            parsed.probes += further
            further = []
        if further:
            raise CliError(
                f"unrecognized arguments: {' '.join(further)} ({parsed.prog} --help)", ExitStatus.USAGE
            )
    except SystemExit as end:
        # --help and --version are done.
        return int(end.code or 0)
    return int(COMMANDS[parsed.chosen](parsed))


def _is_of_mount_fuse(words: Sequence[str]) -> bool:
    """Return True if mount.fuse(8) has called the program, which it does if /sbin lacks mount.fuse.kprobefs.

    Mirrors: mount.fuse.c (libfuse 3): SOURCE DIR -o OPTIONS, always with (no)dev and (no)suid.
    """
    if len(words) != 4 or words[2] != "-o":
        return False
    options = set(words[3].split(","))
    return not options.isdisjoint({"dev", "nodev"}) and not options.isdisjoint({"suid", "nosuid"})


def _complete(parser: argparse.ArgumentParser) -> None:
    """Answer the request of a shell to complete a command line, and exit.

    Return if argcomplete is not installed.
    """
    try:
        import argcomplete
    except ImportError:
        return
    from kprobefs.cli.completers import attach

    attach(parser)
    argcomplete.autocomplete(parser)


def _open_standard_streams() -> None:
    """Open /dev/null for each closed standard stream, so that no other file gets its descriptor."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # open(2) returns the lowest free number. It is opened only if needed: access may be denied.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (for good)


def _give_up_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str, status: ExitStatus) -> ExitStatus:
    _print_error(escape_for_terminal(message))
    return status


def _print_error(message: str, colour: str = "31") -> None:
    try:
        from kprobefs.common.terminal import wrap
    except MemoryError:
        os.write(2, f"kprobefs: {message}\n".encode(errors="surrogateescape"))
        return
    head, _, rest = wrap(f"kprobefs: {message}", sys.stderr).partition(":")
    print(f"{_coloured(f'{head}:', colour, sys.stderr)}{rest}", file=sys.stderr)


def _mount(parsed: argparse.Namespace) -> int:
    from pathlib import Path

    from kprobefs.cli import apply
    from kprobefs.common import mountpoints
    from kprobefs.daemon import daemon
    from kprobefs.mount_options import check_state, runs_linux

    options = replace(
        _options(parsed, mountpoints.resolve(parsed.directory)),
        make_directory=parsed.mkdir,
        flags=tuple(parsed.flags),
        state=os.path.abspath(parsed.state) if parsed.state else None,
    )
    check_state(options)
    if options.state is not None and runs_linux(options):
        _complain_of(["--state: not supported with a distribution's kernel; nothing is kept"])
        options = replace(options, state=None)
    log_file = Path(os.path.abspath(parsed.log)) if parsed.log else None
    builder = parsed.build or _builder(options)
    if parsed.foreground:
        daemon.run_in_foreground(options, builder, log_file)
        return ExitStatus.OK
    # Check here too, before the daemon is started.
    with mountpoints.prepared(options.directory, make=parsed.mkdir, allow_other=options.allow_other):
        daemon.start_in_background(options, builder, log_file)
    if options.state is not None:
        from kprobefs.daemon.state.state_directory import pending_warnings

        _complain_of(
            [
                f"--state {escape_for_terminal(options.state)}: {each}"
                for each in pending_warnings(options.directory)
            ]
        )
    _complain_of(apply.apply(options.directory, []))
    return ExitStatus.OK


def _images(parsed: argparse.Namespace) -> int:
    if parsed.action == "fetch":
        from kprobefs.common.kernel_packages import USAGE, fetch, suite_and_flavour
        from kprobefs.common.progress import Progress

        if not parsed.names:
            raise CliError(f"images fetch: no kernel given; use {USAGE}", ExitStatus.USAGE)
        for name in parsed.names:
            suite_and_flavour(name)
        with Progress("fetching kernels", len(parsed.names)) as progress:
            for name in parsed.names:
                file = fetch(name)
                progress.end()
                print(escape_for_terminal(str(file)), flush=True)
                progress.add(1)
        return ExitStatus.OK
    if parsed.clear:
        from emulated_kernel.guests.linux.boot import snapshot

        removed = snapshot.clear()
        print(f"{removed} images removed from {escape_for_terminal(str(snapshot.directory()))}")
        return ExitStatus.OK
    from kprobefs.cli.images import print_images

    print_images(as_json=parsed.json)
    return ExitStatus.OK


def _apply(parsed: argparse.Namespace) -> int:
    from kprobefs.cli import apply
    from kprobefs.definitions import dropins

    directory = apply.which_mount(parsed.mount)
    if not parsed.files and not dropins.files():
        # This is not a warning: a daemon that starts without definitions reports nothing either.
        print(f"nothing to apply: no *.probes in {' '.join(map(escape_for_terminal, dropins.directories()))}")
    failed = apply.apply(directory, parsed.files)
    _complain_of(failed)
    return ExitStatus.FAILURE if failed else ExitStatus.OK


def _save(parsed: argparse.Namespace) -> int:
    from kprobefs.cli import apply
    from kprobefs.common.output_file import OutputFile

    directory = apply.which_mount(parsed.mount)
    if parsed.file not in (None, "-"):
        with OutputFile(parsed.file) as file:
            file.write(apply.saved(directory))
    else:
        sys.stdout.buffer.write(apply.saved(directory))
    return ExitStatus.OK


def _complain_of(failed: Sequence[str]) -> None:
    for message in failed:
        # A message may have several lines, which are escaped already.
        _print_error(message)


def _install_service(parsed: argparse.Namespace) -> int:
    from kprobefs.cli.install_service import install

    print("\n".join(map(escape_for_terminal, install(parsed.root, user=parsed.user))))
    return ExitStatus.OK


def _completion(parsed: argparse.Namespace) -> int:
    try:
        from argcomplete.shell_integration import shellcode
    except ImportError:
        raise CliError("argcomplete: the Python package is missing; run pip install argcomplete") from None
    print(shellcode(["kprobefs"], shell=parsed.shell))
    return ExitStatus.OK


def _directory(parsed: argparse.Namespace) -> str | None:
    """Return the mount that DIR or --mount names; None if neither is given.

    Raises: CliError (both are given).
    """
    if parsed.directory is not None and parsed.mount is not None:
        raise CliError(f"{parsed.chosen}: DIR and --mount select two mounts; give one", ExitStatus.USAGE)
    return parsed.directory if parsed.mount is None else str(parsed.mount)


def _needed_directory(parsed: argparse.Namespace) -> str:
    """Return the mount that DIR or --mount names. Raises: CliError (both or none is given)."""
    directory = _directory(parsed)
    if directory is None:
        message = f"the following arguments are required: DIR ({parsed.prog} --help)"
        raise CliError(message, ExitStatus.USAGE)
    return directory


def _umount(parsed: argparse.Namespace) -> int:
    from kprobefs.cli import control
    from kprobefs.common import mountpoints

    directory = mountpoints.resolve(_needed_directory(parsed))
    if parsed.stale:
        control.unmount_stale(directory)
    else:
        control.unmount(directory, force=parsed.force)
    return ExitStatus.OK


def _status(parsed: argparse.Namespace) -> int:
    from kprobefs.cli import control
    from kprobefs.common import mountpoints

    chosen = _directory(parsed)
    states = control.states(mountpoints.resolve(chosen) if chosen else None)
    if parsed.json:
        import json

        json.dump([state.as_dict() for state in states], sys.stdout, indent=2)
        print()
    elif sys.stdout.isatty() and states:
        from kprobefs.cli.status import print_table

        print_table(states)
    else:
        for state in states:
            print(
                state.condition.value,
                escape_for_terminal(state.directory),
                *map(escape_for_terminal, state.details),
            )
    if chosen and not states:
        raise mountpoints.not_mounted(chosen)
    return max((state.condition.status for state in states), default=ExitStatus.OK)


def _trace(parsed: argparse.Namespace) -> int:
    from contextlib import nullcontext

    from kprobefs.cli import apply
    from kprobefs.common.output_file import OutputFile
    from kprobefs.mount_options import LAYOUTS

    if not parsed.behind:
        raise CliError("trace: no command given; add -- CMD...", ExitStatus.USAGE)
    if parsed.mount and (given := machine_options(parsed.words[1:])):
        raise CliError(
            f"trace {given[0]}: the mount that -m selects has its own; leave {given[0]} out", ExitStatus.USAGE
        )
    if not parsed.mount and parsed.layout != LAYOUTS[0]:
        why = f"it has no scratch/ for the command; use --layout {LAYOUTS[0]}"
        raise CliError(f"trace --layout {parsed.layout}: {why}", ExitStatus.USAGE)
    from kprobefs.cli.run import check_host, run, run_traced
    from kprobefs.cli.trace import TraceRequest, TraceSession

    request = TraceRequest(
        parsed.probes,
        parsed.filter,
        parsed.output,
        as_json=parsed.json,
        has_stacks=parsed.stack,
        graph=tuple(parsed.graph),
    )
    check_host()
    with OutputFile(parsed.output) if parsed.output else nullcontext() as file:
        tracing = TraceSession(request, file)
        if parsed.mount:
            return run_traced(apply.which_mount(parsed.mount), parsed.behind, tracing)
        options = _options(parsed, "")
        return run(options, parsed.build or _builder_for_run(options), parsed.behind, tracing=tracing)


def _tour(parsed: argparse.Namespace) -> int:
    from emulated_kernel.util.config import MachineConfig
    from kprobefs.cli.run import mounted
    from kprobefs.cli.tour import profile, steps, tour
    from kprobefs.daemon.backends import build_kernel
    from kprobefs.mount_options import MountOptions

    config = MachineConfig(arch=parsed.arch)
    needed = profile(parsed.arch, parsed.chapter)
    if needed is not None:
        config = replace(config, profile=needed)
    with mounted(MountOptions("", config), parsed.build or build_kernel) as base:
        tour(f"{base}/mnt", steps(parsed.arch, parsed.chapter))
    return ExitStatus.OK


def _top(parsed: argparse.Namespace) -> int:
    from kprobefs.cli import apply
    from kprobefs.cli.top import top

    top(apply.which_mount(_directory(parsed)), parsed.delay, parsed.count, as_json=parsed.json)
    return ExitStatus.OK


def _reboot(parsed: argparse.Namespace) -> int:
    from kprobefs.cli import control
    from kprobefs.common import mountpoints

    lost = control.reboot(mountpoints.resolve(_needed_directory(parsed)))
    if lost:
        _complain_of(["\n".join(["reboot: the new kernel lacks", *lost])])
    return ExitStatus.FAILURE if lost else ExitStatus.OK


def _run(parsed: argparse.Namespace) -> int:
    command = parsed.command[1:] if parsed.command[:1] == ["--"] else parsed.command
    if not command:
        raise CliError("run: no command given; add -- CMD...", ExitStatus.USAGE)
    from kprobefs.cli.run import run
    from kprobefs.mount_options import runs_linux

    if parsed.real_root and not parsed.as_system:
        raise CliError("run: --real-root: is for --as-system; give both", ExitStatus.USAGE)
    options = _options(parsed, "")
    if parsed.as_system and parsed.cpus is None and not runs_linux(options):
        # Tools take the number of CPUs from the host's /sys, and expect a buffer for each of them.
        cpus = min(os.cpu_count() or 1, MAX_CPUS)
        options = replace(options, machine=replace(options.machine, cpus=cpus))
    return run(
        options,
        parsed.build or _builder_for_run(options),
        command,
        as_system=parsed.as_system,
        real_root=parsed.real_root,
    )


def _matrix(parsed: argparse.Namespace) -> int:
    from contextlib import nullcontext
    from pathlib import Path

    from kprobefs.cli import matrix
    from kprobefs.cli.run import check_host
    from kprobefs.common.output_file import OutputFile
    from kprobefs.common.production_cpus import images_and_cpus
    from kprobefs.mount_options import chosen_cpu

    command = parsed.command[1:] if parsed.command[:1] == ["--"] else parsed.command
    if not command:
        raise CliError("matrix: no command given; add -- CMD...", ExitStatus.USAGE)
    if parsed.command[0] != "--" and "--" in parsed.command:
        why = "unexpected before --; give each kernel its own option"
        raise CliError(f"matrix: {escape_for_terminal(parsed.command[0])}: {why}", ExitStatus.USAGE)
    for option, value in (("--kprobes", parsed.kprobes), ("--cpu", parsed.cpu)):
        if value and not parsed.image:
            why = "no distribution's kernel given; add --image"
            raise CliError(f"matrix: {option}: {why}", ExitStatus.USAGE)
    if parsed.scheduler:
        from kprobefs.measure.cluster import check_installed

        check_installed()
        if parsed.jobs:
            why = "the cluster decides how many kernels run at a time; leave it out"
            raise CliError(f"matrix: --jobs: {why}", ExitStatus.USAGE)
    else:
        check_host()
    for name in parsed.cpu:
        chosen_cpu(name)
    images = [each if each == HOST else os.path.abspath(each) for each in parsed.image]
    machines = images_and_cpus(images, [str(_cpu(name)) for name in parsed.cpu])
    cases = matrix.cases(machines, parsed.arch, parsed.profile, parsed.kprobes, parsed.clock)

    def report(result: matrix.Result) -> None:
        colour = "32" if result.is_good else "31"
        _print_error(f"matrix: {escape_for_terminal(result.case.name)}: {result.verdict}", colour)

    logs = Path(parsed.logs)
    # The file may be in the directory of the logs.
    matrix.clear_logs(cases, logs)
    with OutputFile(parsed.junit) if parsed.junit else nullcontext() as junit:
        if parsed.scheduler:
            results = matrix.run_on_workers(cases, command, logs, parsed.scheduler, report)
        else:
            results = matrix.run_all(cases, command, logs, parsed.jobs or 1, report)
        try:
            if junit is not None:
                junit.write(matrix.as_junit(results, command))
        finally:
            print(matrix.as_json(results) if parsed.json else "\n".join(matrix.table(results)))
    if any(result.verdict == "stopped" for result in results):
        return matrix.INTERRUPTED
    return ExitStatus.OK if all(result.is_good for result in results) else ExitStatus.FAILURE


def _bench(parsed: argparse.Namespace) -> int:
    from kprobefs.measure import bench
    from kprobefs.measure.host_load import HostLoad

    _check_bench(parsed)
    parsed.arch = parsed.arch or bench.ARCHITECTURES[0]
    parsed.hits = parsed.hits or 20000
    parsed.rounds = parsed.rounds or 9
    parsed.count = parsed.count or 10000
    hits = parsed.arch, parsed.hits, parsed.rounds
    host = HostLoad()
    if parsed.what == "hit" and parsed.cpus:
        from kprobefs.measure.bench_cpus import hits_on

        hits_on(*hits, parsed.cpus, parsed.profile, as_json=parsed.json)
    elif parsed.what == "hit":
        bench.hit(*hits, parsed.profile, as_json=parsed.json)
    elif parsed.what == "kinds":
        from kprobefs.measure.bench_kinds import kinds

        kinds(*hits, as_json=parsed.json)
    elif parsed.what == "return" and parsed.memory:
        from kprobefs.measure.return_memory import memory

        memory(as_json=parsed.json)
    elif parsed.what == "return":
        from kprobefs.measure import bench_return

        tasks = parsed.tasks or bench_return.TASKS
        cpus = parsed.cpus or bench_return.CPUS
        bench_return.returns(*hits, tasks, cpus, parsed.profile, as_json=parsed.json)
    else:
        from kprobefs.measure.bench_probes import probes

        probes(parsed.arch, parsed.count, parsed.rounds, parsed.profile, as_json=parsed.json)
    if not (parsed.json or parsed.memory):
        print(host.line())
    return ExitStatus.OK


def _check_bench(parsed: argparse.Namespace) -> None:
    """Check that each given option has an effect on the benchmark. Raises: CliError (an option has none)."""
    known = {name for names in BENCH_OPTIONS.values() for name in names}
    taken = {"memory"} if parsed.memory and parsed.what == "return" else set(BENCH_OPTIONS[parsed.what])
    for name in sorted(known - taken):
        if getattr(parsed, name):
            what = f"{parsed.what} --memory" if taken == {"memory"} else parsed.what
            raise CliError(f"bench {what}: --{name} has no effect; leave it out", ExitStatus.USAGE)


def _coverage(parsed: argparse.Namespace) -> int:
    from kprobefs.plan import coverage_command

    coverage_command.run(
        arch=parsed.arch,
        images=parsed.image,
        functions=parsed.functions,
        vmcore=parsed.vmcore,
        profile=parsed.profile,
        strategy=parsed.strategy,
        cpu=parsed.cpu,
        kprobes=parsed.kprobes,
        pattern=parsed.function,
        jobs=parsed.jobs,
        scheduler=parsed.scheduler,
        results=parsed.results,
        compare=parsed.compare,
        as_json=parsed.json,
        html=parsed.html,
        plot=parsed.plot,
    )
    return ExitStatus.OK


def _explain(parsed: argparse.Namespace) -> int:
    from kprobefs.plan import explain

    outputs = {"svg": parsed.svg, "html": parsed.html, "stages": parsed.stages}
    errors = explain.run(
        parsed.places,
        arch=parsed.arch,
        image=parsed.image,
        vmcore=parsed.vmcore,
        profile=parsed.profile,
        cpu=parsed.cpu,
        strategy=parsed.strategy,
        whole=parsed.function,
        as_json=parsed.json,
        outputs={form: path for form, path in outputs.items() if path is not None},
        debug_info=parsed.debug_info,
        kprobes=parsed.kprobes,
    )
    for error in errors:
        _complain(str(error), error.status)
    return errors[0].status if errors else ExitStatus.OK


def _debug_info(parsed: argparse.Namespace) -> int:
    from kprobefs.plan import debug_info

    debug_info.run(parsed.output, arch=parsed.arch, image=parsed.image)
    return ExitStatus.OK


def _check(parsed: argparse.Namespace) -> int:
    from kprobefs.plan import check_command

    form = "json" if parsed.json else "sarif" if parsed.sarif else "text"
    passed = check_command.run(
        parsed.files,
        arch=parsed.arch,
        images=parsed.image,
        vmcore=parsed.vmcore,
        profile=parsed.profile,
        cpus=parsed.cpu,
        strategy=parsed.strategy,
        kprobes=parsed.kprobes,
        form=form,
        allowed=parsed.allow,
        strict=parsed.strict,
    )
    return ExitStatus.OK if passed else ExitStatus.FAILURE


def _djprobe_analyze(parsed: argparse.Namespace) -> int:
    from pathlib import Path

    from emulated_kernel.image.linux.open_image import kernel_file
    from kprobefs.measure.djprobe_analyze import analyze

    if (parsed.elf is None) == (parsed.image is None):
        raise CliError(
            "djprobe-analyze: it needs exactly one kernel; give ELF or --image KERNEL", ExitStatus.USAGE
        )
    path = kernel_file(parsed.image) if parsed.image is not None else Path(parsed.elf)
    debug_info = Path(parsed.debug_info) if parsed.debug_info else None
    answer = analyze(path, parsed.place, debug_info, parsed.bug_size)
    if parsed.json:
        import json

        print(json.dumps(answer.as_dict()))
    else:
        print(answer.text())
    return ExitStatus.OK


def _options(parsed: argparse.Namespace, directory: str) -> MountOptions:
    """Return the options of a mount on `directory`, from the parsed command line.

    Raises: CliError (the options are contradictory).
    """
    from pathlib import Path

    from emulated_kernel.util.config import DEFAULT_SEED, HOST, MachineConfig
    from kprobefs.mount_options import PROFILES, MountOptions, check_kprobes, parsed_limits

    image = None
    if parsed.image is not None:
        image = Path(HOST if parsed.image == HOST else os.path.abspath(parsed.image))
    limits, run_budget = parsed_limits(parsed.limit)
    is_ordered = parsed.isolate or (parsed.image is not None and parsed.seed is not None)
    machine = MachineConfig(
        arch=parsed.arch,
        cpus=parsed.cpus or 1,
        clock=parsed.clock,
        pauses=not is_ordered,
        seed=DEFAULT_SEED if parsed.seed is None else parsed.seed,
        profile=parsed.profile or PROFILES[0],
        strategy=parsed.strategy,
        image=image,
        return_hook=parsed.return_hook,
        save_regs=parsed.save_regs,
        limits=limits,
        run_budget=run_budget,
    )
    options = MountOptions(
        directory,
        machine,
        parsed.layout,
        parsed.allow_other,
        isolate=parsed.isolate,
        is_ordered=is_ordered,
        kprobes=parsed.kprobes,
        modules=tuple(os.path.abspath(path) for path in parsed.modules),
        vmcore=None if parsed.vmcore is None else os.path.abspath(parsed.vmcore),
        cpu=_cpu(parsed.cpu),
        follows_version=parsed.profile is None,
    )
    check_kprobes(options, is_limited=bool(parsed.limit))
    return options


def _cpu(name: str | None) -> str | None:
    """Return the value of --cpu for the daemon: `name`, made absolute if it is the path of a file.

    The daemon may have another working directory. None stays None.
    """
    if name is None or not os.path.exists(name):
        return name
    from emulated_kernel.guests.linux.cpu.cpu_models import model_named
    from emulated_kernel.util.config import HOST

    return name if name == HOST or model_named(name) else os.path.abspath(name)


def _builder(options: MountOptions) -> Builder:
    """Return the function that builds the served kernel.

    If it is a distribution's kernel whose boot is not cached, boot it first.
    """
    from kprobefs.daemon.backends import build_kernel, prepare

    prepare(options)
    return build_kernel


def _builder_for_run(options: MountOptions) -> Builder:
    """Return the function that builds the served kernel, for the command `run`.

    Raises: CliError (the kernel cannot be used; the error's exit status is RUN_FAILED).
    """
    try:
        return _builder(options)
    except CliError as failure:
        raise CliError(str(failure), ExitStatus.RUN_FAILED) from failure


def _coloured(text: str, code: str, stream: TextIO) -> str:
    from kprobefs.common.terminal import has_colours

    if not has_colours(stream):
        return text
    return f"\033[{code}m{text}\033[0m"


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "mount": _mount,
    "umount": _umount,
    "status": _status,
    "trace": _trace,
    "tour": _tour,
    "top": _top,
    "reboot": _reboot,
    "run": _run,
    "matrix": _matrix,
    "images": _images,
    "apply": _apply,
    "save": _save,
    "install-service": _install_service,
    "completion": _completion,
    "djprobe-analyze": _djprobe_analyze,
    "bench": _bench,
    "coverage": _coverage,
    "explain": _explain,
    "check": _check,
    "debug-info": _debug_info,
}
"""Name of a command -> the function that runs it with the parsed options and returns the exit status."""
