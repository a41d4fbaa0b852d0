"""`run --as-system`: the command cannot reach the host's tracefs, and the mount looks like a tracefs to all
programs.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kprobefs.common.errors import ExitStatus
from tests.fuse.harness import ROOT, needs_fuse
from tests.fuse.ordinary_user import OrdinaryUser, ordinary_user
from tests.guests.linux import debian_kernel
from tests.mounted.system import as_root, as_system, built, needs

TIMEOUT = 60
TRACEFS = "74726163"
DEBUGFS = "64626720"
EFAULT = 14
EINVAL = 22
REFUSED = {
    **dict.fromkeys(
        [
            *("mount-over", "mount-tracefs", "mount-debugfs", "fsopen-tracefs", "fsopen-debugfs", "remount"),
            *("nested-mount", "new-proc", "new-sysfs"),
        ],
        "EPERM",
    ),
    # The kernel refuses these changes of locked mounts.
    **dict.fromkeys(
        [
            *("umount-tracing", "detach-tracing", "detach-debug", "detach-sys", "move-tracing", "bind-below"),
            *("tree-below", "nested-detach", "nested-namespace-detach"),
        ],
        "EINVAL",
    ),
    **dict.fromkeys(
        [
            *("root-of-1", "root-of-parent", "setns-1", "setns-user-1", "setns-parent"),
            *("perf-tracepoint", "perf-software"),
        ],
        "EACCES",
    ),
    **dict.fromkeys(["own-proc", "nested-proc"], "EROFS"),
}
"""Way of access in reach.c -> errno, which is the same for root and for an ordinary user."""
REACHED = {
    *("mount-tracefs", "mount-debugfs", "fsopen-tracefs", "fsopen-debugfs", "umount-tracing", "detach-debug"),
    *("detach-sys", "bind-below", "tree-below", "root-of-parent", "setns-parent", "new-proc", "new-sysfs"),
}
"""Ways by which root reaches the host's tracefs from a new mount namespace without --as-system."""
WITH_HOST_TRACEFS = """
for place in /sys/kernel/tracing {other}; do mount -t tracefs nodev $place || exit 99; done
mount -t debugfs nodev /sys/kernel/debug || exit 99
"""

KILLED_WHILE_ENTERING = """
import os, signal, time
from contextlib import suppress
from pathlib import Path
from kprobefs.cli.as_system_namespace import CommandNamespace

namespace = CommandNamespace(None, own_user=True)
try:
    for step in range(40):
        child = os.fork()
        if not child:
            with suppress(OSError):
                namespace.enter()
            os._exit(0)
        time.sleep(step / 20_000)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        child = os.fork()
        if not child:
            namespace.enter()
            os._exit(os.getuid() if Path("/proc/self/uid_map").read_text() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
finally:
    namespace.close()
"""
"""Program whose child processes enter a namespace; every second one is killed, ever later."""

pytestmark = [pytest.mark.mounted, needs_fuse]


