"""Snapshots: files of booted machines, with a header, RAM, and tables that were read from the kernel.

Pages of zeros are holes in the file. RAM is mapped privately, so that mounts of the same kernel share the
pages that they have not changed.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, TypeVar

from emulated_kernel.guests.common.call_time import MAX_CALL
from emulated_kernel.guests.linux.boot.boot_protocol import RAM_SIZE
from emulated_kernel.guests.linux.boot.command_lines import (
    ARM64_COMMAND_LINE,
    RISCV_COMMAND_LINE,
    X86_COMMAND_LINE,
)
from emulated_kernel.guests.linux.boot.digest_cache import (
    MAKING,
    Reading,
    about_to_read,
    is_own,
    last_read,
    notes,
    remember,
)
from emulated_kernel.guests.linux.cpu.cpuid_answers import CpuidAnswers
from emulated_kernel.guests.linux.cpu.production_cpu import ProductionCpu, from_text
from emulated_kernel.guests.linux.guest_abi import ABIS, abi_named
from emulated_kernel.guests.linux.initramfs import initramfs
from emulated_kernel.guests.linux.kernel_offsets import KernelOffsets, checked_offsets
from emulated_kernel.guests.linux.pc.cpu_state import STATE_SIZE
from emulated_kernel.guests.linux.pc.linux_machine import LinuxMachine
from emulated_kernel.guests.linux.pc.machines import new_machine
from emulated_kernel.guests.linux.pc.pc_machine import PcMachine
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.machine.unicorn_engine import library_release
from emulated_kernel.util.cache_directory import cache_directory
from emulated_kernel.util.config import DEFAULT_SEED
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import asdict, dataclass
from emulated_kernel.util.fast_named_tuple import NamedTuple
from emulated_kernel.util.safe_read import identity, is_word, open_regular, replace_file

_MAGIC = b"kprobefs booted kernel 39\n"
HEADER = 256 << 10
"""Size in bytes of a snapshot's header, which precedes RAM."""
_PIECE = 64 << 10
_SOURCE_LIMIT = 4 << 30
"""Maximum size of a kernel's file in bytes; with debug information, a kernel has about 1 GiB."""
_COMMAND_LINES = X86_COMMAND_LINE, RISCV_COMMAND_LINE, ARM64_COMMAND_LINE
NORESERVE = 0x4000
"""MAP_NORESERVE, a flag of mmap(2): a guest may have more memory than the host has available."""
LIMIT = 600 << 20
"""Maximum size of all snapshots on disk in bytes; the least recently used ones are removed first."""
_SUFFIX = ".booted"
_TABLES = ".tables"
"""Suffix of the name of a snapshot without RAM and CPU state, which only has tables from a kernel's file."""
_WHOLE = "whole"
"""Text that the digest cache remembers for a snapshot whose checksums were found to be right."""
_HASH = "[0-9a-f]{64}"
"""Regular expression of the digest of a kernel's file."""
_MAKING = ".booting-"
BUDGET = MAX_CALL
"""Maximum CPU seconds of one run of a guest from a snapshot, and of all runs for one call together."""

T = TypeVar("T")


@dataclass(frozen=True)
class CachedKernel:
    """A snapshot as `kprobefs images` lists it.

    `size`: bytes on disk. `made` and `used`: when the snapshot was written and last used, in seconds since
    1970. `boot_seconds`: CPU seconds of the boot; None if the kernel was not booted for the snapshot.
    `source`: path of the file of the kernel or the core dump. `release`, `architecture` and `source` are None
    if the snapshot is damaged, was written by another version of kprobefs, or may have been written by
    another user.
    """

    path: Path
    release: str | None
    architecture: str | None
    source: str | None
    size: int
    made: float
    used: float
    boot_seconds: float | None
    kept: str
    """Text about the content of the snapshot, such as "tables"; "" if the snapshot is damaged."""


def directory() -> Path:
    """Return the directory of the snapshots, in the user's cache directory."""
    return cache_directory()


