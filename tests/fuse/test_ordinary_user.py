"""The program end to end as an ordinary user, who has no privileges and a separate home directory."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from kprobefs.common.errors import ExitStatus
from tests.fuse.ordinary_user import NOBODY, OrdinaryUser, ordinary_user

pytestmark = pytest.mark.mounted

PROBE = """
set -e
cd {}
echo 'p:seen vfs_read comm=$comm' > kprobe_events
echo 1 > events/kprobes/seen/enable
cat kprobe_events
grep -o 'seen: (vfs_read+0x0/.*' trace
"""


@pytest.fixture(scope="module")
def user() -> Iterator[OrdinaryUser]:
    with ordinary_user() as found:
        yield found


def test_mount_and_umount(user: OrdinaryUser) -> None:
    directory, daemons = user.home / "kp", user.home / ".cache/kprobefs/daemons"
    user.run("mkdir", ".cache")
    mounted = user.kprobefs("mount", "--mkdir", str(directory))
    assert (mounted.returncode, mounted.stderr) == (0, "")
    assert user.run("sh", "-c", f"ls {daemons}").stdout.count(".json\n") == 1
    status = user.kprobefs("status")
    assert status.stdout.startswith(f"serving {directory} pid ")
    events, *hits = user.run("sh", "-c", PROBE.format(directory / "tracing")).stdout.splitlines()
    assert events == "p:kprobes/seen vfs_read comm=$comm"
    assert any('comm="cat"' in hit for hit in hits)
    assert user.run("stat", "-c", "%u %a", str(directory / "kprobe_events")).stdout == f"{NOBODY} 640\n"
    root = user.as_root("ls", str(directory))
    assert (root.returncode, root.stdout) == (2, "")
    assert "Permission denied" in root.stderr
    assert user.kprobefs("umount", str(directory)).returncode == 0
    assert user.kprobefs("status", str(directory)).returncode == ExitStatus.NOT_MOUNTED
    assert user.run("sh", "-c", f"ls {daemons}").stdout == ""


@pytest.mark.parametrize("text", ["", "# user_allow_other\n", "user_allow_other_not\nmount_max = 10\n"])
def test_others_stay_out_where_the_machine_says_so(user: OrdinaryUser, text: str) -> None:
    user.configure(text)
    for words in (["mount", "--mkdir", "--allow-other", "closed"], ["run", "--allow-other", "--", "true"]):
        refused = user.kprobefs(*words)
        assert refused.returncode == (ExitStatus.USAGE if words[0] == "mount" else ExitStatus.RUN_FAILED)
        assert refused.stdout == ""
        assert refused.stderr == (
            "kprobefs: --allow-other: /etc/fuse.conf has no line user_allow_other; add it as root\n"
        )
    assert user.kprobefs("status").stdout == ""


def test_others_get_in_where_they_are_let_in(user: OrdinaryUser) -> None:
    user.configure("  user_allow_other  # for everybody\n")
    user.as_root("chmod", "711", str(user.home))
    directory = user.home / "open"
    assert user.kprobefs("mount", "--mkdir", "--allow-other", str(directory)).stderr == ""
    version, owned = directory / "machine/version", directory / "kprobe_events"
    for uid, is_root in ((0, True), (12345, False)):
        other = user.as_root("setpriv", f"--reuid={uid}", "--clear-groups", "cat", str(version), str(owned))
        assert "Linux version" in other.stdout
        assert ("Permission denied" in other.stderr) != is_root
    assert user.kprobefs("umount", str(directory)).returncode == 0


def test_containers_in_which_fusermount_has_no_rights(user: OrdinaryUser) -> None:
    """If fusermount may not mount, the error names a command that works.

    The cases are no_new_privs, which ignores setuid, and a user without a name.
    """
    program = ("-m", "kprobefs", "run", "--", "sh", "-c", "cat $KPROBEFS/kprobes/enabled")
    for words in (("--no-new-privs",), ("--reuid=54321", "--clear-groups")):
        user.as_root("chmod", "777", str(user.home))
        run = user.as_root if words[0].startswith("--reuid") else user.run
        refused = run("setpriv", *words, user.interpreter, *program)
        assert refused.returncode == ExitStatus.RUN_FAILED
        assert "FUSE refused the mount: fusermount: " in refused.stderr
        (way,) = re.findall(r"`(.*)`\n\Z", refused.stderr)
        done = run("setpriv", *words, *way.split(), user.interpreter, *program)
        assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_run(user: OrdinaryUser) -> None:
    done = user.kprobefs("run", "--", "sh", "-c", f"{PROBE.format('$KPROBEFS/tracing')} exit 7")
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.startswith("p:kprobes/seen vfs_read comm=$comm\nseen: (vfs_read+0x0/")


def test_run_as_system(user: OrdinaryUser) -> None:
    """`run --as-system` mounts at the places of tracefs and debugfs in /sys/kernel, for the command only."""
    script = f"""
        {PROBE.format("/sys/kernel/tracing")}
        cat /sys/kernel/debug/kprobes/list
        head -c 13 /proc/version
        grep -c ' vfs_read$' /proc/kallsyms
        exit 9
    """
    tried = user.run("unshare", "--user", "--map-root-user", "--mount", "true")
    if tried.returncode:
        pytest.skip(f"ordinary users have no namespaces here: {tried.stderr.strip()}")
    done = user.kprobefs("run", "--as-system", "--", "sh", "-c", script)
    assert (done.returncode, done.stderr) == (9, "")
    events, *hits, listed, last = done.stdout.splitlines()
    assert events == "p:kprobes/seen vfs_read comm=$comm"
    assert any('comm="cat"' in hit for hit in hits)
    assert "vfs_read+0x0" in listed
    assert last == "Linux version1"
    assert "kprobefs" not in user.run("ls").stdout


def test_what_run_as_system_fails_of_is_told(user: OrdinaryUser) -> None:
    failed = user.kprobefs("run", "--as-system", "--image", "/etc/hostname", "--", "true")
    assert failed.returncode == ExitStatus.RUN_FAILED
    assert failed.stderr.startswith("kprobefs: /etc/hostname: ")
    assert failed.stderr.count("\n") == 1


def test_the_pytest_plugin(user: OrdinaryUser) -> None:
    """An ordinary user runs the tests of examples/, which use the pytest plugin."""
    user.run("cp", "-r", f"{user.base}/source/examples", ".")
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", "examples", "-k", "x86_64 or not what"]
    done = user.python("-m", "pytest", *options, "examples")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("3 passed, 3 deselected in ")


@pytest.mark.parametrize("command", ["mount here", "run -- true", "status"])
def test_too_many_processes_are_told_in_one_line(command: str, user: OrdinaryUser) -> None:
    python = user.python("-c", "import sys; print(sys.executable)").stdout.strip()
    user.run("mkdir", "-p", "here", "there")
    limited = f'ulimit -u 1; exec "$@" {command}'
    if command == "status":
        assert user.kprobefs("mount", "there").returncode == 0
    told = user.run("bash", "-c", limited, "bash", python, "-m", "kprobefs")
    assert told.returncode == (ExitStatus.RUN_FAILED if command.startswith("run") else ExitStatus.FAILURE)
    assert told.stderr.startswith("kprobefs: no process: too many processes and threads; end some, or")
    assert told.stderr.count("\n") == 1
    user.kprobefs("umount", "there")
