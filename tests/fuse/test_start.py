"""The start of a mount either succeeds, or leaves nothing behind and prints one line with the reason."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest

from emulated_kernel.image.builtin_image import PREBUILT
from emulated_kernel.util.config import MachineConfig
from kprobefs.common.compile_ahead import FILE_NAME
from kprobefs.common.daemon_registry import log_path
from kprobefs.common.errors import ADDRESS_SPACE, DATA, FILES, CliError, ExitStatus
from kprobefs.daemon.daemon import start_in_background
from kprobefs.mount_options import MountOptions
from tests.fuse.harness import (
    PATIENCE,
    PROGRAM,
    REAL_PROGRAM,
    daemon,
    environment,
    eventually,
    is_alive,
    is_mounted,
    kprobefs,
    needs_fuse,
)

pytestmark = [needs_fuse, pytest.mark.mounted]


def refusal(*arguments: str) -> str:
    """Run the program, which must fail, and return its one line on standard error without the prefix."""
    result = kprobefs(*arguments)
    assert result.returncode in (ExitStatus.FAILURE, ExitStatus.USAGE, ExitStatus.RUN_FAILED)
    assert (result.stdout, result.stderr.count("\n")) == ("", 1), result.stderr
    return result.stderr.removeprefix("kprobefs: ").rstrip("\n")


def logs() -> list[str]:
    """Return the suffixes of the files in the daemons' runtime directory."""
    directory = Path(os.environ["KPROBEFS_RUNTIME_DIRECTORY"], "daemons")
    return sorted(path.suffix for path in directory.iterdir()) if directory.exists() else []


@pytest.mark.parametrize("kind", ["device", "fifo", "directory", "huge", "huge ELF"])
@pytest.mark.parametrize("command", ["mount", "mount -f", "run"])
def test_images_are_files_of_some_size(command: str, kind: str, directory: Path, tmp_path: Path) -> None:
    image, why = tmp_path / "image", "not a regular file"
    if kind == "fifo":
        os.mkfifo(image)
    elif kind == "directory":
        image.mkdir()
    elif kind == "device":
        image.symlink_to("/dev/zero")
    else:
        why = "not a usable kernel: a file of more than 4 GiB"
        image.touch()
        if kind == "huge ELF":
            image.write_bytes((PREBUILT / "x86_64" / "vmlinux").read_bytes())
            why = "40960 MiB; a kernel image has at most 1024 MiB"
        os.truncate(image, 40 << 30)
    target = "true" if command == "run" else str(directory)
    result = kprobefs(*command.split(), "--image", str(image), target, program=REAL_PROGRAM)
    assert result.returncode == (ExitStatus.RUN_FAILED if command == "run" else ExitStatus.USAGE)
    assert result.stderr == f"kprobefs: {image}: {why}\n"
    assert not is_mounted(directory)
    assert logs() == []


