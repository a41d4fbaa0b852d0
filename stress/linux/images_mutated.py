"""Read thousands of damaged kernel files and snapshots: python -m stress.linux.images_mutated [IMAGE].

Headers, sizes, counts and offsets of small kernels in each format are damaged. Files are cut at the boundary
of each structure, and payloads with damaged tables are packed. With IMAGE, the tables of that kernel are
damaged instead. Each file is read in the same way as by a mount, and by the commands that plan probes. It
either is a kernel or causes one line of error output and status 2, in bounded time and memory. No files
remain.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import random
import resource
import struct
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from emulated_kernel.guests.linux.boot import snapshot
from emulated_kernel.guests.linux.kernel_offsets import kernel_offsets
from emulated_kernel.image.linux.cached_tables import CachedKernelTables, cached_parts
from emulated_kernel.image.linux.linux_kernel import open_kernel
from emulated_kernel.image.linux.open_image import open_elf
from emulated_kernel.util.errors import KernelError
from kprobefs.cli.main import main as kprobefs
from tests.guests.linux.test_snapshot import header, rewritten, save
from tests.image.linux import made

SECONDS = 30.0
"""Maximum CPU time of a case in seconds."""
MEMORY = 1 << 20
"""Maximum growth of the process's resident memory in KiB."""
EDGES = (
    0,
    1,
    2,
    7,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    1 << 31,
    (1 << 32) - 1,
    1 << 47,
    1 << 63,
    (1 << 64) - 1,
)
_XZ_BLOCK = 12
"""Offset of the first block in an .xz file."""
PLANS = (
    ("explain", "func_0", "func_1+2", "--strategy", "extended", "--function"),
    ("explain", "func_2", "nosuch", "--json"),
    ("check", "--strategy", "extended"),
    ("coverage", "--jobs", "1"),
    ("coverage", "--jobs", "1", "--strategy", "extended", "--json"),
)
"""Commands that plan probes, with their arguments; they are run on damaged files that are kernels."""
DEFINITIONS = "p:one func_0 pid=$arg1\nr:two func_1 $retval\np:three func_2+1 +0(%di):u64\n"
SHOWN_EVERY = 20
"""Only one of this many refused files is also passed to the command line, which takes longer."""


