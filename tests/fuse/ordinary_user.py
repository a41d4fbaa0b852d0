"""An ordinary user's commands, in namespaces with a separate home directory, /dev and /etc/fuse.conf."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fuse.harness import ROOT

NOBODY = 65534
TIMEOUT = 60
TOOLS = ("unshare", "nsenter", "setpriv", "fusermount")
# The checkout, packages and interpreter may lie where the user can't look.
SET_UP = """
set -e
exec 2>&1
mount --make-rprivate /
umount -l -a -t fuse.kprobefs
sh "$2/tests/fuse/own_devices.sh" "$1"
mount -t tmpfs -o mode=755 none "$1"
cd "$1"
mkdir source packages python home
chown "$5:$5" home
chmod 700 home
mount --bind "$2" source
mount --bind "$3" packages
mount --bind "$4" python
touch fuse.conf
[ -e /etc/fuse.conf ] || touch /etc/fuse.conf
mount --bind fuse.conf /etc/fuse.conf
cd /
echo ready
exec cat
"""


@dataclass(frozen=True)
class OrdinaryUser:
    """An ordinary user, whose commands run in separate namespaces. All of the user's processes end with the
    namespaces.
    """

    pid: int
    """Pid of the first process in the namespaces."""
    base: Path
    """Directory, as the namespaces show it, which contains the user's home and the checkout.

    Its subdirectories are `home` and `source`.
    """

    @property
    def home(self) -> Path:
        """Return the path of the user's home directory."""
        return self.base / "home"

    def configure(self, text: str) -> None:
        """Write `text` to the namespaces' /etc/fuse.conf."""
        assert self._inside("sh", "-c", f'printf %s "$1" > {self.base}/fuse.conf', "sh", text).returncode == 0

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command as the user, in the home directory."""
        return self._inside("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *command)

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python as the user. Python can import the packages of the checkout."""
        return self.run(self.interpreter, *arguments)

    @property
    def interpreter(self) -> str:
        """Return the path of Python in the user's namespaces."""
        return str(self.base / "python" / os.path.relpath(os.path.realpath(sys.executable), sys.base_prefix))

    def kprobefs(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run kprobefs as the user."""
        return self.python("-m", "kprobefs", *arguments)

    def as_root(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command as root in the user's namespaces."""
        return self._inside(*command)

    def _inside(self, *command: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "TMPDIR": str(self.home),
            "PYTHONPATH": f"{self.base}/source:{self.base}/packages",
            "PYTHONDONTWRITEBYTECODE": "1",
            "NO_COLOR": "1",
            "LC_ALL": "C.UTF-8",
        }
        words = [f"{name}={value}" for name, value in environment.items()]
        return subprocess.run(
            ["nsenter", "-t", str(self.pid), "-m", "-p", "env", "-i", "-C", self.home, *words, *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )


@contextmanager
def ordinary_user() -> Iterator[OrdinaryUser]:
    """Yield an ordinary user, whose namespaces end with the `with` block. Skip the test if no process can
    become another user.
    """
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    if missing := [name for name in TOOLS if shutil.which(name) is None]:
        pytest.skip(f"missing: {' '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="kprobefs-test-") as made:
        base = Path(os.path.realpath(made))
        places = [str(base), str(ROOT), sysconfig.get_path("purelib"), sys.base_prefix]
        namespaces = subprocess.Popen(
            [
                "unshare",
                "-m",
                "-p",
                "-f",
                "--kill-child",
                "--mount-proc",
                "sh",
                "-c",
                SET_UP,
                "sh",
                *places,
                str(NOBODY),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with namespaces:
            assert namespaces.stdin is not None
            assert namespaces.stdout is not None
            if (told := namespaces.stdout.readline()) != "ready\n":
                pytest.skip(f"no namespaces with a /dev/fuse: {told.strip()}")
            [pid] = Path(f"/proc/{namespaces.pid}/task/{namespaces.pid}/children").read_text().split()
            user = OrdinaryUser(int(pid), base)
            tried = user.python(
                "-c", "import subprocess, sys; subprocess.check_call([sys.executable, '-c', ''])"
            )
            if tried.returncode != 0:
                pytest.skip(f"Python is out of another user's reach: {tried.stderr.splitlines()[-1:]}")
            yield user
            namespaces.stdin.close()
