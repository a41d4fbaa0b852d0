"""Unpacked packages of Debian, kept in a cache. Tests are skipped if a package is not available."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

_SECONDS = 50
"""Time limit in seconds, which is less than that of a test."""
_UNPACK = """
set -e
apt-get download "$1" > apt.log 2>&1
dpkg-deb -x "$1"_*.deb files
"""


def unpacked(package: str) -> Path:
    """Return the directory with the files of a package; skip the test if the package is not available."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = cache_home / "kprobefs" / "unpacked" / package
    if kept.exists():
        return kept
    if not shutil.which("apt-get"):
        pytest.skip(f"no apt, which has {package}")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as place:
        words = ["sh", "-c", _UNPACK, "sh", package]
        try:
            subprocess.run(words, cwd=place, capture_output=True, timeout=_SECONDS, check=True)
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"{package} can't be fetched: {error}")
        try:
            (Path(place) / "files").rename(kept)
        except OSError:
            # Another test may have been faster.
            if not kept.exists():
                raise
    return kept