class Mutated:
    """Reads damaged files, and counts the outcomes."""

    def __init__(self, seed: int, directory: Path, planned_every: int = 1) -> None:
        """Use a random seed, and a directory for files.

        Commands that plan probes are run on one of `planned_every` kernels.
        """
        self.dice = random.Random(seed)
        self.directory = directory
        self.planned_every = planned_every
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []
        self.slowest = 0.0
        self._before = self._peak()

    def check(self, name: str, data: bytes) -> None:
        """Read a kernel file with these bytes, and count the outcome."""
        file = self.directory / "image"
        file.write_bytes(data)
        started = time.process_time()
        try:
            outcome = self._read(file)
        except Exception as error:
            outcome = "failed"
            self.failures.append(f"{name}: {type(error).__name__}: {error}")
        self.outcomes[outcome] += 1
        if outcome in ("a kernel", "no kernel to boot") and not self.outcomes[outcome] % self.planned_every:
            self._plan(name, file)
        if outcome == "refused" and self.outcomes[outcome] % SHOWN_EVERY == 1:
            self._show(name, file)
        self._bounded(name, time.process_time() - started)

    def _read(self, file: Path) -> str:
        """Read a file in the same way as a mount, except for the boot, and return the outcome."""
        try:
            kernel = open_kernel(str(file))
            parts = {part: memoryview(data) for part, data in cached_parts(kernel).items()}
            assert CachedKernelTables(parts).kallsyms.symbols
        except (KernelError, OSError) as error:
            return self._refused(error)
        try:
            kernel_offsets(kernel)
        except KernelError as error:
            self._refused(error)
            return "no kernel to boot"
        return "a kernel"

    @staticmethod
    def _refused(error: OSError) -> str:
        said = error.strerror or ""
        assert said, "no reason"
        assert "\n" not in said, "more than a line"
        return "refused"

    def _show(self, name: str, file: Path) -> None:
        """Pass a refused file to `kprobefs mount`, and check its output and status."""
        target = self.directory / "mnt"
        target.mkdir()
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = kprobefs(["mount", "--kprobes", "kernel", "--image", str(file), str(target)])
        lines = err.getvalue().splitlines()
        left = [path.name for path in self.directory.iterdir() if path != file]
        target.rmdir()
        if (status, out.getvalue(), len(lines), left) != (2, "", 1, ["mnt"]):
            self.failures.append(f"{name}: status {status}, {lines}, left {left}")

    def _plan(self, name: str, file: Path) -> None:
        """Plan probes for a damaged kernel, and check that each command answers or prints one line."""
        definitions = self.directory / "definitions"
        definitions.write_text(DEFINITIONS)
        for command, *more in PLANS:
            words = [command, "--image", str(file), *more]
            if command == "check":
                words.append(str(definitions))
            out, err = io.StringIO(), io.StringIO()
            try:
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                    status = kprobefs(words)
            except Exception as error:
                self.failures.append(f"{name}: {command}: {type(error).__name__}: {error}")
                continue
            lines = len(err.getvalue().splitlines())
            self.outcomes[f"{command}: {status}"] += 1
            if (status, lines) not in ((0, 0), (1, 0), (1, 1), (2, 1)):
                self.failures.append(f"{name}: {command}: status {status}, {err.getvalue()}")
        definitions.unlink()
        for kept in Path(os.environ["XDG_CACHE_HOME"]).rglob("*.tables"):
            kept.unlink()

    def check_snapshot(self, name: str, whole: bytes) -> None:
        """Load a snapshot in the same way as a mount, and check that it is removed if it is damaged."""
        file = snapshot.directory() / "mutated.booted"
        file.write_bytes(whole)
        started = time.process_time()
        try:
            found = snapshot.load(file, with_parts=True)
        except Exception as error:
            self.outcomes["failed"] += 1
            self.failures.append(f"{name}: {type(error).__name__}: {error}")
            return
        self.outcomes["no snapshot" if found is None else "a snapshot"] += 1
        if found is None and file.exists():
            self.failures.append(f"{name}: the damaged snapshot is not removed")
        if found is not None:
            found.machine.close()
            file.unlink()
        self._bounded(name, time.process_time() - started)

    def _bounded(self, name: str, seconds: float) -> None:
        self.slowest = max(self.slowest, seconds)
        if seconds > SECONDS:
            self.failures.append(f"{name}: {seconds:.0f} s")
        if self.memory > MEMORY:
            self.failures.append(f"{name}: {self.memory >> 10} MiB of memory")

    @property
    def memory(self) -> int:
        """Growth of the process's maximum resident memory since the start, in KiB."""
        return self._peak() - self._before

    @staticmethod
    def _peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def damaged(dice: random.Random, data: bytes, area: range) -> bytes:
    """Return the data with damage in an area: changed fields, flipped bits, moved pieces or a missing end."""
    whole = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        size = dice.choice((1, 2, 4, 8))
        at = dice.randrange(area.start, max(area.stop - size, area.start + 1))
        value = dice.choice((*EDGES, dice.getrandbits(64), len(data) + dice.randrange(-9, 9)))
        kind = dice.randrange(8)
        if kind < 4:
            whole[at : at + size] = (value & (1 << 8 * size) - 1).to_bytes(size, "little")
        elif kind < 6:
            whole[at] ^= 1 << dice.randrange(8)
        elif kind < 7:
            other = dice.randrange(area.start, area.stop)
            whole[at : at + 16] = whole[other : other + 16]
        else:
            del whole[dice.randrange(area.start, area.stop) :]
            break
    return bytes(whole)


# Small kernels in each format


