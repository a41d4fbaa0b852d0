"""Run scripts in `kprobefs run`, with the mount in $KPROBEFS or at the system's places of tracefs and
debugfs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.fuse.harness import REAL_PROGRAM, kprobefs

SOURCES = Path(__file__).parent
TIMEOUT = 100
"""Time limit of a script in seconds, which is less than that of a test."""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="a user namespace with all ids needs root")
OWN_LOCK = """case $HOME/ in /var/tmp/*) ;; *) mount --rbind "$HOME" /var/tmp ;; esac
"""
"""Shell code that gives a test its own file /var/tmp/.ftrace-lock.

By this file, perf-tools allow only one tracing tool at a time.
"""


def as_system(script: str, home: Path, *options: str) -> str:
    """Return the output of a shell script whose commands find the mount at the system's place of tracefs.

    `home` and `options` are passed to beside().
    """
    return beside(OWN_LOCK + script, home, "--as-system", *options)


def beside(script: str, home: Path, *options: str) -> str:
    """Return the output of a shell script whose commands find the mount in $KPROBEFS.

    `home`: directory for $HOME and temporary files. `options`: options of `kprobefs run`.
    """
    # Without the usual cache, each command with a distribution's kernel would boot it again.
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    own = {"HOME": str(home), "TMPDIR": str(home), "LC_ALL": "C", "XDG_CACHE_HOME": cache}
    command = ["run", *options, "--", "bash", "-c", script]
    result = kprobefs(*command, program=REAL_PROGRAM, limit=TIMEOUT, cwd="/", **own)
    assert result.returncode == 0, result.stderr
    return result.stdout


def while_sleeping(work: str, home: Path) -> str:
    """Return shell code that replaces `sleep` by a program that does `work` and then ends.

    perf-tools trace during their sleep. On a busy host, work of another process could come after the sleep.
    `work`: script for sh, which needs the absolute paths of files.
    """
    programs = home / "programs"
    programs.mkdir()
    sleep = programs / "sleep"
    sleep.write_text(f"#!/bin/sh\n{work}\n")
    sleep.chmod(0o755)
    return f"PATH={programs}:$PATH\n"


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} isn't installed")


def built(name: str, to: Path, *options: str) -> Path:
    """Compile a C source into the directory `to`, and return the program's path; skip without a compiler."""
    program = to / f"{name}{'-static' if '-static' in options else ''}"
    compiled = _compiled(name, options)
    if isinstance(compiled, str):
        pytest.skip(compiled)
    program.write_bytes(compiled)
    program.chmod(0o755)
    return program


@cache
def _compiled(name: str, options: tuple[str, ...]) -> bytes | str:
    """Return the content of the program compiled from the C source `name`, or the reason why it cannot be
    compiled.

    Several tests copy the program. With a reason, they are skipped.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        return "cc isn't installed"
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory, name)
        done = subprocess.run(
            [compiler, "-O2", "-o", program, *options, SOURCES / f"{name}.c"],
            capture_output=True,
            check=False,
        )
        if done.returncode:
            why = f"{name}.c can't be built: {done.stderr.decode().splitlines()[-1]}"
            # A host may lack static libraries. Without -static, an error is one of the source.
            assert "-static" in options, why
            return why
        return program.read_bytes()
