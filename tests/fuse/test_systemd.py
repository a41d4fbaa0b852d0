"""The systemd units: checked by systemd-analyze, and run by a real systemd in separate namespaces."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from kprobefs.cli import install_service
from kprobefs.common.errors import CliError
from tests.fuse.harness import PATIENCE, REAL_PROGRAM, ROOT, RUN, daemon, eventually, kprobefs, needs_fuse

UNITS = ROOT / "systemd"
SYSTEMD = Path("/usr/lib/systemd/systemd")
MANAGER = Path(__file__).parent / "systemd_manager.sh"
ISOLATED = "timeout -k 2 900 unshare -m -p -f -u -i -C --mount-proc --kill-child"
NAMESPACES = re.compile(
    r"^(?!PrivateMounts=no$|PrivateNetwork=|ProtectClock=|ProtectHostname=)"
    r"(Protect|Private|ReadOnly|ReadWrite|Inaccessible|Bind|Root|Temporary|Mount)\w*=",
    re.M,
)
KEPT_ALIVE = "WatchdogTimestampMonotonic"
"""Property of a unit with the time of its last keep-alive."""
EXPOSURE = 3.3
"""Upper limit, from 0 to 10, of the exposure that systemd-analyze finds. The README has this number."""


def program_path(directory: Path) -> Path:
    """Return the path of a script that runs the program with its real kernel, in place of
    /usr/bin/kprobefs.
    """
    path = directory / "kprobefs"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.join(REAL_PROGRAM)} "$@"\n')
    path.chmod(0o755)
    return path


def install(unit: str, directory: Path, name: str | None = None, extra: str = "") -> Path:
    """Write the unit `unit` to `directory` so that it starts the tested program, and return the written
    file's path.

    `name`: name of the file, by default that of the unit. `extra`: additional lines for the section [Unit].
    """
    directory.mkdir(exist_ok=True)
    text = (UNITS / unit).read_text()
    text = re.sub(r"^(Exec\w+=)\S+", rf"\g<1>{program_path(directory)}", text, flags=re.M)
    path = directory / (name or Path(unit).name)
    path.write_text(text.replace("[Unit]\n", f"[Unit]\n{extra}", 1))
    return path


@pytest.fixture
def user_runtime(directory: Path) -> Path:
    """Return the path of a directory for $XDG_RUNTIME_DIR.

    The path is short, because the host's units name sockets in this directory, and a socket's path has at
    most 108 bytes.
    """
    return directory.parent


@pytest.mark.parametrize(
    ("unit", "name"),
    [
        ("kprobefs.service", None),
        ("kprobefs@.service", "kprobefs@mnt-kp.service"),
        ("user/kprobefs.service", None),
    ],
)
def test_systemd_finds_no_fault(unit: str, name: str | None, user_runtime: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    path = install(unit, tmp_path / "units", name)
    scope = ["--user"] if unit.startswith("user/") else []
    result = subprocess.run(
        ["systemd-analyze", *scope, "verify", "--man=no", str(path)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(user_runtime)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("unit", ["kprobefs.service", "kprobefs@.service"])
def test_how_exposed_it_is(unit: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    path = install(unit, tmp_path / "units", unit.replace("@.", "@mnt-kp."))
    command = [
        "systemd-analyze",
        "security",
        "--offline=true",
        "--no-pager",
        f"--threshold={EXPOSURE * 10:.0f}",
    ]
    result = subprocess.run(
        [*command, str(path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )
    if "unrecognized option" in result.stderr:
        pytest.skip("this systemd-analyze asks a running manager alone")
    assert result.returncode == 0, result.stdout.splitlines()[-1]
    assert f"exposure level for {path.name}: {EXPOSURE}" in result.stdout


@pytest.mark.parametrize("unit", ["kprobefs.service", "kprobefs@.service", "user/kprobefs.service"])
def test_no_unit_has_a_mount_namespace(unit: str) -> None:
    assert NAMESPACES.findall((UNITS / unit).read_text()) == []


OPENED = re.compile(r'named: \(do_sys_openat2\+0x0/0x[0-9a-f]+\) file="scratch/missing"')
CLIENT = """
cd {}
echo 'p:named do_sys_openat2 file=+0($arg2):ustring' > kprobe_events
echo 1 > tracing/events/sched/sched_process_exec/enable
echo 1 > tracing/events/kprobes/named/enable
cat scratch/missing
cat < tracing/trace
"""


def is_seen_as_it_is(trace: str) -> bool:
    """Return True if `trace` shows the execve() of CLIENT's `cat`, and the file name in the failed open() of
    `cat`.
    """
    lines = [line.split(": ", 1)[-1] for line in trace.splitlines() if line.lstrip().startswith("cat-")]
    program = any(line.startswith("sched_process_exec: filename=/") for line in lines)
    return program and any(map(OPENED.fullmatch, lines))


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize("unit", ["kprobefs.service", "kprobefs@.service"])
def test_the_units_capabilities_show_roots_clients_as_they_are(unit: str, directory: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip(
            "a capability is taken out of the bounding set by root alone: capabilities(7), CAP_SETPCAP"
        )
    found = re.search(r"^CapabilityBoundingSet=(.+)$", (UNITS / unit).read_text(), re.M)
    assert found is not None
    kept = ",".join(name.replace("CAP_", "+").lower() for name in found[1].split())
    as_unit = ["setpriv", f"--bounding-set=-all,{kept}", "--no-new-privs"]
    if subprocess.run([*as_unit, "test", "-r", "/dev/fuse"], check=False).returncode:
        pytest.skip("a root with the unit's capabilities gets no /dev/fuse here")
    program = [*as_unit, *REAL_PROGRAM]
    with daemon(directory, program=program):
        client = ["sh", "-c", CLIENT.format(directory)]
        trace = subprocess.run(client, capture_output=True, text=True, timeout=30, check=False).stdout
        assert is_seen_as_it_is(trace), trace


def cgroup2() -> Path:
    """Return the path of the cgroup2 hierarchy. Skip the test if a system manager cannot run here."""
    if os.geteuid() != 0:
        pytest.skip("running a system manager needs root")
    if not SYSTEMD.exists() or shutil.which("unshare") is None or shutil.which("nsenter") is None:
        pytest.skip("no systemd, unshare or nsenter here")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if " - cgroup2 " in line:
            return Path(line.split()[4])
    pytest.skip("no cgroup2 hierarchy is mounted")


@dataclass
class Manager:
    """A running systemd, known by the pid of its process."""

    pid: int

    def inside(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the manager's namespaces."""
        return subprocess.run(
            ["nsenter", "-t", str(self.pid), "-m", "-p", "-u", "-i", "-C", "timeout", f"{RUN}", *command],
            capture_output=True,
            text=True,
            timeout=RUN + PATIENCE,
            check=False,
        )

    def show(self, unit: str, name: str) -> str:
        """Return the value of the property `name` of `unit`."""
        return self.inside("systemctl", "show", "-P", name, unit).stdout.strip()

    def drop_in(self, unit: str, text: str) -> None:
        """Add a drop-in file with `text` to the settings of `unit`."""
        path = f"/run/systemd/system/{unit}.d/test.conf"
        self.inside("sh", "-c", 'mkdir -p "${1%/*}"; printf %s "$2" > "$1"', "sh", path, text)
        assert self.inside("systemctl", "daemon-reload").returncode == 0

    def is_mounted(self, directory: str) -> bool:
        """Return True if a file system is mounted on `directory` in the manager's mount namespace."""
        return self.inside("findmnt", directory).returncode == 0


