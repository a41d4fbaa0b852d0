"""scratch/, the guest's ramfs, as shells, archivers and databases use a file system."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import sqlite3
import stat
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from tests.fuse.harness import REAL_PROGRAM, daemon, needs_fuse
from tests.mounted.files import TIMEOUT, Files, assert_errno

pytestmark = [needs_fuse, pytest.mark.mounted]

SLACK = 2.0
"""Seconds that a file's time may be off."""


@pytest.fixture
def scratch(files: Files) -> Path:
    """Return the path of scratch/."""
    return files.path("scratch")


def test_modes(scratch: Path) -> None:
    assert stat.filemode(scratch.stat().st_mode) == "drwxrwxrwt"
    umask = os.umask(0o027)
    try:
        (scratch / "f").touch()
        (scratch / "d").mkdir()
    finally:
        os.umask(umask)
    assert stat.filemode((scratch / "f").stat().st_mode) == "-rw-r-----"
    assert stat.filemode((scratch / "d").stat().st_mode) == "drwxr-x---"
    (scratch / "f").chmod(0o6755)
    assert stat.filemode((scratch / "f").stat().st_mode) == "-rwsr-sr-x"


def test_owners(directory: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("taking another user's identity needs root")
    with daemon(directory, "--allow-other", program=REAL_PROGRAM):
        check_owners(directory / "scratch")


def check_owners(scratch: Path) -> None:
    """Assert that files belong to the user who makes them, and that another user can neither read nor remove
    them.
    """
    made = subprocess.run(
        ["sh", "-c", "mkdir d && echo x > d/f && chmod 600 d/f"],
        cwd=scratch,
        user=12345,
        group=54321,
        check=True,
    )
    assert made.returncode == 0
    assert ((scratch / "d/f").stat().st_uid, (scratch / "d/f").stat().st_gid) == (12345, 54321)
    other = subprocess.run(
        ["sh", "-c", "cat d/f; rm d/f; rmdir d; echo y > g"],
        cwd=scratch,
        user=23456,
        group=54321,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert other.stderr.count("ermission denied") == 2
    assert "not permitted" in other.stderr
    assert (scratch / "g").stat().st_uid == 23456
    os.chown(scratch / "g", 1, 2)
    assert ((scratch / "g").stat().st_uid, (scratch / "g").stat().st_gid) == (1, 2)


def test_links(scratch: Path) -> None:
    (scratch / "target").write_text("text")
    (scratch / "link").symlink_to("target")
    (scratch / "dangling").symlink_to("/nonexistent/name")
    assert (scratch / "link").read_text() == "text"
    assert os.readlink(scratch / "dangling") == "/nonexistent/name"
    assert (scratch / "link").lstat().st_size == len("target")
    with assert_errno(errno.ENOENT):
        (scratch / "dangling").read_text()
    (scratch / "link").unlink()
    assert (scratch / "target").exists()


def test_renaming(scratch: Path) -> None:
    (scratch / "a").write_text("a")
    (scratch / "b").write_text("b")
    (scratch / "d").mkdir()
    inode = (scratch / "a").stat().st_ino
    (scratch / "a").rename(scratch / "b")
    assert (scratch / "b").read_text() == "a"
    (scratch / "b").rename(scratch / "d/c")
    assert (scratch / "d/c").stat().st_ino == inode
    with assert_errno(errno.ENOTEMPTY):
        (scratch / "d").rmdir()
    with assert_errno(errno.EXDEV):
        os.rename(scratch / "d/c", scratch.parent / "kprobe_events")
    with assert_errno(errno.EINVAL):
        (scratch / "d").rename(scratch / "d/e")


def test_an_open_directory_is_listed_where_it_is_now(scratch: Path) -> None:
    for name in ("a/b", "empty"):
        (scratch / name).mkdir(parents=True)
    (scratch / "a/b/file").touch()
    # scandir() reads nothing before its first entry is requested.
    with os.scandir(scratch / "a/b") as moved, os.scandir(scratch / "empty") as replaced:
        (scratch / "a").rename(scratch / "empty")
        assert [entry.name for entry in moved] == ["file"]
        assert list(replaced) == []
    with os.scandir(scratch / "empty/b") as removed:
        (scratch / "empty/b/file").unlink()
        (scratch / "empty/b").rmdir()
        (scratch / "empty/b").mkdir()
        (scratch / "empty/b/other").touch()
        assert list(removed) == []


def test_size_changes(scratch: Path) -> None:
    file = scratch / "f"
    file.write_bytes(b"0123456789")
    os.truncate(file, 4)
    assert file.read_bytes() == b"0123"
    os.truncate(file, 8)
    assert file.read_bytes() == b"0123\0\0\0\0"
    with file.open("ab") as appending:
        appending.write(b"end")
    assert file.read_bytes() == b"0123\0\0\0\0end"
    with file.open("r+b") as random_access:
        random_access.seek(100)
        random_access.write(b"!")
        random_access.truncate(50)
        random_access.seek(2)
        assert random_access.read(3) == b"23\0"
    assert file.stat().st_size == 50


def test_two_appenders_lose_nothing(scratch: Path) -> None:
    script = "for i in $(seq 100); do echo $0 $i >> log; done"
    writers = [subprocess.Popen(["sh", "-c", script, name], cwd=scratch) for name in "ab"]
    assert [writer.wait(TIMEOUT) for writer in writers] == [0, 0]
    lines = (scratch / "log").read_text().splitlines()
    assert sorted(lines) == sorted(f"{name} {number}" for name in "ab" for number in range(1, 101))


def test_an_unlinked_open_file(scratch: Path) -> None:
    with (scratch / "f").open("w+") as file:
        file.write("still here")
        file.flush()
        (scratch / "f").unlink()
        assert not (scratch / "f").exists()
        file.seek(0)
        assert file.read() == "still here"
        assert os.listdir(scratch) == []


def test_big_files(scratch: Path) -> None:
    data = random.Random(1).randbytes(5 << 20)
    (scratch / "big").write_bytes(data)
    assert (scratch / "big").stat().st_size == len(data)
    assert (scratch / "big").stat().st_blocks * 512 >= len(data)
    assert hashlib.sha256((scratch / "big").read_bytes()).digest() == hashlib.sha256(data).digest()
    shutil.copyfile(scratch / "big", scratch / "copy")
    assert (scratch / "copy").read_bytes() == data
    with (scratch / "big").open("rb") as file:
        file.seek(3_000_001)
        assert file.read(200_000) == data[3_000_001:3_200_001]


def test_a_full_disk(files: Files, scratch: Path) -> None:
    filled = files.shell("dd if=/dev/zero of=scratch/huge bs=1M count=100 status=none")
    assert "No space left on device" in filled.stderr
    assert (scratch / "huge").stat().st_size > 10 << 20
    assert files.shell("cat kprobes/enabled; ls scratch; rm scratch/huge").stdout == "1\nhuge\n"
    (scratch / "again").write_bytes(bytes(8 << 20))
    assert files.read("machine/version")


def test_directories(files: Files, scratch: Path) -> None:
    for number in range(300):
        (scratch / f"name {number} \xe9").touch()
    (scratch / "d").mkdir()
    assert len(os.listdir(scratch)) == 301
    assert scratch.stat().st_nlink == 3
    listing = files.shell("ls -la scratch")
    assert listing.stderr == ""
    assert len(listing.stdout.splitlines()) == 304
    with assert_errno(errno.ENAMETOOLONG):
        (scratch / ("x" * 256)).touch()
    (scratch / ("x" * 255)).touch()
    with assert_errno(errno.EEXIST):
        (scratch / "d").mkdir()
    with assert_errno(errno.EISDIR):
        (scratch / "d").write_text("x")
    with assert_errno(errno.ENOTDIR):
        (scratch / ("x" * 255) / "y").touch()


def test_deep_paths(scratch: Path) -> None:
    deep = scratch.joinpath(*["d"] * 60)
    deep.mkdir(parents=True)
    (deep / "f").write_text("deep")
    assert (deep / "f").read_text() == "deep"
    shutil.rmtree(scratch / "d")
    assert os.listdir(scratch) == []


def test_times_are_the_wall_clocks(scratch: Path) -> None:
    began = time.time()
    (scratch / "f").write_text("1")
    made = (scratch / "f").stat()
    for value in (made.st_atime, made.st_mtime, made.st_ctime):
        assert began - SLACK < value < time.time() + SLACK
    time.sleep(0.3)
    (scratch / "f").write_text("2")
    # This process may have waited for a CPU.
    assert 0.25 < (scratch / "f").stat().st_mtime - made.st_mtime < time.time() - began + SLACK
    for moment in (-86400 * 10**9, 0, 981173106_123456789, 4102444800 * 10**9):
        began = time.time()
        os.utime(scratch / "f", ns=(moment, moment + 1))
        changed = (scratch / "f").stat()
        assert (changed.st_atime_ns, changed.st_mtime_ns) == (moment, moment + 1)
        assert began - SLACK < changed.st_ctime < time.time() + SLACK


@pytest.mark.parametrize("is_probed", [False, True], ids=["alone", "probed"])
def test_times_that_the_guest_can_not_keep(is_probed: bool, files: Files, scratch: Path) -> None:
    """A time that the guest cannot keep becomes the nearest time that the guest can keep, as in Linux's file
    systems.
    """
    if is_probed:
        files.write("kprobe_events", "p:e vfs_utimes")
        files.write("tracing/events/kprobes/enable", "1")
    for seconds, kept in (((1 << 63) - 1, range(1 << 62, 1 << 63)), (-(1 << 63), range(-(1 << 33), 0))):
        moment = seconds * 10**9 + 10**9 - 1
        (scratch / "f").touch()
        os.utime(scratch / "f", ns=(moment, moment))
        found = (scratch / "f").stat()
        assert found.st_atime_ns == found.st_mtime_ns
        assert found.st_mtime_ns // 10**9 in kept
        (scratch / "f").unlink()


def test_touch_changes_one_time_alone(files: Files, scratch: Path) -> None:
    script = "touch f; touch -m -d '2001-01-01 UTC' f; touch -a -d '2002-01-01 UTC' f; touch -a -m -r f g"
    assert files.shell(f"cd scratch; {script}").returncode == 0
    for name in "fg":
        found = (scratch / name).stat()
        assert (found.st_mtime, found.st_atime) == (978307200, 1009843200)


def test_tools(files: Files, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(20):
        (source / f"f{number}").write_bytes(os.urandom(number * 1000))
    archive = tmp_path / "archive.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(source, "tree")
    script = f"""
        set -e
        cd scratch
        tar xf {archive}
        diff -r tree {source}
        cp -a tree copy
        mv copy moved
        diff -r tree moved
        tar cf - tree | tar tf - | wc -l
        dd if=/dev/zero of=blocks bs=1000 count=7 conv=notrunc status=none
        dd if=tree/f19 of=blocks bs=100 seek=3 conv=notrunc status=none
        wc -c < blocks
        sort -u < tree/f1 > sorted
        find . -type f -newer {archive} | grep -c blocks
        rm -rf tree moved
    """
    result = files.shell(script)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split() == ["21", "19300", "1"]


def test_a_database(scratch: Path) -> None:
    path = scratch / "test.db"
    for _ in range(2):
        with sqlite3.connect(path) as database:
            database.execute("create table if not exists t (n integer)")
            database.executemany("insert into t values (?)", ((n,) for n in range(1000)))
        database.close()
    database = sqlite3.connect(path)
    assert database.execute("select count(*), sum(n) from t").fetchone() == (2000, 999000)
    assert database.execute("pragma integrity_check").fetchone() == ("ok",)
    database.close()
