"""Debian's own kernel packages, kept in a cache outside of the project; skipped where they can't be had."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

_LIMIT = 400 << 20
"""Bytes that are kept; the oldest packages go first."""
_SECONDS = 60
"""A fetch may take; less than a test may, so that a slow network skips and fails nothing."""
META_PACKAGES = ("linux-image-cloud-amd64", "linux-image-amd64")


def package(meta: str) -> Path:
    """The package that a meta package stands for, fetched once; skips the test where it can't be had."""
    found = _package(meta)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@cache
def _package(meta: str) -> Path | str:
    name = _depends(meta)
    cached = sorted(_directory().glob(f"{name or meta.removesuffix('-amd64')}*_amd64.deb"))
    if cached:
        os.utime(cached[-1])
        return cached[-1]
    return _fetched(name) if name else f"no cached {meta}, and apt knows none"


def _directory() -> Path:
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_home) / "kprobefs" / "packages"


def _depends(meta: str) -> str | None:
    """linux-image-6.1.0-50-cloud-amd64 for linux-image-cloud-amd64."""
    if not shutil.which("apt-cache"):
        return None
    asked = subprocess.run(
        ("apt-cache", "depends", meta), capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    words = [line.split() for line in asked.stdout.splitlines() if line.strip().startswith("Depends:")]
    return next((each[1] for each in words if each[1].startswith("linux-image-")), None)


def _fetched(name: str) -> Path | str:
    directory = _directory()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as place:
        try:
            done = subprocess.run(
                ("apt-get", "download", name), cwd=place, capture_output=True, timeout=_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{name} can't be fetched: {error}"
        files = list(Path(place).glob("*.deb"))
        if done.returncode or not files:
            return f"{name} can't be fetched"
        kept = directory / files[0].name
        files[0].rename(kept)
    _prune(directory, kept)
    return kept


def _prune(directory: Path, newest: Path) -> None:
    total = 0
    for file in sorted(directory.glob("*.deb"), key=lambda each: -each.stat().st_mtime):
        total += file.stat().st_size
        if total > _LIMIT and file != newest:
            file.unlink()