@contextmanager
def manager(units: Path) -> Iterator[Manager]:
    """Run a system manager with the units of the directory `units`. Afterwards, end its processes and remove
    its cgroups.
    """
    # A group that an earlier run has left may have this process's number.
    group = Path(tempfile.mkdtemp(prefix="kprobefs-test-", dir=cgroup2()))
    process = subprocess.Popen(
        ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec {ISOLATED} bash "$0" "$1"', MANAGER, units],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        found: list[int] = []
        _eventually(lambda: found.extend(_systemd_below(process.pid)) or found, "systemd didn't start")
        running = Manager(found[0])
        _eventually(lambda: running.inside("systemctl", "show").returncode == 0, "no answer")
        yield running
    finally:
        process.terminate()
        process.wait(PATIENCE)
        _remove_groups(group)


_eventually = partial(eventually, interval=0.3, patience=RUN)
"""eventually() for conditions that ask the manager. Each question starts three processes."""


def _systemd_below(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        is_systemd = Path(f"/proc/{pid}/comm").read_text() == "systemd\n"
    except (FileNotFoundError, ProcessLookupError):
        # The process was a command of the set-up, and has ended since it was listed.
        return []
    below = [found for child in children for found in _systemd_below(int(child))]
    return [pid, *below] if is_systemd else below


def _remove_groups(group: Path) -> None:
    def is_removed(directory: str) -> bool:
        with suppress(OSError):
            os.rmdir(directory)
        return not os.path.exists(directory)

    for directory, _, _ in os.walk(group, topdown=False):
        _eventually(partial(is_removed, directory), f"{directory}: a process is still in it")


@pytest.fixture(scope="module")
def systemd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    """Yield a system manager that knows kprobefs's system units."""
    cgroup2()
    units = tmp_path_factory.mktemp("systemd") / "units"
    install("kprobefs.service", units, extra="DefaultDependencies=no\n")
    install("kprobefs@.service", units, extra="DefaultDependencies=no\n")
    with manager(units) as running:
        yield running


@needs_fuse
@pytest.mark.mounted
@pytest.mark.slow
class TestService:
    """The system unit and its template unit, run by a real systemd.

    A test may leave kprobefs.service running, because starting it again does nothing.
    """

    def test_start_and_stop(self, systemd: Manager) -> None:
        unit, directory = "kprobefs.service", "/run/kprobefs/mnt"
        started = systemd.inside("systemctl", "start", unit)
        assert started.returncode == 0, started.stderr + systemd.inside("systemctl", "status", unit).stdout
        assert "Linux version" in systemd.inside("cat", f"{directory}/machine/version").stdout
        assert systemd.show(unit, "StatusText") == f"serving {directory}"
        assert "allow_other" not in systemd.inside("findmnt", "-n", "-o", "FS-OPTIONS", directory).stdout
        assert systemd.inside("systemctl", "stop", unit).returncode == 0
        assert systemd.show(unit, "Result") == "success"
        assert not systemd.is_mounted(directory)

    def test_the_kernel_works_under_the_units_restrictions(self, systemd: Manager) -> None:
        unit, directory = "kprobefs.service", "/run/kprobefs/mnt"
        assert systemd.inside("systemctl", "start", unit).returncode == 0
        script = f"""
            cd {directory}
            echo 'p:seen vfs_read comm=$comm' > kprobe_events
            echo 1 > tracing/events/kprobes/seen/enable
            echo text > scratch/file
            cat scratch/file
            echo 'strlen "four"' > machine/call
            cat machine/call machine/tasks tracing/trace
            echo 0 > tracing/events/kprobes/seen/enable
        """
        result = systemd.inside("sh", "-c", script)
        assert result.stderr == ""
        lines = result.stdout.splitlines()
        assert lines[:2] == ["text", "strlen = 0x4 (4)"]
        assert any(line.split()[-2:] == ["R", "cat"] for line in lines)
        assert any(line.split()[-2:] == ["S", "sh"] for line in lines)
        assert any(" seen: (vfs_read+0x0/" in line and 'comm="cat"' in line for line in lines)

    def test_clients_are_seen_as_they_are(self, systemd: Manager) -> None:
        unit, directory = "kprobefs.service", "/run/kprobefs/mnt"
        assert systemd.inside("systemctl", "start", unit).returncode == 0
        trace = systemd.inside("sh", "-c", CLIENT.format(directory)).stdout
        assert is_seen_as_it_is(trace), trace
        cleared = "echo 0 > tracing/events/enable; echo > kprobe_events"
        assert systemd.inside("sh", "-c", f"cd {directory}; {cleared}").returncode == 0

    def test_restarts_after_a_kill(self, systemd: Manager) -> None:
        unit, directory = "kprobefs.service", "/run/kprobefs/mnt"
        assert systemd.inside("systemctl", "start", unit).returncode == 0
        systemd.inside("sh", "-c", f"echo p:stays vfs_read > {directory}/kprobe_events")
        systemd.inside("systemctl", "kill", "-s", "KILL", unit)
        _eventually(lambda: systemd.show(unit, "NRestarts") == "1")
        _eventually(lambda: "Linux version" in systemd.inside("cat", f"{directory}/machine/version").stdout)
        assert systemd.inside("cat", f"{directory}/kprobe_events").stdout == "p:kprobes/stays vfs_read\n"
        assert (
            "directory /var/lib/kprobefs/mnt\nkept yes\n"
            in systemd.inside("cat", f"{directory}/machine/state").stdout
        )

    def test_stops_under_a_blocked_reader(self, systemd: Manager) -> None:
        unit, directory = "kprobefs.service", "/run/kprobefs/mnt"
        assert systemd.inside("systemctl", "start", unit).returncode == 0
        reader = subprocess.Popen(
            ["nsenter", "-t", str(systemd.pid), "-m", "cat", f"{directory}/tracing/trace_pipe"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(0.3)
        assert reader.poll() is None
        assert systemd.inside("systemctl", "stop", unit).returncode == 0
        assert systemd.show(unit, "Result") == "success"
        assert reader.wait(PATIENCE) != 0

    def test_a_foreign_mount_keeps_its_data(self, systemd: Manager) -> None:
        unit, directory = "kprobefs@run-data.service", "/run/data"
        script = f"mkdir {directory} && mount -t tmpfs data {directory} && echo kept > {directory}/file"
        assert systemd.inside("sh", "-c", script).returncode == 0
        for command in ("start", "stop", "restart", "stop"):
            systemd.inside("systemctl", command, unit)
            assert systemd.inside("cat", f"{directory}/file").stdout == "kept\n", command
        systemd.inside("systemctl", "reset-failed", unit)

    def test_a_daemon_that_hangs_is_restarted(self, systemd: Manager) -> None:
        unit, directory = "kprobefs@run-hangs.service", "/run/hangs"
        systemd.drop_in(unit, "[Service]\nWatchdogSec=5\n")
        assert systemd.inside("systemctl", "start", unit).returncode == 0
        before = systemd.show(unit, "MainPID")
        for _ in range(2):
            told = systemd.show(unit, KEPT_ALIVE)
            _eventually(lambda told=told: systemd.show(unit, KEPT_ALIVE) != told, "no word of it")
        assert (systemd.show(unit, "MainPID"), systemd.show(unit, "NRestarts")) == (before, "0")
        systemd.inside("kill", "-STOP", before)
        _eventually(lambda: systemd.show(unit, "NRestarts") == "1", "it was not restarted")
        _eventually(lambda: systemd.show(unit, "ActiveState") == "active", "it didn't come back")
        assert systemd.show(unit, "MainPID") != before
        assert "Linux version" in systemd.inside("cat", f"{directory}/machine/version").stdout
        assert systemd.inside("systemctl", "stop", unit).returncode == 0

    def test_a_daemon_that_is_busy_is_left_to_its_work(self, systemd: Manager) -> None:
        """If a call in the kernel takes longer than the watchdog's period, systemd does not restart the
        daemon.
        """
        unit, directory = "kprobefs@run-works.service", "/run/works"
        options = "Environment=KPROBEFS_OPTIONS=--limit=run_budget_ms=3000"
        systemd.drop_in(unit, f"[Service]\nWatchdogSec=2\n{options}\n")
        assert systemd.inside("systemctl", "start", unit).returncode == 0
        before = systemd.show(unit, "MainPID")
        systemd.inside(
            "sh", "-c", f"(echo '_raw_spin_lock \"held\"' > {directory}/machine/call) > /dev/null 2>&1 &"
        )
        _eventually(lambda: systemd.show(unit, "StatusText") == f"busy {directory}")
        _eventually(lambda: systemd.show(unit, "StatusText") == f"serving {directory}", patience=60)
        assert (systemd.show(unit, "MainPID"), systemd.show(unit, "NRestarts")) == (before, "0")
        assert systemd.inside("systemctl", "stop", unit).returncode == 0

    def test_wrong_options_are_not_tried_again(self, systemd: Manager) -> None:
        unit = "kprobefs@run-wrong.service"
        systemd.drop_in(unit, "[Service]\nEnvironment=KPROBEFS_OPTIONS=--cpus=none\n")
        assert systemd.inside("systemctl", "start", unit).returncode != 0
        assert systemd.show(unit, "ExecMainStatus") == "2"
        assert (systemd.show(unit, "ActiveState"), systemd.show(unit, "NRestarts")) == ("failed", "0")

    def test_nothing_stale_is_left(self, systemd: Manager) -> None:
        unit, directory = "kprobefs@run-dies.service", "/run/dies"
        systemd.drop_in(unit, "[Service]\nRestart=no\n")
        assert systemd.inside("systemctl", "start", unit).returncode == 0
        systemd.inside("systemctl", "kill", "-s", "KILL", unit)
        _eventually(lambda: systemd.show(unit, "ActiveState") == "failed")
        assert not systemd.is_mounted(directory)

    def test_the_manager_is_told_of_a_panic(self, systemd: Manager) -> None:
        unit, directory = "kprobefs@run-panics.service", "/run/panics"
        systemd.drop_in(unit, "[Service]\nWatchdogSec=5\n")
        assert systemd.inside("systemctl", "start", unit).returncode == 0
        assert systemd.show(unit, "StatusText") == f"serving {directory}"
        systemd.inside("sh", "-c", f"echo 'panic \"x\"' > {directory}/machine/call")
        _eventually(lambda: systemd.show(unit, "StatusText") == f"panicked {directory}")
        assert systemd.inside("systemctl", "stop", unit).returncode == 0

    def test_a_template_and_a_reload(self, systemd: Manager) -> None:
        """An instance of the template unit creates the directory that it mounts on, and a reload reads the
        files of definitions again.
        """
        unit, directory = "kprobefs@run-some-where.service", "/run/some/where"
        probes, events = "/run/kprobefs/probes.d", f"{directory}/kprobe_events"
        systemd.inside("sh", "-c", f"mkdir -p {probes}; echo p:one vfs_read > {probes}/a.probes")
        assert systemd.inside("systemctl", "start", unit).returncode == 0
        assert systemd.is_mounted(directory)
        assert systemd.inside("cat", events).stdout == "p:kprobes/one vfs_read\n"
        systemd.inside("sh", "-c", f"echo p:two vfs_write > {probes}/b.probes")
        assert systemd.inside("systemctl", "reload", unit).returncode == 0
        assert systemd.inside("cat", events).stdout == "p:kprobes/one vfs_read\np:kprobes/two vfs_write\n"
        assert systemd.inside("systemctl", "stop", unit).returncode == 0
        assert not systemd.is_mounted(directory)


class TestInstallService:
    """install-service writes the units with the path of the program that was started."""

    @pytest.mark.parametrize("scope", ["system", "user"])
    def test_units(
        self, scope: str, user_runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CONFIG_HOME", "/home/x/.config")
        directory = tmp_path / "a dir"
        directory.mkdir()
        program = program_path(directory)
        monkeypatch.setattr(sys, "argv", [str(program)])
        done = install_service.install(str(tmp_path), user=scope == "user")
        below = f"etc/systemd/{scope}"
        written = sorted((tmp_path / below).iterdir())
        names = {
            "user": ["kprobefs.service"],
            "system": ["kprobefs.service", "kprobefs@.service"],
        }
        assert [path.name for path in written] == names[scope]
        assert done[-1].endswith(f"--root={tmp_path} enable kprobefs")
        for path in written:
            commands = re.findall(r"^Exec\w+=(.*)", path.read_text(), re.M)
            assert len(commands) == 3
            assert all(command.startswith(f'"{program}" ') for command in commands)
            if shutil.which("systemd-analyze") is not None:
                unit = path.rename(path.with_name(path.name.replace("@.", "@mnt-kp.")))
                flag = ["--user"] if scope == "user" else []
                result = subprocess.run(
                    ["systemd-analyze", *flag, "verify", "--man=no", str(unit)],
                    env={**os.environ, "XDG_RUNTIME_DIR": str(user_runtime)},
                    capture_output=True,
                    text=True,
                    timeout=30,
                    check=False,
                )
                assert (result.returncode, result.stdout, result.stderr) == (0, "", "")

    def test_ones_own_manager(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        monkeypatch.setattr(shutil, "which", lambda _name: None)
        assert install_service.install("/", user=True) == [
            f"wrote {tmp_path}/systemd/user/kprobefs.service",
            "start it: systemctl --user enable --now kprobefs",
        ]

    @pytest.mark.parametrize("scope", ["system", "user"])
    def test_where_one_may_not_write(
        self, scope: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "access", lambda _path, _mode: False)
        directory, way = (
            tmp_path / f"etc/systemd/{scope}",
            {"system": "; use --user, or run as root", "user": ""}[scope],
        )
        with pytest.raises(CliError, match=f"^{directory}: Permission denied{way}$"):
            install_service.install(str(tmp_path), user=scope == "user")
        monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_flag=os.ST_RDONLY))
        with pytest.raises(CliError, match=f"^{directory}: Read-only file system$"):
            install_service.install(str(tmp_path), user=scope == "user")

    def test_a_file_where_a_directory_belongs(self, tmp_path: Path) -> None:
        (tmp_path / "etc").touch()
        with pytest.raises(CliError, match=r"^.*/etc/systemd/system: (Not a directory|File exists)$"):
            install_service.install(str(tmp_path), user=False)

    def test_the_command(self, tmp_path: Path) -> None:
        result = kprobefs("install-service", "--root", str(tmp_path), program=REAL_PROGRAM)
        assert (result.returncode, result.stderr) == (0, "")
        assert f"wrote {tmp_path}/etc/systemd/system/kprobefs@.service\n" in result.stdout
