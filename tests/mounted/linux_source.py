"""Files of Debian's kernel source, kept in a cache. A test is skipped if its file is not available."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

_PACKAGE = re.compile(r"linux-source-[\d.]+")
_SECONDS = 50
"""Time limit of each step in seconds, which is less than that of a test."""
_EXTRACT = """
set -e
apt-get download "$1" > apt.log 2>&1
# tar doesn't wait for the end of the archive, so the others end by SIGPIPE.
dpkg-deb --fsys-tarfile "$1"_*.deb | tar -xO "./usr/src/$1.tar.xz" | xz -dc |
    tar -x --occurrence=1 --strip-components=1 "$1/$2"
"""


def source(name: str) -> Path:
    """Return the path of a file of the source tree; skip the test if the file is not available."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = cache_home / "kprobefs" / "linux-source" / name
    if kept.exists():
        return kept
    if not shutil.which("apt-cache"):
        pytest.skip("no apt, which has the kernel's source")
    known = subprocess.run(
        ["apt-cache", "pkgnames", "linux-source-"], capture_output=True, text=True, check=False
    )
    packages = [each for each in known.stdout.split() if _PACKAGE.fullmatch(each)]
    if not packages:
        pytest.skip("apt knows no package of the kernel's source")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as place:
        words = ["sh", "-c", _EXTRACT, "sh", min(packages), name]
        try:
            subprocess.run(words, cwd=place, capture_output=True, timeout=_SECONDS, check=True)
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"{min(packages)} can't be fetched: {error}")
        (Path(place) / name).rename(kept)
    return kept
