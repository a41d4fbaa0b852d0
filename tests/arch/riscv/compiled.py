"""C functions that tests probe. The cross compiler builds them during the test."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile

from emulated_kernel.arch.analysis.function import Function

COMPILER = "riscv64-linux-gnu-gcc"
BASE = 0x10_0000

SOURCE = r"""
typedef unsigned long u64;
typedef unsigned char u8;
#define noinline __attribute__((noinline, noipa))

u64 cells[64];

noinline u64 gcd(u64 a, u64 b)
{
	while (b) {
		u64 rest = a % b;
		a = b;
		b = rest;
	}
	return a;
}
noinline u64 mix(u64 a, u64 b, u64 c, u64 d, u64 e, u64 f, u64 g, u64 h)
{
	return (a ^ b << 3) + (c - d * 5) + (e | f) * (g & ~h);
}
noinline u64 passed_on(u64 a, u64 b, u64 c, u64 d, u64 e, u64 f, u64 g, u64 h)
{
	return mix(a + 1, b, c, d, e, f, g, h);
}
noinline u64 hash(const u8 *data, u64 size)
{
	u64 value = 0xcbf29ce484222325UL;
	for (u64 at = 0; at < size; at++)
		value = (value ^ data[at]) * 0x100000001b3UL;
	return value;
}
noinline u64 sort(u64 *data, u64 size)
{
	u64 moves = 0;
	for (u64 at = 1; at < size; at++) {
		u64 value = data[at], to = at;
		for (; to && data[to - 1] > value; to--, moves++)
			data[to] = data[to - 1];
		data[to] = value;
	}
	return moves;
}
noinline u64 tree(u64 depth, u64 seed)
{
	if (!depth)
		return seed & 0xff;
	return tree(depth - 1, seed * 3 + 1) ^ tree(depth - 1, seed >> 1) + depth;
}
noinline u64 wide(u64 a, u64 b)
{
	u64 v[12];
	for (int n = 0; n < 12; n++)
		v[n] = gcd(a + n, b ^ n) + (n > 3 ? v[n - 4] : a);
	return hash((const u8 *)v, sizeof v) ^ v[7] ^ v[11];
}
noinline u64 choose(u64 kind, u64 a, u64 b)
{
	if (kind == 0)
		return a + b;
	if (kind == 1)
		return a > b ? a - b : b - a;
	if (kind < 5)
		return passed_on(a, b, kind, a, b, kind, a, b);
	return (int)(a * b) / (int)(kind | 1);
}
noinline u64 all(u64 a, u64 b)
{
	for (int n = 0; n < 16; n++)
		cells[n] = mix(a, b, n, a >> n, b >> n, a * n, b * n, n << 5);
	u64 moves = sort(cells, 16);
	return wide(a, b) + tree(4, a) + moves + choose(a % 7, a, b) + choose(2, b, a) + hash((u8 *)cells, 128);
}
"""


@dataclass(frozen=True)
class Program:
    """A program that is linked at BASE, with the data after the text."""

    image: bytes
    functions: dict[str, Function]
    cells: int


def build(directory: Path, *, compressed: bool, optimize: str) -> Program:
    """Compile and link the program. Raises: subprocess.CalledProcessError.

    `compressed`: with 16-bit instructions. `optimize`: option of gcc, such as -O2.
    """
    source, elf = directory / "functions.c", directory / "functions"
    source.write_text(SOURCE)
    march = f"rv64ima{'c' if compressed else ''}_zicsr"
    flags = ["-march=" + march, "-mabi=lp64", "-mcmodel=medany", "-mno-relax", optimize, "-ffreestanding"]
    link = ["-nostdlib", "-static", f"-Wl,-Ttext={BASE:#x},-Tdata={BASE + 0x8000:#x},-e,all,-N", "-fno-pic"]
    link += ["-Wl,-Tbss=" + hex(BASE + 0x9000), "-Wl,--build-id=none", "-fno-asynchronous-unwind-tables"]
    subprocess.run([COMPILER, *flags, *link, "-o", elf, source], check=True, capture_output=True, text=True)
    return _read(elf)


def have_compiler() -> bool:
    return shutil.which(COMPILER) is not None


def _read(path: Path) -> Program:
    with path.open("rb") as stream:
        elf: Any = ELFFile(stream)
        image = bytearray(0xA000)
        for section in elf.iter_sections():
            if section["sh_flags"] & 2 and section["sh_type"] == "SHT_PROGBITS":
                at = section["sh_addr"] - BASE
                image[at : at + section["sh_size"]] = section.data()
        table = {symbol.name: symbol for symbol in elf.get_section_by_name(".symtab").iter_symbols()}
    functions = {}
    for name, symbol in table.items():
        if symbol["st_info"]["type"] == "STT_FUNC":
            at, size = symbol["st_value"], symbol["st_size"]
            functions[name] = Function(name, at, size, bytes(image[at - BASE : at - BASE + size]))
    return Program(bytes(image), functions, table["cells"]["st_value"])