def place(source: Path, seed: int, cpu: ProductionCpu | None = None) -> Path:
    """Return the path of the snapshot of a booted kernel. The snapshot need not exist.

    `source`: the kernel's file. `seed`: seed of the kernel's random numbers. `cpu`: production CPU that the
    kernel sees; None for the emulated CPU. The path depends on the hash of the kernel's file, `seed`, the
    boot parameters, `cpu` and the values of its model-specific registers, and Unicorn's version.
    Raises: as _digest().
    """
    reading, whole = _digest(source, *identity(source))
    digest = hashlib.sha256(whole.encode())
    digest.update(repr((_MAGIC, seed, library_release(), RAM_SIZE, *_COMMAND_LINES)).encode())
    # The file's hash implies its processor.
    for abi in ABIS:
        digest.update(initramfs(abi.stub))
    if cpu is not None:
        digest.update(cpu.as_text().encode())
        digest.update(repr(sorted(CpuidAnswers(cpu).registers.items())).encode())
    found = _named(digest.hexdigest())
    # The whole file was read, although it has a snapshot: remember the digest. (A file that never boots has
    # none.)
    if reading.stored is None and has_snapshot(found):
        remember(reading, whole)
    return found


def tables_place(source: Path) -> Path:
    """Return the path of the snapshot with the tables of the kernel in the file `source`.

    The snapshot need not exist. Raises: as _digest().
    """
    reading, whole = _digest(source, *identity(source))
    found = _named(hashlib.sha256(repr((_MAGIC, whole)).encode()).hexdigest(), _TABLES)
    if reading.stored is None and has_snapshot(found):
        remember(reading, whole)
    return found


@lru_cache(maxsize=1)
def _digest(source: Path, *_unchanged: int) -> tuple[Reading, str]:
    """Return (reading, digest) of the file `source`. The digest is the file's SHA-256 in hexadecimal.

    If `reading.stored` is None, the caller can pass the reading to remember(), which stores the digest for
    later processes. This process caches the last result. `_unchanged`: the identity of the file, which is a
    part of the cache's key, so that a changed file is read again.
    Raises: OSError (the file cannot be read, or is not regular), KernelError ENOEXEC (the file is too large
    for a kernel).
    """
    with open_regular(source) as file:
        if os.fstat(file.fileno()).st_size > _SOURCE_LIMIT:
            raise unusable(f"a file of more than {_SOURCE_LIMIT >> 30} GiB")
        reading = about_to_read(directory(), file.fileno(), _HASH)
        return reading, reading.stored or hashlib.file_digest(file, "sha256").hexdigest()


def core_place(source: Path) -> Path:
    """Return the path of the snapshot for the core dump in the file `source`.

    The path depends on the file's path, identity and beginning, because a dump may be too long to read.
    Raises: OSError (the file cannot be read, or is not regular).
    """
    with open_regular(source) as file:
        digest = hashlib.sha256(file.read(_PIECE))
    facts = (_MAGIC, "core with original text", library_release(), os.path.realpath(source))
    digest.update(repr((*facts, *identity(source))).encode())
    return _named(digest.hexdigest())


def has_snapshot(place: Path) -> bool:
    """Return True if the file `place` exists, and no other user can have written to it.

    Return False also if the directory cannot be searched.
    """
    with suppress(OSError), open_regular(place) as file:
        return is_own(file.fileno())
    return False


def _named(digest: str, suffix: str = _SUFFIX) -> Path:
    return directory() / f"{digest[:32]}{suffix}"


def _snapshots() -> list[Path]:
    return [path for suffix in (_SUFFIX, _TABLES) for path in directory().glob(f"*{suffix}")]


def save(
    target: Path,
    machine: LinuxMachine,
    facts: KernelOffsets,
    cells: Sequence[int],
    source: str,
    parts: Mapping[str, bytes | memoryview],
    shown: ShownCpu | None = None,
    boot_seconds: float | None = None,
    seed: int = DEFAULT_SEED,
) -> None:
    """Write a snapshot of a machine. The file appears at `target` when it is complete. Raises: OSError.

    `facts`: offsets in the kernel's structures. `cells`: result of find_cells(), the offsets of words in
    Unicorn's CPU state. `source`: path of the kernel's file. `parts`: name -> data to store after RAM, such
    as the kernel's tables. `shown`: the production CPU that the guest sees; None if it sees the emulated CPU.
    `boot_seconds`: CPU time of the boot. `seed`: seed of the kernel's random numbers.
    """
    about = {
        "boot_seconds": boot_seconds,
        "seed": seed,
        "shown": None if shown is None else (shown.cpu.as_text(), *shown[1:]),
        "source": source,
        "facts": asdict(facts),
        "cells": cells,
        "pc": machine.pc.state(),
        "cpu": zlib.compress(machine.engine.saved_context()).hex(),
    }
    ram = machine.memory.ram

    def write(file: IO[bytes]) -> None:
        write_at(file, HEADER, memoryview(ram))
        finish(file, about, len(ram), parts)

    keep(target, write)


