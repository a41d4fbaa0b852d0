"""The program's commands mount, umount, status and run, with their messages and exit statuses."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kprobefs import __version__
from kprobefs.cli.main import main
from kprobefs.cli.parser import program_parser
from kprobefs.cli.run import kill_hung_daemon
from kprobefs.common.daemon_registry import running
from kprobefs.common.errors import ExitStatus
from kprobefs.common.mountpoints import MountState, condition
from tests.fuse.harness import (
    PATIENCE,
    PROGRAM,
    REAL_PROGRAM,
    ROOT,
    RUN,
    Daemon,
    daemon,
    environment,
    eventually,
    is_alive,
    is_mounted,
    kill_with_children,
    kprobefs,
    needs_fuse,
)
from tests.image.linux.debian import package


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    """Return the message of a failed program, which must be one line on standard error."""
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("kprobefs: ")
    return result.stderr


class TestWithoutMount:
    """Usage errors, help, imports and failures: behaviour without a mount."""

    @pytest.mark.parametrize(
        ("command", "option"), [("mount", "--layout"), ("trace", "--filter"), ("top", "--delay")]
    )
    def test_help_imports_nothing_heavy(self, command: str, option: str) -> None:
        script = (
            "import sys, kprobefs.cli.main\n"
            f"kprobefs.cli.main.main(['{command}', '--help'])\n"
            "heavy = {'unicorn', 'keystone', 'iced_x86', 'fuse', 'subprocess', 'logging', 'ctypes',\n"
            "         'rich', 'emulated_kernel.machine'}\n"
            "sys.exit(str(heavy & sys.modules.keys() or ''))\n"
        )
        result = subprocess.run(
            [sys.executable, "-c", script],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert result.stderr == "\n"
        assert option in result.stdout

    @pytest.mark.parametrize(("command", "most"), [("--help", 90), ("status", 115)])
    def test_few_modules_are_imported(self, command: str, most: int) -> None:
        """`--help` and `status` import few modules, including the standard library's, and never rich. The
        limits allow for differences between versions of Python.
        """
        script = (
            "import sys\n"
            "before = set(sys.modules)\n"
            "import kprobefs.cli.main\n"
            f"kprobefs.cli.main.main(['{command}'])\n"
            "print(len(set(sys.modules) - before), 'rich' in sys.modules)\n"
        )
        result = subprocess.run(
            [sys.executable, "-c", script],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        count, has_rich = result.stdout.splitlines()[-1].split()
        assert int(count) <= most
        assert has_rich == "False"

    def test_version(self) -> None:
        assert kprobefs("--version").stdout == f"kprobefs {__version__}\n"
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert project.get("version", __version__) == __version__

    @pytest.mark.parametrize(
        "arguments",
        [[], ["nonsense"], ["mount"], ["mount", "--cpus", "0", "/x"], ["mount", ""], ["run"], ["run", "--"]],
    )
    def test_wrong_usage(self, arguments: list[str]) -> None:
        assert kprobefs(*arguments).returncode == ExitStatus.USAGE

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            ("status a b", "unrecognized arguments: b (kprobefs status --help)"),
            ("djprobe-analyze a b c", "unrecognized arguments: c (kprobefs djprobe-analyze --help)"),
            ("run --clock model --arch i386 true", "--clock model: not on i386; use"),
            ("run --clock model --vmcore /x true", "--clock model: not possible with --vmcore"),
            ("run --clock real --vmcore /x true", "--clock real: not possible with --vmcore"),
            ("run --image '' -- true", "argument --image: empty name; give a file (kprobefs run --help)"),
            ("check ''", "argument FILE: empty name; give a file (kprobefs check --help)"),
            ("save -m ''", "argument -m/--mount: empty name; give a directory (kprobefs save --help)"),
            ("bench nonsense", "argument WHAT: invalid choice: 'nonsense'"),
            (
                "bench hit --arch nope",
                "argument --arch: invalid choice: 'nope' (choose from 'x86_64'",
            ),
            (
                "trace -m /m --arch x86_64 p:f -- true",
                "trace --arch: the mount that -m selects has its own; leave",
            ),
            (
                "trace p:f -m /m --limit probes=3 -- true",
                "trace --limit: the mount that -m selects has its own; leave",
            ),
            ("trace --layout tracefs p:f -- true", "trace --layout tracefs: it has no scratch/"),
            ("trace p:f --layout tracefs r:f -- true", "trace --layout tracefs: it has no scratch/"),
            ("trace p:f --nonsense r:f -- true", "unrecognized arguments: --nonsense r:f (kprobefs trace "),
            ("bench hit --memory", "bench hit: --memory has no effect; leave it out"),
            ("bench hit --tasks 3", "bench hit: --tasks has no effect; leave it out"),
            ("bench probes --tasks 3", "bench probes: --tasks has no effect; leave it out"),
            ("bench probes --hits 3", "bench probes: --hits has no effect; leave it out"),
            ("bench kinds --cpus 3", "bench kinds: --cpus has no effect; leave it out"),
            ("bench return --count 3", "bench return: --count has no effect; leave it out"),
            (
                "bench return --memory --hits 3",
                "bench return --memory: --hits has no effect; leave it out",
            ),
            ("mount /no/such/place", "run mkdir -p /no/such/place, or add --mkdir"),
        ],
    )
    def test_it_is_told_what_is_wrong(
        self, arguments: str, told: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(shlex.split(arguments)) == (
            ExitStatus.FAILURE if arguments.startswith("mount") else ExitStatus.USAGE
        )
        error = capsys.readouterr().err
        assert (error.startswith("kprobefs: "), error.count("\n"), told in error) == (True, 1, True)

    def test_help_has_words_for_everything(self) -> None:
        commands = next(each for each in program_parser()._actions if isinstance(each.choices, dict)).choices
        assert isinstance(commands, dict)
        for name, parser in commands.items():
            assert re.fullmatch(r"[A-Z].*\.", parser.description or "", re.DOTALL), name
            for action in parser._actions:
                words = re.sub(r"\(default: .*\)", "", action.help or "").strip()
                # The description explains required arguments such as DIR.
                is_plain = not action.option_strings and action.required
                assert words or is_plain or action.nargs, (name, action)
                assert "`" not in words

    def test_only_the_command_that_is_given_gets_its_options(self, monkeypatch: pytest.MonkeyPatch) -> None:
        built = []
        build = argparse.ArgumentParser.__init__

        def note(parser: argparse.ArgumentParser, **options: Any) -> None:
            built.append(options["prog"])
            build(parser, **options)

        monkeypatch.setattr(argparse.ArgumentParser, "__init__", note)
        parsed = program_parser().parse_args(["status", "--json"])
        assert (parsed.chosen, parsed.json, parsed.prog) == ("status", True, "kprobefs status")
        assert built == ["kprobefs", "kprobefs status"]

    def test_a_log_or_state_in_the_mount_is_wrong_usage(self, directory: Path) -> None:
        for option in ("--log", "--state"):
            result = kprobefs("mount", option, str(directory / "x"), str(directory))
            assert result.returncode == ExitStatus.USAGE
            assert one_line(result).endswith(f"{option} {directory}/x: inside a mount point\n")

    def test_an_interrupt_while_it_is_imported(self) -> None:
        script = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "kprobefs.cli.parser":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from kprobefs.__main__ import main
sys.exit(main())
"""
        command = [sys.executable, "-c", script]
        result = subprocess.run(command, capture_output=True, env=environment(), timeout=30, check=False)
        assert (result.returncode, result.stderr) == (-signal.SIGINT, b"")

    def test_usage_of_a_one_liner(self) -> None:
        assert kprobefs("trace", "--help").stdout.splitlines()[0].endswith("[PROBE...] -- CMD...")

    @needs_fuse
    @pytest.mark.parametrize("command", [["mount"], ["mount", "-f"], ["run"]], ids=" ".join)
    def test_an_image_that_is_none(self, command: list[str], tmp_path: Path) -> None:
        image, directory = tmp_path / "vmlinux", tmp_path / "mnt"
        directory.mkdir()
        target = ["--", "true"] if command == ["run"] else [str(directory)]
        for data, why in (
            (b"\x7fELF", " image: truncated ELF identification"),
            (
                b"text",
                ": neither a vmlinuz, vmlinux or Image for x86_64, arm64 or riscv64, nor a package "
                "(.deb, .rpm, .pkg.tar.zst)",
            ),
        ):
            image.write_bytes(data)
            result = kprobefs(*command, "--image", str(image), *target, program=REAL_PROGRAM)
            assert result.returncode in (ExitStatus.USAGE, ExitStatus.RUN_FAILED)
            assert one_line(result).endswith(f"{image}: not a usable kernel{why}\n")
        image.unlink()
        result = kprobefs(*command, "--image", str(image), *target, program=REAL_PROGRAM)
        assert one_line(result).endswith(f"{image}: No such file or directory\n")
        assert not is_mounted(directory)

    def test_nothing_mounted(self, tmp_path: Path) -> None:
        for command in ("umount", "status"):
            result = kprobefs(command, str(tmp_path))
            assert result.returncode == ExitStatus.NOT_MOUNTED
            assert "isn't mounted there" in one_line(result)

    def test_where_it_cannot_mount(self, tmp_path: Path) -> None:
        result = kprobefs("mount", str(tmp_path / "none"))
        assert (result.returncode, "mkdir -p" in one_line(result)) == (ExitStatus.FAILURE, True)
        (tmp_path / "file").write_text("")
        assert "not empty" in one_line(kprobefs("mount", str(tmp_path)))
        message = one_line(kprobefs("mount", str(tmp_path / "file")))
        assert ("not a directory" in message, "mkdir" in message) == (True, False)