@pytest.mark.parametrize("foreground", [[], ["-f"]], ids=["background", "foreground"])
def test_logs_are_files_outside_of_the_mount(foreground: list[str], directory: Path, tmp_path: Path) -> None:
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "way").symlink_to(directory)
    for path, why in {
        str(fifo): "not a regular file",
        str(tmp_path): "not a regular file",
        "/dev/zero": "not a regular file",
        str(link): "a symbolic link; name the file itself",
        "/no/such/x": "No such file or directory",
        f"{directory}/log": "inside a mount point",
        f"{tmp_path}/way/log": "inside a mount point",
    }.items():
        assert refusal("mount", *foreground, "--log", path, str(directory)) == f"--log {path}: {why}"
        assert not is_mounted(directory)
    assert not (tmp_path / "elsewhere").exists()
    assert os.listdir(directory) == []


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_standard_descriptors_may_be_closed(closed: str, directory: Path) -> None:
    script = f'"$@" mount "$D" {closed}; echo $?; echo 0 > "$D/kprobes/optimization"'
    result = subprocess.run(
        ["sh", "-c", script, "sh", *PROGRAM],
        env={**environment(), "D": str(directory)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (result.stdout, result.stderr) == ("0\n", "")
    assert kprobefs("umount", str(directory)).returncode == 0


def test_a_null_device_that_is_closed(directory: Path) -> None:
    """If /dev/null cannot be opened, `mount` fails with one line. `--version` does not need /dev/null and
    succeeds.
    """
    if os.geteuid() != 0:
        pytest.skip("a machine's devices are replaced by root alone")
    script = """
        mount --make-rprivate / && sh "$1" "$2" && chmod 600 /dev/null && chown 1:1 /dev/null || exit
        shift 2
        setpriv --bounding-set=-all "$@" --version >&2 && setpriv --bounding-set=-all "$@" mount "$D"
    """
    devices = Path(__file__).parent / "own_devices.sh"
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", devices, directory.parent / "devices", *PROGRAM],
        env={**environment(), "D": str(directory)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    version, *_, told = result.stderr.splitlines()
    assert version.startswith("kprobefs ")
    assert (result.returncode, told) == (1, "kprobefs: /dev/null: Permission denied")
    assert not is_mounted(directory)


def test_what_the_starter_was_given_is_not_kept(directory: Path) -> None:
    """The daemon closes all descriptors that it has inherited from the process that started the mount.

    Otherwise, the reader of an inherited pipe would wait for the pipe's end until the unmount.
    """
    reader, writer = os.pipe()
    command = [*PROGRAM, "mount", str(directory)]
    assert (
        subprocess.run(command, env=environment(), pass_fds=(writer,), timeout=30, check=False).returncode
        == 0
    )
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert select.select([pipe], [], [], PATIENCE)[0]
        assert pipe.read() == b""
    assert (directory / "kprobe_events").read_text() == ""
    assert kprobefs("umount", str(directory)).returncode == 0


@pytest.mark.parametrize("seed", ["12345678901234567890123456", "-1", "1_0", "0x10", "", "\u0664"])
def test_seeds(seed: str, directory: Path) -> None:
    message = refusal("mount", f"--seed={seed}", str(directory))
    assert message.startswith(f"argument --seed: {seed!r} is not a number from 0 to ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["hit", "--hits", "-1"],
        ["hit", "--hits", "0"],
        ["probes", "--rounds", "0"],
        ["probes", "--count", "x"],
        ["return", "--tasks", "0"],
        ["return", "--cpus", "65"],
    ],
    ids=" ".join,
)
def test_numbers_of_benchmarks(arguments: list[str]) -> None:
    expected = f"argument {arguments[1]}: '{arguments[2]}' is not a number from 1 to"
    assert expected in refusal("bench", *arguments)


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["status", "--json"]], ids=" ".join)
def test_a_full_disk_takes_no_output(arguments: list[str], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*PROGRAM, *arguments],
            env={**environment(), "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=30,
            check=False,
        )
    assert (result.returncode, result.stderr) == (1, b"kprobefs: standard output: No space left on device\n")


def test_not_inside_of_a_mount_of_its_own(directory: Path) -> None:
    assert kprobefs("mount", str(directory)).returncode == 0
    try:
        message = refusal("mount", f"{directory}/scratch")
        assert message == f"{directory}/scratch: inside a mount of kprobefs, {directory}; mount elsewhere"
    finally:
        assert kprobefs("umount", str(directory)).returncode == 0


def test_mkdir_of_a_mount_that_fails(directory: Path) -> None:
    below = directory / "not" / "there"
    for arguments in (("--log", "/nosuch/x"), ("--image", __file__), ("--foreground", "--image", __file__)):
        assert kprobefs("mount", "--mkdir", *arguments, str(below)).returncode != 0
        assert not (directory / "not").exists()
    assert kprobefs("mount", "--mkdir", str(below / ("x" * 300))).returncode != 0
    assert not (directory / "not").exists()


def test_mkdir(directory: Path) -> None:
    below = directory / "a" / "b"
    assert kprobefs("mount", "--mkdir", str(below)).returncode == 0
    assert is_mounted(below)
    assert kprobefs("umount", str(below)).returncode == 0
    below.rmdir()
    below.parent.rmdir()
    (directory.parent / "file").touch()
    refused = refusal("mount", "--mkdir", f"{directory.parent}/file/x")
    assert refused.endswith("can't create it: Not a directory")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_daemon_ends_with_its_starter(directory: Path, number: signal.Signals) -> None:
    """If the process that starts a daemon is killed while the daemon builds its kernel, the daemon ends, too.

    In this test, building the kernel takes a minute.
    """
    starter = subprocess.Popen([*PROGRAM, "mount", "--seed", "668", str(directory)], env=environment())
    records = Path(os.environ["KPROBEFS_RUNTIME_DIRECTORY"], "daemons")
    eventually(lambda: records.exists() and [path for path in records.glob("*.json") if path.stat().st_size])
    [record] = records.glob("*.json")

    pid = json.loads(record.read_text())["daemon"]["pid"]
    time.sleep(0.2)
    starter.send_signal(number)
    starter.wait(PATIENCE)
    eventually(lambda: not is_alive(pid), "the daemon is still there")
    assert not is_mounted(directory)
    # Nothing keeps the next start from succeeding.
    assert kprobefs("mount", str(directory)).returncode == 0
    assert kprobefs("umount", str(directory)).returncode == 0