def beside_host(script: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run root's script in a namespace where the host's tracefs is mounted, also at tmp_path/other. In the
    script, $RUN is `run --as-system`.
    """
    other = tmp_path / "other"
    other.mkdir(exist_ok=True)
    # The command is a script, because the path of Python may have a space.
    run = tmp_path / "run-as-system"
    run.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kprobefs run --as-system "$@"\n')
    run.chmod(0o755)
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{WITH_HOST_TRACEFS.format(other=other)}\nRUN='{run}'\n{script}"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "LC_ALL": "C"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode == 99:
        pytest.skip(f"this kernel mounts no tracefs: {done.stderr.strip()}")
    return done


@pytest.fixture(scope="module")
def user() -> Iterator[OrdinaryUser]:
    with ordinary_user() as found:
        yield found


def in_namespaces(user: OrdinaryUser, script: str) -> str:
    """Run a script under `run --as-system` as an ordinary user, and return its output."""
    tried = user.run("unshare", "--user", "--map-root-user", "--mount", "true")
    if tried.returncode:
        pytest.skip(f"ordinary users have no namespaces here: {tried.stderr.strip()}")
    done = user.kprobefs("run", "--as-system", "--", "sh", "-c", script)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


class TestHostOutOfReach:
    @as_root
    def test_no_way_reaches_it(self, tmp_path: Path) -> None:
        reach = built("reach", tmp_path, "-static")
        done = beside_host(f"$RUN -- sh -c '{reach} {tmp_path} $PPID; ls -A {tmp_path}/other'", tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        answers = dict(line.split() for line in done.stdout.splitlines())
        assert answers == {**REFUSED, "sysctl": "EROFS", "sysfs": "EROFS"}

    @as_root
    def test_the_ways_reach_it_outside(self, tmp_path: Path) -> None:
        """Without `run --as-system`, the ways of test_no_way_reaches_it do reach the host's tracefs.

        Otherwise, test_no_way_reaches_it would prove nothing.
        """
        reach = built("reach", tmp_path, "-static")
        done = beside_host(f"{reach} {tmp_path} $PPID", tmp_path)
        answers = dict(line.split() for line in done.stdout.splitlines())
        assert {way for way, answer in answers.items() if answer == "reached"} >= REACHED
        assert answers.keys() == {*REFUSED, "sysctl", "sysfs"}

    def test_no_way_of_an_ordinary_user_reaches_it(self, user: OrdinaryUser, tmp_path: Path) -> None:
        reach = built("reach", tmp_path, "-static")
        own = user.base / "reach"
        assert user.as_root("cp", str(reach), str(own)).returncode == 0
        answers = dict(line.split() for line in in_namespaces(user, f"{own} {user.home} $PPID").splitlines())
        assert answers == {**REFUSED, "sysctl": "EACCES", "sysfs": "EACCES"}

    @as_root
    def test_the_kernel_is_read_only(self, tmp_path: Path) -> None:
        """Files of the kernel in /proc and /sys are read-only for the command, also in a /proc that the
        command mounts.
        """
        script = f"""
            try() {{
                for file in $1/sys/kernel/core_pattern $1/sys/vm/swappiness /sys/kernel/mm/lru_gen/enabled \\
                    $1/sysrq-trigger $1/irq/default_smp_affinity; do
                    if [ -e $file ]; then (: >> $file) 2>&1 | sed 's/.*: //'; fi
                done | sort | uniq
            }}
            try /proc
            mkdir {tmp_path}/proc
            unshare -pf --mount-proc sh -c "$(declare -f try); try /proc"
            unshare -pfm bash -c "$(declare -f try)
                mount -t proc -o ro proc {tmp_path}/proc; try {tmp_path}/proc; cat {tmp_path}/proc/1/comm"
            printf ours > /proc/$$/comm; cat /proc/$$/comm
        """
        refused = "Read-only file system"
        assert as_system(script, tmp_path).splitlines() == [refused, refused, refused, "cat", "ours"]

    @as_root
    @needs("trace-cmd")
    def test_programs_that_mount_one(self, tmp_path: Path) -> None:
        script = """$RUN -- sh -c '
            cd /sys/kernel; wc -l < tracing/available_events
            mount -t tracefs nodev /sys/kernel/tracing 2> /dev/null; wc -l < tracing/available_events
            mount -t debugfs nodev /sys/kernel/debug 2> /dev/null; wc -l < debug/tracing/available_events
            env -i '$(command -v trace-cmd)' list -e | wc -l
            su root -c "trace-cmd list -e" | wc -l'"""
        done = beside_host(script, tmp_path)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.split()) == 5
        assert len(set(done.stdout.split())) == 1
        assert int(done.stdout.split()[0]) > 10

    @as_root
    def test_one_that_is_covered_stays_covered(self, tmp_path: Path) -> None:
        """If another file system is mounted over the host's tracefs, the command also sees the other file
        system.

        The tracefs below it does not become visible.
        """
        script = f"mount -t tmpfs covering {tmp_path}/other; $RUN -- sh -c 'ls -A {tmp_path}/other | wc -l'"
        done = beside_host(script, tmp_path)
        assert (done.returncode, done.stdout.split()) == (0, ["0"]), done.stderr

    @as_root
    def test_a_working_directory_in_another_namespace(self, tmp_path: Path) -> None:
        """If the caller's working directory is in another mount namespace, the command starts in the
        directory of the same path in its own namespace.
        """
        script = """unshare -m sleep 60 & other=$!
            until grep -qx sleep /proc/$other/comm; do sleep 0.01; done
            cd /proc/$other/root; $RUN -- sh -c '
                pwd; events=sys/kernel/tracing/available_events; cmp $events /$events && echo same'
            status=$?; kill $other; exit $status"""
        done = beside_host(script, tmp_path)
        assert (done.returncode, done.stdout.split()) == (0, ["/", "same"]), done.stderr

    @as_root
    @pytest.mark.parametrize(
        ("place", "told"),
        [
            ("cd /sys/kernel/tracing/events; $RUN -- pwd", "the working directory: is in the host's tracefs"),
            ("$RUN -- cat < /sys/kernel/tracing/README", "standard input: is in the host's tracefs"),
            ("$RUN -- id > /sys/kernel/tracing/set_event", "standard output: is in the host's tracefs"),
            ("cd /sys/kernel/debug; $RUN -- pwd", "the working directory: is in the host's debugfs"),
        ],
    )
    def test_open_files_of_it_are_refused(self, place: str, told: str, tmp_path: Path) -> None:
        done = beside_host(place, tmp_path)
        assert (done.returncode, done.stdout) == (ExitStatus.RUN_FAILED, "")
        assert done.stderr.startswith(f"kprobefs: --as-system: {told}; ")
        assert done.stderr.count("\n") == 1

    @as_root
    def test_the_switches_of_its_tracing_are_covered(self, tmp_path: Path) -> None:
        switches = [
            Path("/proc/sys/kernel", name)
            for name in (
                *("tracepoint_printk", "traceoff_on_warning", "ftrace_dump_on_oops", "ftrace_enabled"),
                "kptr_restrict",
            )
        ]
        there = [switch for switch in switches if switch.exists()]
        if not there:
            pytest.skip("this kernel has no such switch")
        before = [switch.read_text() for switch in there]
        other = ["1" if text == "0\n" else "0" for text in before]
        script = "; ".join(f"echo {value} > {switch}" for switch, value in zip(there, other, strict=True))
        try:
            as_system(script, tmp_path)
            assert [switch.read_text() for switch in there] == before
        finally:
            for switch, text in zip(there, before, strict=True):
                if switch.read_text() != text:
                    switch.write_text(text)

    @as_root
    def test_what_root_keeps(self, tmp_path: Path) -> None:
        """Under `run --as-system`, root can become another user, mount a tmpfs, and mount /proc in a new pid
        namespace.
        """
        script = f"""
            setpriv --reuid=1234 --regid=1234 --groups=4,5 id -u
            mkdir {tmp_path}/m && mount -t tmpfs none {tmp_path}/m && touch {tmp_path}/m/x && ls {tmp_path}/m
            unshare --mount-proc --fork --pid sh -c 'echo $$; cat /proc/1/comm'
        """
        assert as_system(script, tmp_path) == "1234\nx\n1\nsh\n"

    @as_root
    def test_what_outlives_the_command_does_not_get_it(self, tmp_path: Path) -> None:
        """A process that outlives the command does not find the host's tracefs when the mount ends with the
        command.
        """
        told = tmp_path / "told"
        left = tmp_path / "left.sh"
        left.write_text(
            f"exec > {told}.part 2>&1\n"
            "until ls /sys/kernel/tracing 2>&1 | grep -q 'not connected'; do sleep 0.1; done\n"
            "ls -A /sys/kernel/tracing; mkdir /sys/kernel/tracing/x; ls /sys/kernel/debug\n"
            f"mv {told}.part {told}\n"
        )
        script = f"""
            $RUN -- sh -c 'setsid sh {left} > /dev/null 2>&1 &'
            while [ ! -e {told} ]; do sleep 0.1; done
        """
        done = beside_host(script, tmp_path)
        assert done.returncode == 0, done.stderr
        assert told.read_text().count("Transport endpoint is not connected") == 3

    @as_root
    def test_killed_while_entering(self) -> None:
        """A process that enters the namespace gets its own answer, even if the process before it was killed
        while entering.

        The processes are forked by a small one, because a fork of the tests' process takes long.
        """
        subprocess.run([sys.executable, "-c", KILLED_WHILE_ENTERING], cwd=ROOT, check=True, timeout=TIMEOUT)

    @as_root
    def test_without_standard_streams(self, tmp_path: Path) -> None:
        """If the caller has closed standard streams, `run --as-system` works, and opens no files under their
        numbers.
        """
        done = beside_host(f"$RUN -- stat -f -c %t /sys/kernel/tracing <&- > {tmp_path}/out 2>&-", tmp_path)
        assert (done.returncode, (tmp_path / "out").read_text()) == (0, f"{TRACEFS}\n")
        done = beside_host(f"$RUN -- sh -c 'id -u > {tmp_path}/out' <&- >&- 2>&-", tmp_path)
        assert (done.returncode, (tmp_path / "out").read_text()) == (0, "0\n")

    @as_root
    def test_real_root(self, tmp_path: Path) -> None:
        """With --real-root, one line warns that the command can reach the host's tracefs.

        The table of mounts lists the mount as tracefs, so that programs do not mount another tracefs.
        """
        made = tmp_path / "made"
        script = f"""$RUN --real-root -- sh -c '
            stat -f -c %t /sys/kernel/tracing; findmnt -n -t tracefs | wc -l
            mknod {made} c 1 3 && echo made'"""
        done = beside_host(script, tmp_path)
        assert done.stdout == f"{TRACEFS}\n1\nmade\n"
        told = "--real-root: the host's tracefs and debugfs are within reach of the command"
        assert done.stderr == f"kprobefs: --as-system: {told}\n"

    def test_real_root_of_an_ordinary_user(self, user: OrdinaryUser) -> None:
        done = user.kprobefs("run", "--as-system", "--real-root", "--", "true")
        assert done.returncode == ExitStatus.USAGE
        assert done.stderr == "kprobefs: --real-root: you are not root; leave it out, or run as root\n"