@needs_fuse
@pytest.mark.mounted
class TestMount:
    """The commands mount, umount and status with real mounts."""

    def test_mount_returns_when_it_answers(self, directory: Path) -> None:
        result = kprobefs("mount", str(directory))
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
        assert "tracing" in os.listdir(directory)
        status = json.loads(kprobefs("status", "--json", str(directory)).stdout)
        assert [(each["directory"], each["condition"]) for each in status] == [(str(directory), "serving")]
        assert status[0]["daemon"]["version"] == __version__
        pid = status[0]["daemon"]["pid"]
        assert os.getsid(pid) != os.getsid(0)
        assert kprobefs("umount", str(directory)).returncode == 0
        assert not is_mounted(directory)
        eventually(lambda: not is_alive(pid))

    def test_status_for_people(self, mounted: Daemon) -> None:
        result = kprobefs("status")
        daemon = (
            f"pid {mounted.process.pid}, x86_64, full, kernel built-in, "
            "kprobes of kprobefs, profile: linux-6.1, native traps, "
        )
        assert f"serving {mounted.directory} {daemon}" in result.stdout
        assert "\033" not in result.stdout

    def test_python_traps_are_a_choice(self) -> None:
        for value, shown in (("1", "python traps"), ("", "native traps")):
            result = kprobefs("run", "--", *PROGRAM, "status", KPROBEFS_PYTHON_TRAPS=value)
            assert shown in result.stdout

    def test_a_kernel_from_a_file(self) -> None:
        """With a RISC-V kernel as `--image`, `status` shows the architecture riscv64, and $KPROBEFS_OPTIONS
        has the options of that kernel.
        """
        image = str(package("linux-image-riscv64", "trixie", "riscv64"))
        script = f'{shlex.join(REAL_PROGRAM)} status --json "$KPROBEFS"; echo "$KPROBEFS_OPTIONS"'
        words = ("--image", image, "--kprobes", "kernel")
        result = kprobefs("run", *words, "--", "sh", "-c", script, program=REAL_PROGRAM)
        status, options = result.stdout.strip().rsplit("\n", 1)
        assert json.loads(status)[0]["daemon"]["arch"] == "riscv64"
        assert shlex.split(options) == [*words, "--clock", "virtual"]

    def test_layout_tracefs(self, directory: Path) -> None:
        with daemon(directory, "--layout", "tracefs") as mounted:
            assert "available_events" in os.listdir(mounted.directory)
            assert f"tracefs {directory} fuse.kprobefs " in Path("/proc/mounts").read_text()

    def test_not_twice(self, mounted: Daemon) -> None:
        result = kprobefs("mount", str(mounted.directory))
        assert (result.returncode, "mounted there already" in one_line(result)) == (ExitStatus.FAILURE, True)

    def test_a_failing_start_is_told(self, directory: Path) -> None:
        result = kprobefs("mount", "--seed", "666", str(directory))
        assert result.returncode == ExitStatus.FAILURE
        assert "RuntimeError: this kernel can't be built" in one_line(result)
        log = Path(one_line(result).rpartition("see ")[2].strip())
        assert "this kernel can't be built" in log.read_text()
        log.unlink()
        assert not is_mounted(directory)

    def test_log_file(self, directory: Path, tmp_path: Path) -> None:
        log = tmp_path / "log"
        assert kprobefs("mount", "--log", str(log), str(directory)).returncode == 0
        assert kprobefs("umount", str(directory)).returncode == 0
        assert "stopped serving" in log.read_text()

    def test_mount_over_a_stale_mount(self, directory: Path) -> None:
        with daemon(directory) as first:
            kill_with_children(first.process.pid)
            assert first.process.wait(PATIENCE) == -signal.SIGKILL
            status = json.loads(kprobefs("status", "--json", str(directory)).stdout)
            assert status[0]["condition"] == "stale"
            with daemon(directory) as second:
                assert "tracing" in os.listdir(second.directory)
        assert not is_mounted(directory)

    def test_umount_of_a_stale_mount(self, directory: Path) -> None:
        with daemon(directory) as mounted:
            kill_with_children(mounted.process.pid)
            assert mounted.process.wait(PATIENCE) == -signal.SIGKILL
            assert kprobefs("umount", str(directory)).returncode == 0
            assert not is_mounted(directory)

    def test_umount_under_open_files(self, mounted: Daemon) -> None:
        descriptor = os.open(mounted.path("kprobe_events"), os.O_RDONLY)
        try:
            assert kprobefs("umount", str(mounted.directory)).returncode == 0
            assert mounted.process.wait(PATIENCE) == 0
            with pytest.raises(OSError, match=r"Transport endpoint|Software caused"):
                os.read(descriptor, 1)
        finally:
            # close(2) sends a FLUSH, which nobody answers either.
            with suppress(OSError):
                os.close(descriptor)

    @pytest.mark.skipif(os.geteuid() != 0, reason="a bind mount needs root")
    def test_other_places_of_the_mount_go_with_it(self, mounted: Daemon) -> None:
        other = mounted.directory.with_name("other")
        other.mkdir()
        subprocess.run(["mount", "--bind", mounted.path("tracing"), str(other)], timeout=PATIENCE, check=True)
        assert is_mounted(other)
        assert mounted.stop(signal.SIGTERM) == 0
        assert not is_mounted(other)
        assert not is_mounted(mounted.directory)

    def test_umount_by_others_ends_the_daemon(self, mounted: Daemon) -> None:
        subprocess.run(["umount", str(mounted.directory)], timeout=PATIENCE, check=True)
        assert mounted.process.wait(PATIENCE) == 0

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    def test_signals_end_the_daemon(self, mounted: Daemon, number: signal.Signals) -> None:
        assert mounted.stop(number) == 0
        assert not is_mounted(mounted.directory)

    def test_an_idle_daemon_uses_no_cpu(self, mounted: Daemon) -> None:
        os.listdir(mounted.directory)

        def switches() -> list[str]:
            threads = Path(f"/proc/{mounted.process.pid}/task").glob("*/status")
            lines = [line for status in threads for line in status.read_text().splitlines()]
            return [line for line in lines if "ctxt_switches" in line]

        def is_idle() -> bool:
            before = switches()
            time.sleep(1)
            return switches() == before

        # On a busy host, the threads may take longer until they sleep.
        eventually(is_idle)

    def test_directory_names_with_blanks(self, directory: Path) -> None:
        odd = directory / "a b\\c\té"
        odd.mkdir()
        with daemon(odd):
            assert kprobefs("status", str(odd)).returncode == 0
        assert not is_mounted(odd)
        odd.rmdir()