def load_tables(source: Path) -> tuple[dict[str, memoryview], ShownCpu | None] | None:
    """Load only the tables of the snapshot `source`; return (name -> data, production CPU of the guest).

    The second item is None if the guest sees the emulated CPU. If the file is missing or damaged, or has no
    tables, return None. Remove a file that exists but cannot be used.
    """
    return load_as(source, lambda kept: (kept.parts, _shown(kept.about)), with_parts=True)


def save_tables(
    target: Path, kernel: LinuxKernel, source: str, parts: Mapping[str, bytes | memoryview]
) -> None:
    """Write a snapshot of a kernel's tables, without RAM and CPU state. Raises: OSError.

    The file appears at `target` when it is complete. `source`: path of the kernel's file. `parts`: name of a
    table -> its data.
    """
    facts = {"release": kernel.release, "architecture": kernel.architecture}
    about = {"source": source, "facts": facts}
    keep(target, lambda file: finish(file, about, 0, parts))


def keep(target: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Create the file `target` with the content that `write` writes to its argument, an open file.

    The file appears at `target` when it is complete. Then the least recently used snapshots are removed if
    all snapshots together are too large. Raises: OSError.
    """
    made = [place for place in target.parents if not place.exists()]
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        replace_file(target, _MAKING, write)
    except BaseException:
        with suppress(OSError):
            for place in made:
                place.rmdir()
        raise
    _prune(target)


def finish(
    file: IO[bytes],
    about: Mapping[str, Any],
    size: int,
    parts: Mapping[str, bytes | memoryview],
    *,
    is_checksummed: bool = True,
) -> None:
    """Complete a snapshot file that already has `size` bytes of RAM from the offset HEADER on.

    `about`: data about the machine in a form that JSON can represent. `parts`: name -> data to store after
    RAM. `is_checksummed`: whether to compute a checksum of RAM, which is needed only if other processes will
    check the file.

    Raises: OSError (the file cannot be written).
    """
    end = HEADER + size
    file.truncate(end)
    checksum = _checksum(file.fileno(), HEADER, size) if is_checksummed else None
    kept = {}
    for name, data in parts.items():
        write_at(file, end, data)
        kept[name] = (end, len(data), _checksum(file.fileno(), end, len(data)))
        end += -(-len(data) // _PIECE) * _PIECE
    file.truncate(end)
    text = json.dumps({**about, "ram": size, "checksum": checksum, "parts": kept, "end": end}).encode()
    file.seek(0)
    file.write(_MAGIC + struct.pack("<II", len(text), zlib.crc32(text)) + text)
    file.flush()


def write_at(file: IO[bytes], start: int, data: bytes | memoryview) -> None:
    """Write data at the offset `start`; pieces of zeros become holes. Raises: OSError."""
    zeros = bytes(_PIECE)
    for at in range(0, len(data), _PIECE):
        piece = bytes(data[at : at + _PIECE])
        if piece != zeros[: len(piece)]:
            file.seek(start + at)
            file.write(piece)
    file.flush()


class SnapshotContents(NamedTuple):
    """The content of a snapshot. Its RAM is a private mapping of the file."""

    about: dict[str, Any]
    ram: mmap.mmap
    parts: dict[str, memoryview]
    """Name -> data that are stored after RAM, such as a kernel's tables; empty if they were not loaded."""


class ShownCpu(NamedTuple):
    """A production CPU that a guest sees, and the guest's report about the CPU."""

    cpu: ProductionCpu
    rdmsr_sites: Sequence[int]
    """Addresses of the kernel's rdmsr instructions, which the host emulates."""
    vulnerabilities: Mapping[str, str]
    """File of /sys/devices/system/cpu/vulnerabilities -> its text in the guest."""
    features: Sequence[int]
    """Numbers of the CPU features (X86_FEATURE_*) that the guest has found."""


class SavedMachine(NamedTuple):
    """The content of a snapshot with a machine: RAM, CPU state and devices, and tables of the kernel."""

    machine: LinuxMachine
    facts: KernelOffsets
    parts: dict[str, memoryview]
    """Name -> data that are stored after RAM, such as a kernel's tables; empty if they were not loaded."""
    shown: ShownCpu | None
    """The production CPU that the guest sees; None if it sees the emulated one."""


def load(source: Path, *, with_parts: bool = False) -> SavedMachine | None:
    """Load the saved machine in the snapshot `source`; return None if the file is missing or damaged.

    Remove a damaged file. `with_parts`: also load the data that are stored after RAM, such as the kernel's
    tables; return None and remove the file if there are none.
    """

    def machine(kept: SnapshotContents) -> SavedMachine:
        return SavedMachine(*_machine(kept.ram, kept.about), kept.parts, _shown(kept.about))

    return load_as(source, machine, with_parts=with_parts)


def load_as(source: Path, made: Callable[[SnapshotContents], T], *, with_parts: bool) -> T | None:
    """Load the snapshot `source`; return the result of `made`, which is called with the content.

    If the file is missing or damaged, return None; a damaged file is removed. `with_parts`: also load the
    data that are stored after RAM, such as the kernel's tables; a snapshot without such data counts as
    damaged.

    Raises: KernelError (by `made`, if an intact snapshot is not usable).
    """
    try:
        with open_regular(source) as file:
            found = _read(source, file.fileno(), with_parts=with_parts)
            if found is not None:
                return made(found)
    except FileNotFoundError:
        return None
    except KernelError:
        raise
    except (
        OSError,
        KeyError,
        TypeError,
        ValueError,
        OverflowError,
        AttributeError,
        zlib.error,
        HardwareError,
    ):
        pass
    with suppress(OSError):
        source.unlink()
    return None


def _read(source: Path, file: int, *, with_parts: bool) -> SnapshotContents | None:
    if not is_own(file):
        # A CPU state made by another user could do anything in this process.
        return None
    reading = about_to_read(source.parent, file, _WHOLE)
    found = read(file, with_parts=with_parts, is_checked=reading.stored is None)
    # A file that has just been written is read whole next time, too, and need not be on the disk yet.
    if found is not None and reading.stored is None and reading.is_settled:
        # After a power failure the note might exist while the content is lost.
        os.fdatasync(file)
        remember(reading, _WHOLE)
    return found


def read(file: int, *, with_parts: bool, is_checked: bool = True) -> SnapshotContents | None:
    """Read the snapshot in the open file `file`; return None if its magic, size or a checksum is wrong.

    `is_checked`: whether to compare the checksums of RAM and parts, which is needed if the file may have been
    damaged since it was written. `with_parts`: also map the parts that are stored after RAM, such as the
    kernel's tables; return None if there are none.

    Raises: KeyError, TypeError, ValueError (the header has wrong values), OSError (the file cannot be read or
    mapped).
    """
    about = _header(file)
    if about is None or os.fstat(file).st_size != about["end"]:
        return None
    size = about["ram"]
    kept = about["parts"]
    if with_parts and not kept:
        return None
    pieces = ((HEADER, size, about["checksum"]), *kept.values())
    if is_checked and any(_checksum(file, start, length) != checksum for start, length, checksum in pieces):
        return None
    parts = {}
    if with_parts:
        whole = memoryview(mmap.mmap(file, about["end"], flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
        parts = {name: whole[start : start + length] for name, (start, length, _) in kept.items()}
    access = mmap.PROT_READ | mmap.PROT_WRITE
    # A mapping cannot be empty.
    ram = mmap.mmap(file, max(size, 1), flags=mmap.MAP_PRIVATE | NORESERVE, prot=access, offset=HEADER)
    return SnapshotContents(about, ram, parts)


def _machine(ram: mmap.mmap, about: dict[str, Any]) -> tuple[LinuxMachine, KernelOffsets]:
    shown = _shown(about)
    abi = abi_named(about["facts"]["architecture"])
    machine = new_machine(abi, ram, 0, checked_cells(about), BUDGET, is_production=shown is not None)
    try:
        if shown is not None and isinstance(machine, PcMachine):
            machine.show_cpu(shown.cpu, shown.rdmsr_sites)
        machine.engine.restore_context(zlib.decompress(bytes.fromhex(about["cpu"])))
        machine.pc.restore(about["pc"])
        facts = KernelOffsets(**checked_offsets(about["facts"]))
        machine.follow_text(facts.symbols, facts.offsets)
        machine.execute(facts.executed)
    except BaseException:
        machine.close()
        raise
    return machine, facts


def _shown(about: Mapping[str, Any]) -> ShownCpu | None:
    if about["shown"] is None:
        return None
    cpu, sites, vulnerabilities, features = about["shown"]
    if not all(is_word(value) for value in (*sites, *features)):
        raise ValueError("not all values are words")
    return ShownCpu(from_text(cpu), tuple(sites), dict(vulnerabilities), tuple(features))


def checked_cells(about: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the offsets of words in Unicorn's CPU state, from the header `about` of a snapshot.

    Unicorn's API does not provide these words; see find_cells().
    Raises: KeyError, TypeError, ValueError (the offsets are missing or invalid).
    """
    cells = tuple(about["cells"])
    if len(cells) < 2 or not all(is_word(cell) and cell < STATE_SIZE for cell in cells):
        raise ValueError("cells: outside of the CPU state")
    return cells


def _header(file: int) -> dict[str, Any] | None:
    # Linux: readahead caches folios of up to 2 MiB; since 6.18 a touch maps a whole folio.
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    start = os.pread(file, HEADER, 0)
    if not start.startswith(_MAGIC) or len(start) < len(_MAGIC) + 8:
        return None
    size, checksum = struct.unpack_from("<II", start, len(_MAGIC))
    text = start[len(_MAGIC) + 8 :][:size]
    if len(text) != size or zlib.crc32(text) != checksum:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _checksum(file: int, start: int, size: int) -> int:
    """Return the CRC-32 of `size` bytes of a file from the offset `start` on, with blocks of zeros left out.

    `file`: descriptor of the file. The bytes are read through the descriptor, because reading a hole through
    a mapping would allocate memory for the hole.
    """
    zeros = bytes(_PIECE)
    checksum = 0
    at = start
    while at < start + size:
        try:
            # A hole may begin inside a piece.
            at = max(at, os.lseek(file, at, os.SEEK_DATA) & -_PIECE)
        except OSError:
            break
        # A piece may extend beyond the end.
        piece = os.pread(file, max(min(_PIECE, start + size - at), 0), at)
        if piece != zeros[: len(piece)]:
            checksum = zlib.crc32(piece, checksum)
        at += _PIECE
    return checksum


def cached() -> list[CachedKernel]:
    """Return all snapshots, the most recently used first."""
    found = []
    for path in _snapshots():
        with suppress(OSError), open_regular(path) as file:
            about = (_header(file.fileno()) if is_own(file.fileno()) else None) or {}
            status = os.fstat(file.fileno())
            used = max(status.st_mtime, last_read(path.parent, file.fileno()))
            facts = dict.fromkeys(("release", "architecture"))
            with suppress(TypeError, ValueError):
                facts |= about.get("facts", {})
            found.append(
                CachedKernel(
                    path,
                    _as(str, facts["release"]),
                    _as(str, facts["architecture"]),
                    _as(str, about.get("source")),
                    status.st_blocks * 512,
                    status.st_mtime,
                    used,
                    _as(float, about.get("boot_seconds")),
                    _kept(about, is_tables=path.suffix == _TABLES),
                )
            )
    return sorted(found, key=lambda kernel: -kernel.used)


def _kept(about: Mapping[str, Any], *, is_tables: bool) -> str:
    """Describe the content of a snapshot for CachedKernel.kept; `about` is the snapshot's header.

    The text is "" if the header is missing. `is_tables`: the snapshot has only a kernel's tables, without RAM
    and CPU state.
    """
    if not about:
        return ""
    if is_tables:
        return "tables"
    if "pc" not in about:
        return "dump"
    words = ["boot"]
    with suppress(LookupError, TypeError, ValueError):
        shown = _shown(about)
        words += [] if shown is None else [shown.cpu.model_name]
    seed = _as(int, about.get("seed"))
    words += [] if seed in (None, DEFAULT_SEED) else [f"seed {seed}"]
    return ", ".join(words)


def _as(kind: type[T], value: object) -> T | None:
    """Return `value`, an item of a snapshot's header, if it is an instance of `kind`; otherwise None."""
    return value if isinstance(value, kind) else None


def clear() -> int:
    """Remove all snapshots, the digest cache's notes, and the files of interrupted boots.

    Return the number of removed snapshots and files of interrupted boots.
    Raises: OSError (a file cannot be removed).
    """
    removed = 0
    for note in (*notes(directory()), *directory().glob(f"{MAKING}*")):
        note.unlink(missing_ok=True)
    for path in (*_snapshots(), *directory().glob(f"{_MAKING}*")):
        path.unlink(missing_ok=True)
        removed += 1
    return removed


def _prune(newest: Path) -> None:
    total = 0
    for kernel in cached():
        total += kernel.size
        if total > LIMIT and kernel.path != newest:
            with suppress(OSError):
                kernel.path.unlink()
