"""Files that are no dumps, are damaged, or change during the read: such a file is refused by an error of one
line.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from emulated_kernel.guests.common import spill_file
from emulated_kernel.guests.linux.boot import snapshot
from emulated_kernel.guests.linux.vmcore import vmcore_image
from emulated_kernel.guests.linux.vmcore.vmcore_guest import ensure_core_cached
from emulated_kernel.image.linux import vmcore
from emulated_kernel.util.errors import KernelError
from kprobefs.cli.main import main
from tests.guests.linux import core_dump
from tests.guests.linux.core_dump import dump

PAGE = bytes(4096)
INFO = "OSRELEASE=6.1\nSYMBOL(_stext)=ffffffff81000000\nSYMBOL(swapper_pg_dir)=ffffffff82000000\n"
RAM = bytes(48 << 20)


def shared_pieces() -> bytes:
    """Return a small dump whose segments all refer to the same bytes of the file, so that the dump claims
    much memory.
    """
    data = bytearray(dump([(at << 20, PAGE) for at in range(100)], INFO))
    first = core_dump.PROGRAM.unpack_from(data, core_dump.HEADER.size + core_dump.PROGRAM.size)
    for at in range(100):
        place = core_dump.HEADER.size + (1 + at) * core_dump.PROGRAM.size
        core_dump.PROGRAM.pack_into(
            data, place, core_dump.LOAD, 0, first[2], 0, at << 20, 64 * len(PAGE), 64 * len(PAGE), 0
        )
    return bytes(data)


BAD = {
    "an empty file": (b"", "it is empty"),
    "a text": (b"no dump\n", "it is no ELF file"),
    "a compressed kdump": (b"KDUMP   " + PAGE, "without -z, -l, -s and -R"),
    "a dump for Windows": (b"PAGEDU64" + PAGE, "it is a dump for Windows"),
    "a program": (dump([(0, PAGE)], kind=2), "but no core"),
    "32 bits": (dump([(0, PAGE)])[:4] + b"\1" + dump([(0, PAGE)])[5:], "it is of 32 bits"),
    "another architecture's": (dump([(0, PAGE)], machine=183), "another architecture (ELF machine 183)"),
    "a truncated one": (dump([(0, PAGE)], INFO)[:-100], "it is truncated: 100 bytes are missing"),
    "one that ends in its headers": (dump([(0, PAGE)], INFO)[:100], "truncated within its headers"),
    "one without memory": (dump([]), "it has no memory"),
    "a process's": (dump([(0, PAGE), (0, PAGE)]), "a core of a process"),
    "parts of pages": (dump([(0x1000, PAGE[1:])], INFO), "isn't whole pages"),
    "pieces that overlap": (dump([(0, PAGE * 2), (0x1000, PAGE)], INFO), "overlaps"),
    "pieces that are one piece of the file": (shared_pieces(), "are the same piece of the file"),
    "memory beyond all bounds": (dump([(1 << 50, PAGE)], INFO), "beyond 64 GiB"),
    "no kernel of Linux": (dump([(0x1000, PAGE)]), "no VMCOREINFO is in it"),
    "five levels": (dump([(0, PAGE)], INFO + "NUMBER(pgtable_l5_enabled)=1\n"), "boot it with no5lvl"),
    "encrypted memory": (dump([(0, PAGE)], INFO + "NUMBER(sme_mask)=8\n"), "its memory is encrypted"),
    "too little of it": (dump([(0, PAGE)], INFO), "its kernel isn't in its memory"),
    "nothing but zeros": (dump([(0, RAM)], INFO), "no table of symbols"),
    "a number that is none": (dump([(0, RAM)], INFO + "NUMBER(phys_base)=0x\n"), "VMCOREINFO is damaged"),
    "symbols that are none": (
        dump([(0, RAM)], INFO.replace("ffffffff81", "zz")),
        "its VMCOREINFO is damaged",
    ),
}


@pytest.mark.timeout(60)
def test_a_fifo_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "core")
    assert main(["mount", "--vmcore", str(tmp_path / "core"), "--mkdir", str(tmp_path / "mnt")]) == 2
    assert "it is no regular file" in capsys.readouterr().err
    assert not (tmp_path / "mnt").exists()


@pytest.mark.parametrize("which", BAD)
def test_what_is_no_dump(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is no usable dump is refused with one line and status 2, and nothing is left behind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    content, why = BAD[which]
    file, directory = tmp_path / "core", tmp_path / "mnt"
    file.write_bytes(content)
    directory.mkdir()
    status = main(["mount", "--vmcore", str(file), str(directory)])
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith(f"kprobefs: {file}: not a usable dump: ")
    assert why in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["core", "mnt"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--image", "host"), "--vmcore: not possible with --image or --kprobes kernel"),
        (("--kprobes", "kernel"), "--vmcore: not possible with --image or --kprobes kernel"),
        (("--cpus", "2"), "has one CPU"),
        (("--vmcore", "/nonexistent"), "No such file"),
    ],
)
def test_what_goes_with_no_dump(
    options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mount", "--vmcore", "/dev/null", *options, str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


@pytest.mark.timeout(20)
def test_holes_in_front_of_data(tmp_path: Path) -> None:
    """If pages of memory begin inside of pages of the file, data is read exactly once, and holes are not
    read.
    """
    text = f"{INFO}SYMBOL(init_uts_ns)=ffffffff82000001\nPAGESIZE=4096\n".encode()
    ram = bytes(300 * len(PAGE)) + text.ljust(len(PAGE), b"\0") + bytes(200 * len(PAGE)) + b"x" * len(PAGE)
    data, path = dump([(0, ram)]), tmp_path / "core"
    with path.open("wb") as file:
        os.truncate(file.fileno(), len(data))
        for at in range(0, len(data), len(PAGE)):
            block = data[at : at + len(PAGE)]
            if any(block):
                os.pwrite(file.fileno(), block, at)
    with path.open("rb") as file:
        core = vmcore.CoreFile(file.fileno())
        (segment,) = core.segments
        assert segment.offset % len(PAGE)
        assert core.vmcoreinfo["SYMBOL(_stext)"] == "ffffffff81000000"
        found, places = bytearray(len(ram)), []
        for at, block in core.data(segment.offset, segment.size):
            places += range(at - segment.offset, at - segment.offset + len(block), len(PAGE))
            found[at - segment.offset : at - segment.offset + len(block)] = block
        assert found == ram
        assert len(places) == len(set(places))
        assert not any(place % len(PAGE) for place in places)
        if path.stat().st_blocks * 512 < 100 * len(PAGE):
            assert len(places) < 100


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda path: os.truncate(path, 32 << 20), "it was truncated while it was read"),
        (lambda path: os.truncate(path, 1 << 30), "it changed while it was read"),
        (os.utime, "it changed while it was read"),
    ],
)
def test_a_dump_that_changes(change: Callable[[Path], None], why: str, tmp_path: Path) -> None:
    """A dump that changes while it is read is refused."""
    path = tmp_path / "core"
    path.write_bytes(dump([(0, b"x" * len(RAM))], INFO))
    with path.open("rb") as file, (tmp_path / "made").open("w+b") as made:
        core = vmcore.CoreFile(file.fileno())
        change(path)
        with pytest.raises(KernelError, match=why):
            vmcore_image.convert(core, "core", made, is_checksummed=False)


def test_no_room_for_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dump with large holes is not kept in a cache on tmpfs, where every page of a hole that is read takes
    memory.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = list[str]()

    def statvfs(directory: str) -> SimpleNamespace:
        asked.append(directory)
        return SimpleNamespace(f_bavail=200 << 20, f_frsize=1)

    sparse = tmp_path / "core"
    sparse.write_bytes(dump([(0, PAGE)], INFO, hole=range(1 << 20, 1 << 30)))
    os.truncate(sparse, sparse.stat().st_size + (1 << 30) - (1 << 20))
    made = list[Path]()
    monkeypatch.setattr(snapshot, "keep", lambda place, _write: made.append(place))
    monkeypatch.setattr(os, "statvfs", statvfs)
    ensure_core_cached(str(sparse))
    monkeypatch.setattr(spill_file, "_file_system", lambda _device: "tmpfs")
    ensure_core_cached(str(sparse))
    assert len(made) == 1
    assert asked == [str(tmp_path)] * 2
