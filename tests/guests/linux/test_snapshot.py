"""Snapshots of booted kernels: saving and loading, damaged files, and the limit of the cache."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import mmap
import os
import random
import struct
import zlib
from array import array
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from emulated_kernel.guests.linux import inodes
from emulated_kernel.guests.linux import kernel_offsets as facts
from emulated_kernel.guests.linux.boot import digest_cache, snapshot
from emulated_kernel.guests.linux.guest_abi import ABIS
from emulated_kernel.guests.linux.initramfs import initramfs
from emulated_kernel.guests.linux.kernel_offsets import KernelOffsets
from emulated_kernel.guests.linux.pc.exception_cells import find_exception_cells
from emulated_kernel.guests.linux.pc.pc_machine import PcMachine
from emulated_kernel.guests.linux.vmcore import vmcore_image
from emulated_kernel.guests.linux.vmcore.vmcore_image import VmcoreOffsets
from kprobefs.cli.images import Image
from kprobefs.cli.main import main
from kprobefs.common.errors import ExitStatus

RAM = 4 << 20
FACTS = KernelOffsets(
    "6.1.0-test", "x86_64", {"do_sync_core": 0x1000}, {"task_struct.pid": 8}, {"current_task": -16}, 4, 8
)
CELLS = find_exception_cells()
PARTS = {"empty": bytes(200_000), "one": b"some", "zeros": bytes(100_000), "long": bytes(70_000) + b"end"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return snapshot.directory()


@pytest.fixture
def saved(cache: Path) -> Path:
    """Save a snapshot of a machine with some RAM and registers, and return its path."""
    return save(cache / "kernel.booted")


def save(path: Path) -> Path:
    ram = mmap.mmap(-1, RAM)
    ram[5 << 16 : (5 << 16) + 9] = b"something"
    ram[RAM - 3 :] = b"end"
    machine = PcMachine(ram, 7, CELLS, 1.0)
    machine.regs.ax, machine.pc.tsc = 0x1234, 99
    snapshot.save(path, machine, FACTS, CELLS, "vmlinuz-test", PARTS, boot_seconds=1.5, seed=7)
    machine.close()
    return path


def test_other_facts_have_another_number() -> None:
    """If the fields that a snapshot stores have changed, the number in _MAGIC has changed, too.

    With the old number, snapshots without the new fields would be loaded.
    """
    kept = (
        *(field.name for form in (KernelOffsets, VmcoreOffsets) for field in fields(form)),
        *(facts._SYMBOLS, facts._OPTIONAL, facts._MEMBERS, inodes._FORMS, inodes._UNITS),
        *(facts._OF_NODES, facts._OF_FREE_PAGES, facts._SIZES, facts._DENTRY_FLAGS, facts._OF_TIME),
        *(facts._OF_TICKS, facts._OF_TIMERS, facts.POKED, facts.STATE, facts._TIMEKEEPERS),
        *(vmcore_image._SYMBOLS, vmcore_image._PER_CPU, vmcore_image.CLOCK, vmcore_image.ONLINE),
        *(
            (abi.symbols, abi.members, abi.constants, abi.per_cpu, abi.time_read, initramfs(abi.stub))
            for abi in ABIS
        ),
        *(abi.user_access for abi in ABIS),
    )
    assert {snapshot._MAGIC: zlib.crc32(repr(kept).encode())} == {b"kprobefs booted kernel 39\n": 2728394383}


def test_no_more_is_mapped_than_the_host_maps_around_a_page(cache: Path) -> None:
    """A snapshot that is read for a check is not cached in large folios. A later access maps at
    most 64 KiB.
    """
    cache.mkdir(parents=True)
    data = random.Random(1).randbytes(16 << 20)
    with open(cache / "random", "w+b") as file:
        snapshot.write_at(file, snapshot.HEADER, data)
        snapshot.finish(file, {}, len(data), PARTS)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with open(cache / "random", "rb") as file:
        found = snapshot.read(file.fileno(), with_parts=False)
        assert found is not None
        before = _mapped_pages(found.ram)
        assert found.ram[15 << 20] == data[15 << 20]
        assert _mapped_pages(found.ram) - before <= (64 << 10) // mmap.PAGESIZE


def _mapped_pages(memory: mmap.mmap) -> int:
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(at // mmap.PAGESIZE * 8)
        entries = array("Q", pagemap.read(len(memory) // mmap.PAGESIZE * 8))
    return sum(entry >> 63 for entry in entries)


def test_what_was_saved_comes_back(saved: Path) -> None:
    found = snapshot.load(saved)
    assert found is not None
    machine, facts, parts, shown = found
    assert shown is None
    assert not parts
    assert facts == FACTS
    assert (machine.regs.ax, machine.pc.tsc) == (0x1234, 99)
    ram = machine.memory.ram
    assert (ram[5 << 16 : (5 << 16) + 9], ram[RAM - 3 :]) == (b"something", b"end")
    assert not any(ram[: 5 << 16])
    ram[0:3] = b"new"
    machine.close()
    again = snapshot.load(saved, with_parts=True)
    assert again is not None
    assert {name: bytes(part) for name, part in again.parts.items()} == PARTS
    assert again[0].memory.ram[0:3] == bytes(3)
    again[0].close()
    assert saved.stat().st_blocks * 512 < RAM // 4
    assert [path.name for path in saved.parent.iterdir()] == ["kernel.booted"]


def test_no_damage_goes_unnoticed(saved: Path) -> None:
    dice, whole = random.Random(1), saved.read_bytes()
    header = whole.index(b"\0\0\0\0", 40)
    ram = whole.index(b"something") - (5 << 16)
    some, long = whole.index(PARTS["one"], ram + RAM), whole.rindex(b"end")
    places = [dice.randrange(header) for _ in range(12)]
    places += [ram + (5 << 16) + 3, ram + RAM - 1, ram + (9 << 16), some, long]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << dice.randrange(8)
        saved.write_bytes(damaged)
        assert snapshot.load(saved, with_parts=True) is None, place
        assert not saved.exists()
    magic = len(snapshot._MAGIC)
    for size in (0, 10, magic, magic + 7, magic + 8, header, ram, len(whole) - 1):
        saved.write_bytes(whole[:size])
        assert snapshot.load(saved) is None, size
    saved.write_bytes(whole)
    found = snapshot.load(saved, with_parts=True)
    assert found is not None
    assert {name: bytes(part) for name, part in found.parts.items()} == PARTS
    found.machine.close()


def header(whole: bytes) -> tuple[int, dict[str, Any]]:
    """Return the offset of a snapshot's JSON header, and the contents of the header."""
    start = whole.index(b'{"')
    size = struct.unpack_from("<I", whole, start - 8)[0]
    about: dict[str, Any] = json.loads(whole[start : start + size])
    return start, about


