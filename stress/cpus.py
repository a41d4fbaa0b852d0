"""Compare --cpu with real machines and with QEMU: python -m stress.cpus [--image DEB] [--qemu].

Without --qemu, boot the kernel on the CPU of each archive in tests/guests/linux/cpus, and compare its
vulnerabilities with the archive's. With --qemu, boot the kernel in QEMU on some of its CPU models, and
compare the whole text, except two constants that depend on the size of the memory.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from emulated_kernel.guests.linux.boot.command_lines import X86_COMMAND_LINE
from emulated_kernel.guests.linux.boot_cache import kernel_as_booted
from emulated_kernel.guests.linux.cpu.cpu_archive import production_cpu
from emulated_kernel.guests.linux.cpu.cpuid_bits import AX, BX, CX, DX
from emulated_kernel.guests.linux.cpu.production_cpu import ProductionCpu
from emulated_kernel.guests.linux.vmcore.vmcore_guest import kernel_in_core
from emulated_kernel.image.linux.cpu_features import capability_words, feature_numbers
from emulated_kernel.image.linux.linux_kernel import LinuxKernel, open_kernel
from emulated_kernel.util.config import DEFAULT_SEED
from tests.guests.linux.qemu_dumps import Kind, dump, vmlinuz
from tests.image.linux.debian import package

ARCHIVES = Path(__file__).parents[1] / "tests" / "guests" / "linux" / "cpus"
QEMU_CPUS = ("qemu64", "EPYC")
MEMORY = 256
"""Memory of QEMU's machine in MiB."""
_VENDOR_SIZE = 16
_NAME_SIZE = 64
_WORDS = {
    0: (1, 0, DX),
    1: (0x80000001, 0, DX),
    4: (1, 0, CX),
    6: (0x80000001, 0, CX),
    9: (7, 0, BX),
    10: (0xD, 1, AX),
    13: (0x80000008, 0, BX),
    16: (7, 0, CX),
    18: (7, 0, DX),
}
"""Number of a word of Linux's CPU features -> the CPUID leaf, subleaf and register that fill it."""


def unseen(_done: int, _total: int) -> None:
    """Ignore a report of the boot's progress: `_done` of `_total` units of work."""