def small_kernel() -> made.Kernel:
    """Return a small kernel with symbols, types and tables."""
    built, btf = made.Kernel(), made.Btf()
    number = btf.add(1, "int", 4, struct.pack("<I", 32))
    pointer = btf.add(2, "", number)
    structure = btf.structure(
        "task_struct", 64, ("pid", number, 0), ("stack", pointer, 8), ("comm", number, 16)
    )
    btf.prototype(number, ("task", structure), ("size", number))
    btf.enum("pid_type", PIDTYPE_PID=0)
    for index in range(300):
        built.function(f"func_{index}", b"\x31\xc0\xc3")
    text = made.TEXT + 16
    here = built.next_data()
    built.table("__ex_table", struct.pack("<iii", text - here, text + 16 - here - 4, 1))
    built.table("mcount_loc", struct.pack("<2Q", text, text + 16))
    built.table("__jump_table", struct.pack("<iiq", 16, 32, 64))
    built.table("__bug_table", struct.pack("<iiHH", 16, 32, 7, 1))
    built.table("kprobe_blacklist", struct.pack("<Q", text))
    built.table("ftrace_events", struct.pack("<2Q", made.DATA, made.DATA + 8))
    built.table("BTF", btf.data())
    return built


def formats() -> Iterator[tuple[str, Callable[[bytes], bytes], int]]:
    """Yield the name of each file format, the function that packs a vmlinux, and the size of the headers."""
    yield "vmlinux", bytes, 64 + 3 * 56
    for packer in made.PACKERS:
        yield f"vmlinuz by {packer}", lambda data, by=packer: made.vmlinuz(data, by), 0xA00 + 64  # type: ignore[misc]
    for by in ("gzip", "xz", "zstd", None):
        yield (
            f"package by {by}",
            lambda data, by=by: made.deb({"./boot/vmlinuz-6.1.0-made": made.vmlinuz(data)}, by),  # type: ignore[misc]
            400 if by else 2500,
        )


def small_cases(mutated: Mutated, count: int) -> None:
    """Check files with damaged headers, files with damaged kernels, and files that are cut off.

    `count`: number of the damaged files of each kind and format.
    """
    dice, vmlinux = mutated.dice, small_kernel().elf()
    inside = range(len(vmlinux))
    for name, packed, headers in formats():
        whole = packed(vmlinux)
        for number in range(count):
            mutated.check(f"{name}, header {number}", damaged(dice, whole, range(min(headers, len(whole)))))
        for number in range(count):
            mutated.check(f"{name}, inside {number}", packed(damaged(dice, vmlinux, inside)))
        for end in (
            0,
            1,
            63,
            64,
            120,
            0x1F1,
            0x202,
            0x248,
            0x250,
            0xA00,
            0xA10,
            len(whole) // 2,
            len(whole) - 1,
        ):
            mutated.check(f"{name}, cut at {end:#x}", whole[:end])


def bombs(mutated: Mutated) -> None:
    """Check payloads with a huge output or decompression window: reading them must take bounded memory."""
    zeros = bytes(300 << 20)
    for by in made.PACKERS:
        payload = made.packed(zeros, by)
        for declared in (1 << 20, 256 << 20, (1 << 32) - 1):
            mutated.check(f"a bomb by {by}", made.around(payload + struct.pack("<I", declared)))
        if by in ("gzip", "xz", "zstd"):
            mutated.check(f"a package that is a bomb by {by}", made.deb({"./usr/zeros": zeros}, by))
    del zeros
    small = made.packed(b"\x7fELF" + bytes(4000), "xz")
    size = (small[_XZ_BLOCK] + 1) * 4
    block = bytearray(small[_XZ_BLOCK : _XZ_BLOCK + size - 4])
    block[block.index(b"\x21\x01") + 2] = 40
    xz = small[:_XZ_BLOCK] + block + struct.pack("<I", zlib.crc32(block)) + small[_XZ_BLOCK + size :]
    windows = {
        "xz's dictionary of 4 GiB": xz,
        "lzma's dictionary of 4 GiB": b"\x5d\0\0\xff\xff" + b"\xff" * 8 + bytes(100),
        "zstd's window of 2 TiB": b"\x28\xb5\x2f\xfd\0\xf8" + bytes(100),
        "zstd's content of 16 EiB": b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 8 + bytes(100),
    }
    for name, payload in windows.items():
        mutated.check(name, made.around(payload + struct.pack("<I", 4004)))


# Snapshots