def rewritten(whole: bytes, about: dict[str, Any]) -> bytes:
    """Return the snapshot `whole` with the header `about` and the right checksum of this header."""
    text = json.dumps(about).encode()
    head = whole[: header(whole)[0] - 8] + struct.pack("<II", len(text), zlib.crc32(text)) + text
    ram = whole.index(b"something") - (5 << 16)
    return head.ljust(ram, b"\0") + whole[ram:]


STRANGE = (
    None,
    -1,
    1 << 40,
    1 << 63,
    1 << 64,
    5.5,
    "",
    "00",
    [],
    [1],
    [-4, 0],
    [0, 1 << 40],
    {},
    {"tsc": "x"},
    True,
)


def test_what_was_found_whole_is_not_read_again(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot that was checked is not read again until the file changes.

    A change may be hidden from all times of the file except the change time.
    """
    monkeypatch.setattr(digest_cache, "_SETTLED", -1.0)
    read = Mock(side_effect=snapshot._checksum)
    monkeypatch.setattr(snapshot, "_checksum", read)

    def loaded() -> int:
        """Load the snapshot, and return the number of pieces that were read."""
        before = read.call_count
        found = snapshot.load(saved, with_parts=True)
        assert found is not None
        found.machine.close()
        return read.call_count - before

    assert [loaded(), loaded(), loaded()] == [1 + len(PARTS), 0, 0]
    (note,) = digest_cache.notes(saved.parent)
    used = 1_700_000_000
    os.utime(note, (used, used))
    os.utime(saved, (used, used))
    assert loaded() == 1 + len(PARTS)
    (kernel,) = snapshot.cached()
    assert kernel.used > used
    assert loaded() == 0
    for stored in (b"", b"else", b"\xff"):
        for each in digest_cache.notes(saved.parent):
            each.write_bytes(stored)
        assert loaded() > 0
    for each in digest_cache.notes(saved.parent):
        each.chmod(0o666)
    assert loaded() > 0
    assert loaded() == 0
    status, whole = saved.stat(), saved.read_bytes()
    with open(saved, "r+b") as file:
        file.seek(whole.index(b"something"))
        file.write(b"S")
    os.utime(saved, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert saved.stat().st_mtime_ns == status.st_mtime_ns
    assert snapshot.load(saved, with_parts=True) is None
    assert snapshot.clear() == 0
    assert not list(saved.parent.iterdir())


def test_what_has_just_been_written_is_read_again(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of a file that was just written is not remembered, because another change may leave the same
    times.
    """
    monkeypatch.setattr(digest_cache, "_SETTLED", 3600.0)
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    for _ in range(2):
        found = snapshot.load(saved)
        assert found is not None
        found.machine.close()
        assert not digest_cache.notes(saved.parent)
    assert not synced


def test_times_that_are_set_together_are_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the change time of a file has no nanoseconds, the remembered hash of the file is not used.

    Such times come from rebuilt images of file systems, from FAT, or from network file systems.
    """
    monkeypatch.setattr(digest_cache, "_SETTLED", -1.0)
    file, status = tmp_path / "kernel", os.fstat

    def remembered(nanoseconds: int) -> str | None:
        def found(number: int) -> Any:
            real = status(number)
            changed = 1_700_000_000 * 10**9 + nanoseconds
            return Mock(st_uid=real.st_uid, st_mode=real.st_mode, st_ctime_ns=changed)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", found)
            for text in ("one", "two"):
                file.write_text(text, encoding="ascii")
                os.utime(file, (1, 1))
                with open(file, "rb") as opened:
                    reading = digest_cache.about_to_read(tmp_path, opened.fileno(), "[a-z]+")
                    digest_cache.remember(reading, text)
        return reading.stored

    assert remembered(123) == "one"
    assert remembered(0) is None


def test_only_some_notes_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_cache, "_SETTLED", -1.0)
    for number in range(digest_cache._LIMIT + 3):
        (tmp_path / f"{number}").write_text(str(number), encoding="ascii")
        with open(tmp_path / f"{number}", "rb") as file:
            reading = digest_cache.about_to_read(tmp_path, file.fileno(), "[0-9]+")
            assert reading.stored is None
            digest_cache.remember(reading, str(number))
            os.utime(reading.note, (number, number))
            assert digest_cache.about_to_read(tmp_path, file.fileno(), "[0-9]+").stored == str(number)
            assert digest_cache.about_to_read(tmp_path, file.fileno(), "[a-f]+").stored is None
            os.utime(reading.note, (number, number))
    assert len(digest_cache.notes(tmp_path)) == digest_cache._LIMIT
    with open(tmp_path / "0", "rb") as file:
        assert digest_cache.about_to_read(tmp_path, file.fileno(), "[0-9]+").stored is None
    assert not list(tmp_path.glob(f"{digest_cache.MAKING}*"))


def test_a_note_that_can_not_be_written_leaves_nothing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_cache, "_SETTLED", -1.0)
    monkeypatch.setattr(os, "rename", Mock(side_effect=OSError(errno.ENOSPC, "")))
    found = snapshot.load(saved)
    assert found is not None
    found.machine.close()
    assert [path.name for path in saved.parent.iterdir()] == ["kernel.booted"]


@pytest.mark.parametrize("key", ["facts", "cells", "pc", "cpu", "ram", "checksum", "parts", "end"])
def test_headers_that_no_mount_has_written(key: str, saved: Path) -> None:
    whole = saved.read_bytes()
    about = header(whole)[1]
    others = [{name: value for name, value in about.items() if name != key}]
    others += [about | {key: value} for value in STRANGE]
    for other in others:
        saved.write_bytes(rewritten(whole, other))
        assert snapshot.load(saved, with_parts=True) is None, other.get(key)
        assert not saved.exists()
    saved.write_bytes(rewritten(whole, about))
    found = snapshot.load(saved)
    assert found is not None
    found[0].close()


@pytest.mark.parametrize("key", ["facts", "pc"])
def test_fields_that_no_mount_has_written(key: str, saved: Path) -> None:
    whole = saved.read_bytes()
    about = header(whole)[1]
    for name, value in about[key].items():
        others = ["", -1, 1 << 64, [1], [1, 2, 3], {"x": ""}, {"x": None}, [1, ""]]
        for other in others if name != "release" else [5]:
            saved.write_bytes(rewritten(whole, about | {key: about[key] | {name: other}}))
            assert snapshot.load(saved) is None, (name, value, other)
            assert not saved.exists()


def test_a_timer_that_never_counts(saved: Path) -> None:
    whole = saved.read_bytes()
    about = header(whole)[1]
    saved.write_bytes(rewritten(whole, about | {"pc": about["pc"] | {"_pit_count": 0}}))
    assert snapshot.load(saved) is None


def test_what_others_could_have_written_is_not_used(saved: Path) -> None:
    saved.chmod(0o666)
    assert snapshot.load(saved) is None
    assert not saved.exists()


def test_a_cache_that_can_not_be_written_to(tmp_path: Path, cache: Path) -> None:
    cache.parent.parent.mkdir(exist_ok=True)
    cache.parent.write_text("a file where the directory would be")
    with pytest.raises(OSError, match=r"exists|Not a directory"):
        save(cache / "kernel.booted")
    assert snapshot.cached() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [cache.parent.name]


def test_what_cannot_be_read_is_none(cache: Path) -> None:
    assert snapshot.load(cache / "nothing.booted") is None
    (cache / "directory.booted").mkdir(parents=True)
    assert snapshot.load(cache / "directory.booted") is None


def test_oldest_go_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save(cache / "first.booted")
    monkeypatch.setattr(snapshot, "LIMIT", first.stat().st_blocks * 512 * 5 // 2)
    second = save(cache / "second.booted")
    os.utime(second, (1, 1))
    save(cache / "third.booted")
    assert [kernel.path.name for kernel in snapshot.cached()] == ["third.booted", "first.booted"]
    assert {kernel.release for kernel in snapshot.cached()} == {"6.1.0-test"}
    (cache / ".booting-x").write_bytes(b"")
    assert snapshot.clear() == 3
    assert not list(cache.iterdir())


def test_images_for_people_and_programs(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kprobefs.cli.images.at_hand", tuple)
    assert main(["images", "--json"]) == ExitStatus.OK
    assert json.loads(capsys.readouterr().out) == []
    whole, damaged = save(cache / "whole.booted"), save(cache / "damaged.booted")
    damaged.write_bytes(b"nothing")
    os.utime(damaged, (1, 1))
    assert main(["images", "--json"]) == ExitStatus.OK
    sizes = [path.stat().st_blocks * 512 for path in (whole, damaged)]
    good, bad = json.loads(capsys.readouterr().out)
    assert 0 <= good.pop("age_seconds") < bad.pop("age_seconds")
    assert good == {
        "release": "6.1.0-test",
        "architecture": "x86_64",
        "source": "vmlinuz-test",
        "size": sizes[0],
        "boot_seconds": 1.5,
        "kept": "boot, seed 7",
    }
    assert bad == {
        "release": None, "architecture": None, "source": None, "size": sizes[1], "boot_seconds": None,
        "kept": None,
    }  # fmt: skip
    assert main(["images"]) == ExitStatus.OK
    shown = capsys.readouterr()
    assert str(cache) in shown.err
    _, *rows = (line.split() for line in shown.out.splitlines())
    assert rows[0][:7] == ["6.1.0-test", "x86_64", "boot,", "seed", "7", "0", "MiB"]
    assert rows[0][-3:] == ["1.5", "s", "vmlinuz-test"]
    assert rows[1][:6] == ["not", "usable", "?", "-", "0", "MiB"]
    assert rows[1][-2:] == ["-", "?"]
    assert main(["images", "--json", "--clear"]) == ExitStatus.USAGE
    assert len(snapshot.cached()) == 2


@pytest.mark.parametrize(
    ("home", "is_terminal", "name", "shown"),
    [
        ("/home/me", True, "linux.deb", "~/.cache/a/linux.deb"),
        ("/home/me/", True, "linux.deb", "~/.cache/a/linux.deb"),
        ("/home/me", False, "linux.deb", "/home/me/.cache/a/linux.deb"),
        ("/home/m", True, "linux.deb", "/home/me/.cache/a/linux.deb"),
        ("/", True, "linux.deb", "/home/me/.cache/a/linux.deb"),
        ("/home/me", True, "linux&.deb", "/home/me/.cache/a/linux&.deb"),
    ],
)
def test_a_path_on_a_terminal_begins_with_the_home_directorys_short_name(
    home: str,
    is_terminal: bool,
    name: str,
    shown: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = f"/home/me/.cache/a/{name}"
    image = Image("6.1.0-test", "x86_64", path, 1 << 20, None, None, None)
    monkeypatch.setattr("kprobefs.cli.images.images", lambda: [image])
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["images"]) == ExitStatus.OK
    out = capsys.readouterr().out
    assert out.split()[-1] == shown
    assert (out.splitlines()[-1].strip() == shown) is is_terminal
    assert main(["images", "--json"]) == ExitStatus.OK
    assert json.loads(capsys.readouterr().out)[0]["source"] == path


TEXTS = {
    "nested": b"[" * 200_000,
    "objects": b'{"a":' * 40_000,
    "a long number": b'{"facts": {"release": ' + b"9" * 5_000 + b'}, "source": 1}',
    "no text": b'{"facts": "\xff"}',
    "a list": b"[]",
    "other types": b'{"facts": [], "source": {}}',
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_an_image_that_says_nothing_of_use_is_listed(text: bytes, saved: Path) -> None:
    head = snapshot._MAGIC + struct.pack("<II", len(text), zlib.crc32(text))
    saved.write_bytes(head + text)
    assert [(kernel.release, kernel.source) for kernel in snapshot.cached()] == [(None, None)]
    assert snapshot.load(saved) is None
    assert not saved.exists()


def test_what_others_could_have_written_tells_nothing(saved: Path) -> None:
    assert [kernel.release for kernel in snapshot.cached()] == ["6.1.0-test"]
    saved.chmod(0o666)
    assert [(kernel.release, kernel.source) for kernel in snapshot.cached()] == [(None, None)]


def test_names_follow_file_and_seed(tmp_path: Path) -> None:
    file = tmp_path / "vmlinuz"
    names = set()
    for content, seed in ((b"a", 1), (b"a", 2), (b"other", 1)):
        file.write_bytes(content)
        names.add(snapshot.place(file, seed))
        assert snapshot.place(file, seed) in names
    assert len(names) == 3


def test_a_save_that_fails_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match="No space"):
        save(cache / "kernel.booted")
    assert not cache.exists()


def test_a_kernel_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """place() reads a kernel's file only once, and reads the file again if its times or its
    contents change.
    """
    read: list[object] = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *given: read.append(given) or digest(*given))
    file = tmp_path / "vmlinuz"
    file.write_bytes(b"one")
    first = snapshot.place(file, 1)
    assert (snapshot.place(file, 1), snapshot.place(file, 2) == first, len(read)) == (first, False, 1)
    os.utime(file, ns=(1, 1))
    assert (snapshot.place(file, 1), len(read)) == (first, 2)
    file.write_bytes(b"another")
    assert snapshot.place(file, 1) != first


def test_the_hash_of_a_kernel_that_has_booted_is_remembered(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash of a kernel's file is kept in the cache once the kernel has a snapshot, but not before."""
    monkeypatch.setattr(digest_cache, "_SETTLED", -1.0)
    file = tmp_path / "vmlinuz"
    file.write_bytes(b"kernel")
    place = snapshot.place(file, 1)
    assert not cache.exists()
    save(place)
    assert not digest_cache.notes(cache)
    assert snapshot.place(file, 1) == place
    assert len(digest_cache.notes(cache)) == 1
    snapshot._digest.cache_clear()
    monkeypatch.setattr(hashlib, "file_digest", Mock(side_effect=AssertionError))
    assert snapshot.place(file, 1) == place
    file.write_bytes(b"kernal")
    with pytest.raises(AssertionError):
        snapshot.place(file, 1)