def cpu_of_dump(name: str, dumped: LinuxKernel, kernel: LinuxKernel) -> ProductionCpu:
    """Return the CPU on which the kernel of a dump ran, according to its variable boot_cpu_data.

    `name`: name of the returned CPU. `dumped`: the kernel in the dump. `kernel`: the same kernel from its
    file, which has the BTF and the names of the CPU features.
    """
    start = dumped.required("boot_cpu_data")
    btf = kernel.btf

    def member(path: str, size: int) -> bytes:
        return dumped.read(start + btf.offset(f"cpuinfo_x86.{path}"), size)

    count = capability_words(kernel)
    words = [
        int.from_bytes(member("x86_capability", 4 * count)[4 * at : 4 * at + 4], "little")
        for at in range(count)
    ]
    leaves: dict[tuple[int, int], list[int]] = {}
    for word, (leaf, subleaf, register) in _WORDS.items():
        leaves.setdefault((leaf, subleaf), [0, 0, 0, 0])[register] = words[word]
    flags = [
        flag for flag, number in feature_numbers(kernel).items() if words[number // 32] >> number % 32 & 1
    ]
    return ProductionCpu(
        name,
        member("x86_vendor_id", _VENDOR_SIZE).partition(b"\0")[0].decode(),
        member("x86", 1)[0],
        member("x86_model", 1)[0],
        member("x86_stepping", 1)[0],
        model_name=member("x86_model_id", _NAME_SIZE).partition(b"\0")[0].decode().strip(),
        microcode=int.from_bytes(member("microcode", 4), "little"),
        flags=tuple(flags),
        cpuid=tuple((leaf, subleaf, *values) for (leaf, subleaf), values in leaves.items()),  # type: ignore[misc]
    )


def different_ranges(first: bytes | bytearray, second: bytes | bytearray) -> Iterator[range]:
    """Yield the ranges of offsets at which two texts of the same size differ.

    Ranges that are at most 8 bytes apart are joined.
    """
    start = end = -1
    for at in (at for at in range(len(first)) if first[at] != second[at]):
        if start >= 0 and at > end + 8:
            yield range(start, end + 1)
            start = at
        start = at if start < 0 else start
        end = at
    if start >= 0:
        yield range(start, end + 1)


def memory_constants(kernel: LinuxKernel) -> Iterator[range]:
    """Yield the addresses of the bytes of text that depend on the size of the memory, and not on the CPU.

    Since Linux 6.11, boot writes the address and the size of the hash table of dentries into instructions.
    Mirrors: arch/x86/include/asm/runtime-const.h (v6.12).
    """
    lookup = kernel.kallsyms.lookup_name
    for constant, size in (("ptr_dentry_hashtable", 8), ("shift_d_hash_shift", 1)):
        first = lookup(f"__start_runtime_{constant}")
        last = lookup(f"__stop_runtime_{constant}")
        for entry in range(first, last, 4) if first is not None and last is not None else ():
            at = entry + int.from_bytes(kernel.read(entry, 4), "little", signed=True)
            yield range(at, at + size)


def compare_with_qemu(image: Path, model: str, directory: Path) -> int:
    """Boot a kernel in QEMU on a CPU model, and compare its text; return the number of bytes that differ."""
    kernel = open_kernel(str(image))
    line = f"{X86_COMMAND_LINE.replace('quiet', 'loglevel=7')} noreplace-smp"
    kind = Kind(model, model, 1, line, MEMORY)
    own = directory / model
    own.mkdir()
    core = dump(kind, vmlinuz(image, own / "vmlinuz"), own)
    dumped = kernel_in_core(str(core))
    cpu = cpu_of_dump(model, dumped, kernel)
    booted, _ = kernel_as_booted(str(image), DEFAULT_SEED, cpu, unseen)
    start, end = kernel.text
    there, here, linked = (bytearray(each.read(start, end - start)) for each in (dumped, booted, kernel))
    for part in memory_constants(kernel):
        there[part.start - start : part.stop - start] = linked[part.start - start : part.stop - start]
        here[part.start - start : part.stop - start] = linked[part.start - start : part.stop - start]
    patched = sum(a != b for a, b in zip(there, linked, strict=True))
    ranges = list(different_ranges(there, here))
    differing = sum(a != b for a, b in zip(there, here, strict=True))
    print(
        f"{model}: {cpu.model_name}: {end - start:,} bytes, {patched:,} patched, {differing:,} differ",
        flush=True,
    )
    for part in ranges:
        where = kernel.kallsyms.lookup(start + part.start)
        name = "?" if where is None else f"{where.symbol.name}+{where.offset:#x}"
        span = slice(part.start, part.stop)
        texts = there[span].hex(), here[span].hex(), linked[span].hex()
        print(f"  {name}: QEMU {texts[0]}, here {texts[1]}, linked {texts[2]}")
    return differing


def compare_with_archives(image: Path) -> int:
    """Boot a kernel on the CPU of each archive; return the number of archives with other vulnerabilities."""
    failed = 0
    for path in sorted(ARCHIVES.glob("*.cpu")):
        _, report = kernel_as_booted(str(image), DEFAULT_SEED, production_cpu(str(path)), unseen)
        failed += bool(report.differences)
        print(f"{path.stem}: {'differs' if report.differences else 'the same'}", flush=True)
        for remark in report.remarks:
            print(f"  {remark}")
    return failed


def main() -> int:
    """Run the comparison; return 0 if the texts agree (--qemu), or if at least eight archives agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--image", type=Path, help="linux-image-*.deb (default: Debian's current one)")
    parser.add_argument("--qemu", action="store_true", help="compare with QEMU")
    parser.add_argument("--model", action="append", help=f"model of QEMU (default: {', '.join(QEMU_CPUS)})")
    options = parser.parse_args()
    suite = "" if options.qemu else "trixie"
    image = options.image or package("linux-image-cloud-amd64", suite)
    with tempfile.TemporaryDirectory(prefix="kprobefs-cpus-") as made:
        # Dozens of booted kernels would push those of other users out of the cache.
        os.environ["XDG_CACHE_HOME"] = made
        if options.qemu:
            models = options.model or QEMU_CPUS
            differing = [compare_with_qemu(image, model, Path(made)) for model in models]
            return int(any(differing))
        archives = len(list(ARCHIVES.glob("*.cpu")))
        return int(archives - compare_with_archives(image) < 8)


if __name__ == "__main__":
    sys.exit(main())