@pytest.mark.parametrize("command", ["mount", "run"])
def test_an_interrupt_of_the_terminal_ends_a_start(
    command: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGINT from the terminal ends a start: until the mount is there, the daemon is in the caller's process
    group.
    """
    holding = tmp_path / "holding"
    holding.touch()
    monkeypatch.setenv("KPROBEFS_TEST_HOLDING", str(holding))
    words = [command, "--seed", "673", *(["--", "true"] if command == "run" else [str(directory)])]
    starter = subprocess.Popen(
        [*PROGRAM, *words], env=environment(), stderr=subprocess.PIPE, process_group=0, text=True
    )
    records = Path(os.environ["KPROBEFS_RUNTIME_DIRECTORY"], "daemons")
    eventually(lambda: records.exists() and [path for path in records.glob("*.json") if path.stat().st_size])
    os.killpg(starter.pid, signal.SIGINT)
    if command == "run":
        # Unlike `mount`, `run` waits until its kernel is built.
        holding.unlink()
    _, told = starter.communicate(timeout=PATIENCE)
    assert (starter.returncode, told) == (128 + signal.SIGINT, "")
    eventually(lambda: ".json" not in logs(), "its record is still there")
    assert not is_mounted(directory)


def test_a_start_leaves_the_log_of_another_one(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another daemon already starts for a directory, `mount` fails, and does not change that daemon's
    log.
    """
    holding = tmp_path / "holding"
    holding.touch()
    monkeypatch.setenv("KPROBEFS_TEST_HOLDING", str(holding))
    with subprocess.Popen([*PROGRAM, "mount", "--seed", "673", str(directory)], env=environment()) as first:
        eventually(lambda: holding.read_text() == "held")
        log = log_path(str(directory))
        log.write_text("a warning\n")
        assert "another kprobefs daemon serves it" in refusal("mount", str(directory))
        holding.unlink()
        assert first.wait(PATIENCE) == 0
    assert log.read_text() == "a warning\n"
    assert kprobefs("umount", str(directory)).returncode == 0


def test_logs_do_not_pile_up(directory: Path) -> None:
    for _ in range(3):
        assert kprobefs("mount", str(directory)).returncode == 0
        assert logs() == [".json", ".log"]
        assert kprobefs("umount", str(directory)).returncode == 0
        eventually(lambda: logs() == [])
    assert kprobefs("run", "--", "true").returncode == 0
    assert logs() == []
    for number in range(12):
        Path(os.environ["KPROBEFS_RUNTIME_DIRECTORY"], "daemons", f"left{number}.log").touch()
    for number in range(3):
        other = directory / str(number)
        other.mkdir()
        assert kprobefs("mount", "--seed", "666", str(other)).returncode == ExitStatus.FAILURE
        other.rmdir()
    assert 5 < len(logs()) < 15


def test_killing_the_runner_ends_its_command_and_removes_its_directory() -> None:
    process = subprocess.Popen(
        [*PROGRAM, "run", "--", "sh", "-c", "echo $$ $KPROBEFS; exec sleep 60"],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    pid, path = process.stdout.readline().split()
    assert is_mounted(Path(path))
    process.kill()
    process.wait(PATIENCE)
    process.stdout.close()
    eventually(lambda: not is_alive(int(pid)), "the command is still there")
    eventually(lambda: not is_mounted(Path(path)), "the mount is still there")
    eventually(lambda: not Path(path).parent.exists(), "its directory is still there")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_what_the_command_has_started_ends_with_it(number: signal.Signals) -> None:
    """When `run` is killed, the processes that its command has started are ended, too.

    A process in another session or without $KPROBEFS in its environment is not killed.
    """
    started = "sleep 60 & c=$!; setsid sleep 61 & s=$!; env -u KPROBEFS sleep 62 & o=$!"
    # A job of an interactive shell has a process group of its own.
    script = f"{started}; set -m; sleep 63 & echo $$ $c $! $s $o $KPROBEFS; wait"
    process = subprocess.Popen(
        [*PROGRAM, "run", "--", "bash", "-c", script], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    *pids, path = process.stdout.readline().split()
    shell, child, job, session, others = map(int, pids)
    try:
        eventually(lambda: os.getsid(session) == session)
        eventually(lambda: Path(f"/proc/{others}/comm").read_text() == "sleep\n")
        process.send_signal(number)
        process.wait(PATIENCE)
        for pid in (shell, child, job):
            eventually(lambda pid=pid: not is_alive(pid), "it is still there")
        eventually(lambda: not Path(path).parent.exists(), "the directory is still there")
        assert is_alive(others)
    finally:
        for pid in (session, others):
            os.kill(pid, signal.SIGKILL)
        process.stdout.close()


@pytest.mark.parametrize(
    ("limit", "needed"),
    [
        ("-n 5", f"Too many open files: a mount needs {FILES} open files; run ulimit -n {FILES}"),
        ("-n 10", f"Too many open files: a mount needs {FILES} open files; run ulimit -n {FILES}"),
        ("-v 600000", f"Cannot allocate memory: a mount needs {ADDRESS_SPACE} kB of address space"),
        ("-d 10000", f"a mount needs {DATA} kB of data; run ulimit -d {DATA}"),
        ("-d 20000", f"a mount needs {DATA} kB of data; run ulimit -d {DATA}"),
        ("-d 60000", f"a mount needs {DATA} kB of data; run ulimit -d {DATA}"),
        (f"-n {FILES}", ""),
        (f"-d {DATA}", ""),
        (f"-v {ADDRESS_SPACE}", ""),
    ],
)
def test_what_a_mount_needs(limit: str, needed: str, directory: Path) -> None:
    """If a resource limit is lower than a mount needs, `mount` fails with one line that names the needed
    limit.

    With exactly the needed limit, `mount` succeeds.
    """
    script = f'ulimit {limit}; exec "$@" mount "$D"'
    result = subprocess.run(
        ["bash", "-c", script, "bash", *REAL_PROGRAM],
        env={**environment(), "D": str(directory)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if needed:
        assert (result.returncode, is_mounted(directory)) == (ExitStatus.FAILURE, False)
        assert (needed in result.stderr, result.stderr.count("\n")) == (True, 1), result.stderr
    else:
        assert (result.returncode, result.stderr) == (0, "")
        assert kprobefs("umount", str(directory)).returncode == 0


NAMESPACES = {
    "no /proc": ("-m", "mount -t tmpfs none /proc", "/proc: no file system of processes; run mount -t proc"),
    "subset=pid": (
        "-mpf",
        "mount -t proc -o subset=pid none /proc",
        "/proc: has only processes; mount it without subset=pid",
    ),
    "of another pid namespace": ("-pf", "true", "/proc: shows another pid namespace; run mount -t proc"),
}
"""Case -> options of unshare(1), a command in the namespaces, and the error of the program."""


@pytest.mark.parametrize("command", ["mount DIR", "mount -f DIR", "run -- true", "trace p:vfs_read -- true"])
@pytest.mark.parametrize("kind", NAMESPACES)
def test_a_proc_that_is_of_no_use(kind: str, command: str, directory: Path, tmp_path: Path) -> None:
    flags, mounting, why = NAMESPACES[kind]
    if os.geteuid() != 0:
        pytest.skip("mounting /proc needs root")
    script = f'{mounting} && exec "$@"'
    words = [str(directory) if word == "DIR" else word for word in command.split()]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    result = subprocess.run(
        ["unshare", flags, "sh", "-c", script, "sh", *REAL_PROGRAM, *words],
        env={**environment(), "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if result.stderr.startswith("mount:"):
        pytest.skip(result.stderr.strip())
    assert result.returncode == (ExitStatus.FAILURE if "DIR" in command else ExitStatus.RUN_FAILED)
    assert result.stderr.startswith(f"kprobefs: {why}")
    assert result.stderr.count("\n") == 1
    assert not is_mounted(directory)
    assert os.listdir(temporary) == []


@pytest.mark.parametrize("command", ["mount DIR", "mount -f DIR", "run -- true"])
@pytest.mark.parametrize("option", ["size=4k", "nr_inodes=2"])
def test_a_runtime_directory_that_is_full(
    option: str, command: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(place)], timeout=PATIENCE, check=True)
    try:
        (place / "daemons").mkdir(mode=0o700)
        if option.startswith("size"):
            (place / "ballast").write_bytes(bytes(4096))
        before = sorted(place.rglob("*"))
        monkeypatch.setenv("KPROBEFS_RUNTIME_DIRECTORY", str(place))
        told = refusal(*(str(directory) if word == "DIR" else word for word in command.split()))
        assert told.startswith(f"{place}/daemons/")
        assert told.endswith(": No space left on device; free some space, or set KPROBEFS_RUNTIME_DIRECTORY")
        assert sorted(place.rglob("*")) == before
    finally:
        subprocess.run(["umount", "-l", str(place)], timeout=PATIENCE, check=True)


def test_a_failed_start_has_no_log_when_the_command_returns(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon removes its log before the starting process gets the failure, however long this takes."""
    unlink = Path.unlink

    def unlink_slowly(path: Path, missing_ok: bool = False) -> None:
        time.sleep(0.3)
        unlink(path, missing_ok)

    def build(_options: MountOptions) -> NoReturn:
        raise CliError("no kernel today")

    monkeypatch.setattr(Path, "unlink", unlink_slowly)
    with pytest.raises(CliError, match="no kernel today"):
        start_in_background(MountOptions(str(directory), MachineConfig()), build)
    assert logs() == []


@pytest.mark.parametrize("is_file", [True, False])
@pytest.mark.parametrize("command", ["mount DIR", "mount -f DIR", "run -- true"])
def test_a_runtime_directory_that_is_none(
    command: str, is_file: bool, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KPROBEFS_RUNTIME_DIRECTORY", str(tmp_path / "file") if is_file else "relative")
    told = refusal(*(str(directory) if word == "DIR" else word for word in command.split()))
    assert "set KPROBEFS_RUNTIME_DIRECTORY" in told if is_file else "not an absolute path" in told
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("command", ["debug-info -o", "matrix --arch i386 --junit"])
def test_a_full_disk_for_a_file(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk of an output file is full, the error names this file, and not standard output."""
    monkeypatch.chdir(tmp_path)
    words = [*command.split(), "/dev/full", *(["--", "true"] if "matrix" in command else [])]
    done = kprobefs(*words, program=REAL_PROGRAM)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("kprobefs: /dev/full: No space left on device")


IGNORING_CHILDREN = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def without_bytecode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the words of a command that starts the program without any cached bytecode."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "none"))
    # The program must not be forked from a process that has imported the modules.
    return [sys.executable, "-P", "-m", "kprobefs"]


def test_a_start_without_bytecode_leaves_no_compiler(without_bytecode: list[str]) -> None:
    """The process that compiles modules ends before `run` starts its command. The file with the compiled
    modules is closed by then.

    This is the same if the caller ignores SIGCHLD, although the kernel then keeps no exit status of children.
    """
    script = """
        children=$(cat /proc/$PPID/task/$PPID/children)
        echo $children
        for child in $children; do ls -l /proc/$child/fd; done
        echo $$
    """
    program = [sys.executable, "-c", IGNORING_CHILDREN, *without_bytecode]
    done = kprobefs("run", "--", "sh", "-c", script, program=program)
    children, *descriptors, shell = done.stdout.splitlines()
    assert (done.returncode, done.stderr, len(children.split())) == (0, "", 2)
    assert shell in children.split()
    assert not any(f"memfd:{FILE_NAME}" in line for line in descriptors)


def test_the_caller_may_ignore_ends_of_children(without_bytecode: list[str], directory: Path) -> None:
    """`mount` succeeds if the caller ignores SIGCHLD."""
    program = [sys.executable, "-c", IGNORING_CHILDREN, *without_bytecode]
    done = kprobefs("mount", str(directory), program=program)
    assert (done.returncode, done.stderr) == (0, "")
    assert kprobefs("umount", str(directory)).returncode == 0


def test_a_foreground_without_bytecode_leaves_no_compiler(
    without_bytecode: list[str], directory: Path
) -> None:
    with daemon(directory, program=without_bytecode) as served:
        pid = served.process.pid
        [_watcher] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        targets = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
        assert not any(f"memfd:{FILE_NAME}" in target for target in targets)
        assert Path(served.path("kprobes", "enabled")).read_text() == "1\n"