def snapshots(mutated: Mutated, count: int) -> None:
    """Check damaged snapshots: with damaged headers, with wrong values but a right checksum, and cut off."""
    dice = mutated.dice
    snapshot.directory().mkdir(parents=True, exist_ok=True)
    whole = save(snapshot.directory() / "kernel.booted").read_bytes()
    (snapshot.directory() / "kernel.booted").unlink()
    start, about = header(whole)
    end = start + len(json.dumps(about))
    for number in range(count):
        mutated.check_snapshot(f"a snapshot's header {number}", damaged(dice, whole, range(end)))
    for number in range(count):
        other = json.loads(json.dumps(about))
        _change(dice, other)
        mutated.check_snapshot(f"a snapshot that says {other} ({number})"[:300], rewritten(whole, other))
    for at in (0, start, end, snapshot.HEADER, len(whole) - 1):
        mutated.check_snapshot(f"a snapshot cut at {at}", whole[:at])


def _change(dice: random.Random, about: dict[str, object]) -> None:
    """Change a random value in the header of a snapshot, except the registers of the CPU."""
    place: object = about
    while True:
        keys: list[object] = [*place] if isinstance(place, dict) else [*range(len(place))]  # type: ignore[arg-type]
        key = dice.choice([key for key in keys if key != "cpu"])
        inner = place[key]  # type: ignore[index]
        if not isinstance(inner, dict | list) or not inner or dice.random() < 0.2:
            break
        place = inner
    strange = (None, -1, 5.5, "", "x", [], {}, True, [[]], *EDGES)
    place[key] = dice.choice(strange)  # type: ignore[index]


# A distribution's kernel


def real_cases(mutated: Mutated, image: Path, count: int) -> None:
    """Check `count` copies of a distribution's kernel, each with damage in one of its tables.

    The rest of the file stays valid, so that reading continues as far as possible.
    """
    kernel = open_kernel(str(image))
    with open_elf(image) as file:
        vmlinux = file.read()
    load = kernel.vmlinux.segments
    dice = mutated.dice

    def offset(va: int) -> int:
        segment = next(each for each in load if each.va <= va < each.va + len(each.data))
        return vmlinux.index(bytes(segment.data[:4096])) + va - segment.va

    btf = kernel._btf_data()
    types = vmlinux.index(btf)
    names = offset(kernel.kallsyms.lookup_name("kallsyms_names") or kernel.text.start)
    tables = [
        kernel.between(f"__start_{name}", f"__stop_{name}") for name in ("ftrace_events", "syscalls_metadata")
    ]
    areas = [
        ("BTF's header", range(types, types + 24)),
        ("BTF's types", range(types + 24, types + 4096)),
        ("types", range(types, types + len(btf))),
        ("kallsyms", range(names, names + 4096)),
        ("headers", range(64 + 56 * 6)),
        *(
            ("tables", range(offset(area.start), offset(area.start) + area.end - area.start))
            for area in tables
            if area.end
        ),
    ]
    for number in range(count):
        name, area = areas[number % len(areas)]
        mutated.check(f"{image.name}, {name} {number}", damaged(dice, vmlinux, area))


def main(argv: list[str] | None = None) -> int:
    """Run the program; return 1 if there is a failure."""
    parser = argparse.ArgumentParser(prog="python -m stress.linux.images_mutated", description=__doc__)
    parser.add_argument(
        "image", nargs="?", type=Path, help="a distribution's kernel, whose tables are damaged"
    )
    parser.add_argument("--cases", type=int, default=100, help="number of cases of each kind")
    parser.add_argument("--real", type=int, default=60, help="number of cases of IMAGE")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    logging.disable()
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_CACHE_HOME"] = cache
        mutated = Mutated(options.seed, Path(directory))
        if options.image is None:
            small_cases(mutated, options.cases)
            snapshots(mutated, 5 * options.cases)
            bombs(mutated)
        else:
            real_cases(mutated, options.image, options.real)
        left = [str(path) for path in Path(cache).rglob("*") if path.is_file()]
    print(f"{mutated.outcomes.total()} files: {dict(mutated.outcomes)}; left in the cache: {len(left)}")
    print(f"slowest {mutated.slowest:.1f} s of CPU time, at most {mutated.memory >> 10} MiB of memory")
    for failure in mutated.failures[:40]:
        print(failure)
    return bool(mutated.failures or left)


if __name__ == "__main__":
    sys.exit(main())