@needs_fuse
@pytest.mark.mounted
class TestRun:
    """The command run, which makes a mount for another command."""

    def test_gives_the_path_and_takes_the_status(self) -> None:
        result = kprobefs("run", "--", "sh", "-c", 'echo $KPROBEFS; ls "$KPROBEFS/tracing"; exit 7')
        assert result.returncode == 7
        path, *names = result.stdout.splitlines()
        assert "kprobe_events" in names
        assert not os.path.exists(path)
        assert result.stderr == ""

    def test_options_of_the_command_are_its_own(self) -> None:
        assert kprobefs("run", "--layout", "tracefs", "echo", "--seed", "x").stdout == "--seed x\n"

    @pytest.mark.parametrize(
        ("command", "status"),
        [
            (["/no/such/command"], ExitStatus.NOT_FOUND),
            (["/etc/passwd"], ExitStatus.NOT_EXECUTABLE),
            (["sh", "-c", "kill -9 $$"], 128 + 9),
            (["true"], 0),
        ],
    )
    def test_exit_status(self, command: list[str], status: int) -> None:
        assert kprobefs("run", "--", *command).returncode == status

    @pytest.mark.parametrize("name", ["", "directory", "a_file", "a b"])
    def test_commands_in_path_that_cannot_be_started(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If a command cannot be started, `run` exits with the same status as the shell."""
        (tmp_path / "directory").mkdir()
        (tmp_path / "a_file").touch()
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        shell = subprocess.run(["bash", "-c", '"$0"', name], capture_output=True, check=False)
        told = kprobefs("run", "--", name)
        assert told.returncode == shell.returncode
        assert told.stderr.count("\n") == 1

    def test_a_mount_that_fails(self) -> None:
        assert kprobefs("run", "--seed", "666", "--", "true").returncode == ExitStatus.RUN_FAILED

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    def test_cleans_up_after_signals(self, number: signal.Signals) -> None:
        process = subprocess.Popen(
            [*PROGRAM, "run", "--", "sh", "-c", "echo $KPROBEFS; exec sleep 60"],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        path = process.stdout.readline().strip()
        assert is_mounted(Path(path))
        process.send_signal(number)
        assert process.wait(PATIENCE) == 128 + number
        process.stdout.close()
        assert not os.path.exists(path)

    @pytest.mark.parametrize("prepare", ["", "trap 'echo handled' TERM; "])
    def test_a_signal_ends_it_if_the_daemon_does_not_answer(self, prepare: str) -> None:
        script = f"{prepare}echo $KPROBEFS; read line; cat $KPROBEFS/machine/version; exit 3"
        with subprocess.Popen(
            [*PROGRAM, "run", "--", "sh", "-c", script],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            assert process.stdin is not None
            path = process.stdout.readline().strip()
            served = running(path)
            assert served is not None
            os.kill(served.pid, signal.SIGSTOP)
            try:
                process.stdin.write("\n")
                process.stdin.flush()
                eventually(lambda: condition(path) is MountState.HUNG)
                process.send_signal(signal.SIGTERM)
                assert process.wait(PATIENCE) == (3 if prepare else 128 + signal.SIGTERM)
                assert process.stdout.read() == ("handled\n" if prepare else "")
            finally:
                with suppress(ProcessLookupError):
                    os.kill(served.pid, signal.SIGKILL)
        assert not os.path.exists(path)

    def test_a_daemon_that_answers_is_not_killed(self, mounted: Daemon) -> None:
        kill_hung_daemon(str(mounted.directory))
        assert condition(str(mounted.directory)) is MountState.SERVING
        mounted.process.send_signal(signal.SIGSTOP)
        # On a busy host, a thread may still answer before the thread that takes the signal has run.
        eventually(lambda: condition(str(mounted.directory)) is MountState.HUNG)
        kill_hung_daemon(str(mounted.directory))
        assert mounted.process.wait(PATIENCE) == -signal.SIGKILL

    def test_a_removed_working_directory_does_not_change_the_status(self, tmp_path: Path) -> None:
        place = tmp_path / "gone"
        place.mkdir()
        script = 'rmdir "$1"; shift; exec "$@"'
        command = [*PROGRAM, "run", "--", "/bin/sh", "-c", "exit 3"]
        done = subprocess.run(
            ["sh", "-c", script, "sh", str(place), *command],
            cwd=place,
            env=environment(),
            capture_output=True,
            timeout=RUN,
            check=False,
        )
        assert done.returncode == 3
        assert b"kprobefs:" not in done.stderr

    def test_without_a_temporary_directory(self) -> None:
        script = "trap '' XFSZ; ulimit -f 0; exec \"$@\""
        done = subprocess.run(
            ["sh", "-c", script, "sh", *PROGRAM, "run", "--", "true"],
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=RUN,
            check=False,
        )
        assert done.returncode == 125
        assert done.stderr.startswith("kprobefs: temporary directory: ")
        assert "TMPDIR" in done.stderr
        assert done.stderr.count("\n") == 1