def at_each_place(script: str, tmp_path: Path) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Run a script for the place of tracefs and for that of debugfs, with one mount.

    Yield each place, the type of its file system, and the script's answers: first word of a line -> the other
    words. PLACE in the script is the place.
    """
    places = {"/sys/kernel/tracing": TRACEFS, "/sys/kernel/debug": DEBUGFS}
    both = "; echo; ".join(f"({script.replace('PLACE', place)}) | cat" for place in places)
    parts = as_system(both, tmp_path).split("\n\n")
    for (place, magic), part in zip(places.items(), parts, strict=True):
        yield place, magic, dict(line.split(" ", 1) for line in part.splitlines())


class TestType:
    @as_root
    @pytest.mark.parametrize("options", [[], ["-static"]], ids=["dynamic", "static"])
    def test_of_c(self, options: list[str], tmp_path: Path) -> None:
        asks = built("asks", tmp_path, *options)
        for place, magic, answers in at_each_place(f"env -i {asks} PLACE", tmp_path):
            name = "tracefs" if magic == TRACEFS else "debugfs"
            assert answers.pop("statfs") == magic, place
            assert answers.pop("fstatfs") == f"{magic} 4096 255 1"
            tables = ("/proc/mounts", "/proc/self/mounts", "/etc/mtab")
            assert {answers.pop(table) for table in tables} == {name}
            assert [answers.pop(name) for name in ("missing", "bad-address", "bad-path")] == ["2", "14", "14"]
            assert answers.pop("other") == "9fa0"
            assert answers.pop("relative") == (magic if name == "tracefs" else "0")
            assert set(answers.values()) == ({str(EINVAL)} if name == "tracefs" else set())

    @as_root
    @pytest.mark.parametrize("user", ["", "setpriv --reuid=1234 --clear-groups"], ids=["root", "other"])
    def test_by_links_of_proc(self, user: str, tmp_path: Path) -> None:
        """statfs(2) of a link in /proc, such as /proc/self/cwd, is answered for the file that the calling
        process means.

        If the result's buffer may not be written, statfs(2) fails with EFAULT.
        """
        asks = built("asks", tmp_path, "-static")
        tmp_path.chmod(0o755)
        barred = {"link-dots": "error-13", "link-fd": "error-2", "link-dev": "error-2"}
        for place, magic, answers in at_each_place(f"cd PLACE; {user} {asks} PLACE hard", tmp_path):
            links = {name: answers.pop(name) for name in list(answers) if name.startswith("link-")}
            assert links == {**dict.fromkeys(links, magic), **(barred if user else {"link-dots": TRACEFS})}
            assert len(links) == 8
            assert answers["read-only"] == answers["half-read-only"] == str(EFAULT)
            assert (answers["last-byte"], answers["untouched"]) == ("0", "1")
            assert answers["interrupted"] == "20"
            is_text = place.endswith("tracing") and not user
            assert answers["text-as-directory"] == ("error-20" if is_text else "error-2")

    @as_root
    @pytest.mark.skipif(platform.machine() != "x86_64", reason="needs system calls of 32-bit x86")
    def test_of_32_bit_programs(self, tmp_path: Path) -> None:
        asks = built("asks_i386", tmp_path)
        if subprocess.run([asks, "/"], capture_output=True, check=False).returncode:
            pytest.skip("this kernel has no 32-bit system calls")
        for place, magic, answers in at_each_place(f"{asks} PLACE", tmp_path):
            fields = f"0 {magic} 4096 255 4096 1026"
            assert answers == {
                "statfs": fields,
                "fstatfs": fields,
                "statfs64": f"{fields} 0 ffffffff",
                "fstatfs64": f"{fields} 0 0",
                "size": "-22",
                "sendfile": "-22",
                "splice": "-22",
                "perf": "-13",
            }, place

    @as_root
    @needs("findmnt")
    def test_of_programs(self, tmp_path: Path) -> None:
        script = """
            stat -f -c %t /sys/kernel/tracing /sys/kernel/debug/tracing /sys/kernel/debug /proc/self/cwd
            findmnt -n -o TARGET -t tracefs,debugfs | sort
            mount | grep -c ' type tracefs '
            grep -c -- '- debugfs ' /proc/self/mountinfo
        """
        out = as_system(f"cd /sys/kernel/tracing; {script}", tmp_path)
        assert out.split() == [
            TRACEFS,
            TRACEFS,
            DEBUGFS,
            TRACEFS,
            "/sys/kernel/debug",
            "/sys/kernel/tracing",
            "1",
            "1",
        ]

    def test_of_an_ordinary_user(self, user: OrdinaryUser) -> None:
        script = """
            stat -f -c %t /sys/kernel/tracing /sys/kernel/debug
            grep -c '^[^ ]* [^ ]* tracefs ' /proc/mounts
        """
        # The host's tracefs stays in the list of mounts, below the mount of kprobefs.
        of_host = sum(line.split()[2] == "tracefs" for line in Path("/proc/mounts").read_text().splitlines())
        assert in_namespaces(user, script).split() == [TRACEFS, DEBUGFS, str(1 + of_host)]

    @as_root
    def test_modes_are_asked_of_the_kernel(self, tmp_path: Path) -> None:
        """If a user may not search a directory, statfs(2) of a file in this directory fails with EACCES.

        The process that answers statfs(2) has more rights than the user, but does not reveal the type.
        """
        script = "setpriv --reuid=1234 --clear-groups stat -f -c %t /sys/kernel/tracing/events 2>&1 || true"
        assert "Permission denied" in as_system(script, tmp_path)

    @as_root
    def test_within_another_one(self, tmp_path: Path) -> None:
        """A nested `run --as-system` prints one line and uses only the preloaded library to answer statfs(2).

        A process can have only one seccomp listener, and that is the outer one's.
        """
        run = shlex.join([sys.executable, "-m", "kprobefs", "run", "--as-system"])
        out = as_system(f"{run} -- sh -c 'grep -c . /sys/kernel/tracing/available_events' 2>&1", tmp_path)
        told, events = out.splitlines()
        assert told.startswith("kprobefs: --as-system: statfs(2) and copying calls: no seccomp listener: ")
        assert int(events) > 100


@as_root
class TestGuest:
    """The emulated machine as the command sees it in /proc."""

    @pytest.mark.parametrize("kprobes", ["", "kprobefs", "kernel"], ids=["own", "image", "kernel"])
    def test_its_memory_and_its_switch_of_ftrace(self, kprobes: str, tmp_path: Path) -> None:
        script = """
            head -n 1 /proc/meminfo; head -n 1 "$KPROBEFS"/machine/meminfo
            cd /sys/kernel/tracing; switch=/proc/sys/kernel/ftrace_enabled
            echo vfs_mkdir > set_ftrace_filter; echo function > current_tracer
            hits() { mkdir "$KPROBEFS"/scratch/$1; grep -c ': vfs_mkdir <-' trace; }
            cat $switch; hits a || true
            echo 0 > $switch; cat $switch; hits b || true
            echo nonsense > $switch || echo refused; cat $switch
            echo 1 > $switch; hits c; cat "$KPROBEFS"/sysctl/kernel/ftrace_enabled
        """
        shown, there, *switch = as_system(script, tmp_path, *self._options(kprobes)).splitlines()
        assert switch == ["1", "1", "0", "1", "refused", "0", "2", "1"]
        assert shown == there
        assert 16 << 10 < int(shown.split()[1]) < 512 << 10

    def _options(self, kprobes: str) -> list[str]:
        """Return the options for Debian's kernel with the given kprobes, or no options for kprobefs's own
        kernel.
        """
        return ["--image", str(debian_kernel.image()), "--kprobes", kprobes] if kprobes else []
