"""Directories of temporary files that are too large for the cache."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from emulated_kernel.guests.common import spill_file
from emulated_kernel.guests.linux.boot import snapshot
from emulated_kernel.util.errors import KernelError

MB = 1 << 20


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return directory -> free bytes that statvfs() reports; a test may change the numbers."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = {str(tmp_path / "named"): 0, str(snapshot.directory()): 0}
    for directory in found:
        Path(directory).mkdir(parents=True)

    def statvfs(directory: str) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=found.get(directory, 0), f_frsize=1)

    monkeypatch.setattr(os, "statvfs", statvfs)
    return found


def where(size: int, whole: int) -> str:
    """Make a temporary file and return its directory.

    `size`: bytes of data. `whole`: length including holes.
    """
    with spill_file.open_tmpfile(lambda _file: None, size, whole) as file:
        return os.path.dirname(os.readlink(f"/proc/self/fd/{file.fileno()}"))


def test_the_first_with_room(places: dict[str, int]) -> None:
    named, cache = places
    places.update({named: 200 * MB, cache: 1000 * MB})
    assert where(100 * MB, 1 << 40) == named
    assert where(500 * MB, 1 << 40) == cache
    with pytest.raises(KernelError, match="no room for 2000 MiB in ") as refused:
        where(2000 * MB, 1 << 40)
    assert refused.value.errno == errno.ENOSPC
    assert all(place in (refused.value.strerror or "") for place in (named, cache, "/var/tmp", "/tmp"))


def test_holes_take_room_in_memory(places: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On tmpfs, a file is refused if there is no room for its holes.

    A process that reads a mapped hole is killed if memory is used up.
    """
    named = next(iter(places))
    places[named] = 200 * MB
    monkeypatch.setattr(spill_file, "_file_system", lambda _device: "tmpfs")
    assert where(100 * MB, 100 * MB) == named
    with pytest.raises(KernelError, match="no room"):
        where(100 * MB, 300 * MB)


def test_file_systems_are_told() -> None:
    assert spill_file._file_system(os.stat("/proc").st_dev) == "proc"
    assert spill_file._file_system(os.makedev(4095, 77)) == ""


def test_one_that_gets_full(places: dict[str, int]) -> None:
    """If a write finds a directory full or over quota, the next directory is tried. Other errors
    are raised.
    """
    for directory in places:
        places[directory] = 1000 * MB
    tried: list[int] = []

    def write(file: IO[bytes]) -> None:
        tried.append(file.fileno())
        if len(tried) == 1:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    spill_file.open_tmpfile(write, MB, MB).close()
    assert len(tried) == 2

    def fails(_file: IO[bytes]) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        spill_file.open_tmpfile(fails, MB, MB)
