"""The guest's library, compared with Python's: hashes, patterns, numbers, formats, trees, bits."""

from __future__ import annotations

import fnmatch
import hashlib
import math
import random
import struct
import zlib

import pytest

from .guest import USER_BUFFER, Guest

DATA = USER_BUFFER
OUT = USER_BUFFER + 0x10000


class Library:
    """Calls of guest functions with C strings and results of 64 bits."""

    def __init__(self, guest: Guest, task: int) -> None:
        self.guest = guest
        self.task = task

    def call(self, name: str, *args: int) -> int:
        result = self.guest.host_call(self.task, name, *args)
        assert result is not None, self.guest.log()
        return result & (1 << 64) - 1

    def text(self, *strings: str) -> list[int]:
        addresses, where = [], DATA
        for string in strings:
            self.guest.write(where, string.encode() + b"\0")
            addresses.append(where)
            where += 0x400
        return addresses

    def format(self, form: str, *args: int, size: int = 200) -> tuple[str, int]:
        (where,) = self.text(form)
        count = self.call("snprintf", OUT, size, where, *args)
        return self.guest.read(OUT, size).split(b"\0")[0].decode(), count


@pytest.fixture
def lib(guest: Guest, task: int) -> Library:
    return Library(guest, task)


def test_checksums(lib: Library) -> None:
    data = random.Random(1).randbytes(777)
    lib.guest.write(DATA, data)
    assert lib.call("crc32_le", 0xFFFFFFFF, DATA, 777) & 0xFFFFFFFF == zlib.crc32(data) ^ 0xFFFFFFFF
    for size in (0, 55, 56, 64, 777):
        lib.call("sha256", DATA, size, OUT)
        assert lib.guest.read(OUT, 32) == hashlib.sha256(data[:size]).digest()


def test_arithmetic(lib: Library) -> None:
    rng = random.Random(2)
    for bits in (1, 4, 17, 32, 48, 63):
        a, b = rng.getrandbits(bits), rng.getrandbits(bits)
        assert lib.call("int_sqrt", a) == math.isqrt(a)
        assert lib.call("gcd", a, b) == math.gcd(a, b)
    assert lib.call("lcm", 12, 18) == 36


def test_patterns(lib: Library) -> None:
    patterns = ["*", "a*", "*a", "a?c", "[a-c]x", "[!a-c]x", "*.[ch]", "a*b*c", "", "?", "vfs_*", "*_re[ae]d"]
    for pattern in patterns:
        for text in ["", "a", "abc", "bx", "dx", "foo.c", "foo.h", "aXbXc", "vfs_read", "aab"]:
            matches = lib.call("glob_match", *lib.text(pattern, text)) & 1
            assert matches == fnmatch.fnmatchcase(text, pattern), (pattern, text)


@pytest.mark.parametrize(
    ("form", "args"),
    [
        ("%d", (-5,)),
        ("%5d|", (42,)),
        ("%-5d|", (42,)),
        ("%05d", (-42,)),
        ("%+d", (3,)),
        ("% d", (3,)),
        ("%x %X", (0xBEEF, 0xBEEF)),
        ("%#x", (255,)),
        ("%#010x", (255,)),
        ("%.3d", (7,)),
        ("%8.3d|", (7,)),
        ("%-8.3d|", (7,)),
        ("%c%c", (65, 66)),
        ("%%", ()),
    ],
)
def test_formats_that_python_has_too(lib: Library, form: str, args: tuple[int, ...]) -> None:
    expected = form % tuple(chr(a) if "c" in form else a for a in args)
    assert lib.format(form, *args) == (expected, len(expected))


def test_formats_of_its_own(lib: Library) -> None:
    vfs_read = lib.guest.symbol("vfs_read")
    size = lib.guest.image.kallsyms.by_name("vfs_read")[0].size
    assert lib.format("%pS", vfs_read + 1)[0] == f"vfs_read+0x1/{size:#x}"
    assert lib.format("%ps", vfs_read + 1)[0] == "vfs_read"
    assert lib.format("%pB", vfs_read)[0] != "vfs_read"
    assert lib.format("%px", vfs_read)[0] == f"{vfs_read:016x}"
    assert lib.format("%lu %llx %hhu", 1 << 40, (1 << 64) - 1, 257)[0] == f"{1 << 40} {'f' * 16} 1"
    assert lib.format("%s|%s", 0, 5)[0] == "(null)|(efault)"
    assert (
        lib.format("%.*s|%-4s|", 2, lib.guest.symbol("linux_banner"), lib.text("", "ab")[1])[0][:3] == "Li|"
    )
    assert lib.format("%o", 8) == ("10", 2)
    assert lib.format("%020d", 7, size=8) == ("0000000", 20)


def test_numbers_in_strings(lib: Library) -> None:
    def number(name: str, text: str, base: int) -> tuple[int, int]:
        lib.guest.write(OUT, bytes(8))
        error = lib.call(name, lib.text(text)[0], base, OUT)
        return struct.unpack("<i", struct.pack("<I", error & 0xFFFFFFFF))[0], lib.guest.u64(OUT)

    assert number("kstrtoull", "0x1f\n", 0) == (0, 31)
    assert number("kstrtoull", "017", 0) == (0, 15)
    assert number("kstrtoull", "18446744073709551615", 10) == (0, (1 << 64) - 1)
    assert number("kstrtoull", "18446744073709551616", 10) == (-34, 0)
    assert number("kstrtoull", "12x", 10) == (-22, 0)
    assert number("kstrtoull", "", 10) == (-22, 0)
    assert number("kstrtoll", "-9", 10) == (0, (1 << 64) - 9)
    assert number("kstrtoint", "2147483648", 10) == (-34, 0)
    assert lib.call("simple_strtoul", lib.text("77up")[0], 0, 8) == 63


def test_strings(lib: Library) -> None:
    a, b = lib.text("haystack", "st")
    assert lib.call("strstr", a, b) == a + 3
    assert lib.call("strchr", a, ord("k")) == a + 7
    assert lib.call("strrchr", a, ord("a")) == a + 5
    assert lib.call("strchr", a, ord("z")) == 0
    assert lib.call("strcspn", a, b) == 3
    assert lib.call("strlen", a) == 8
    lib.call("memmove", a + 2, a, 6)
    assert lib.guest.read(a, 8) == b"hahaysta"
    lib.call("memset", OUT, 0x55, 21)
    assert lib.guest.read(OUT, 22) == b"\x55" * 21 + b"\0"


def test_bits(lib: Library) -> None:
    words = [random.Random(3).getrandbits(64), 0, 1 << 63]
    lib.guest.write(DATA, struct.pack("<3Q", *words))
    bits = [i for i in range(192) if words[i // 64] >> i % 64 & 1]
    for start in (0, 1, 63, 64, 130, 191):
        assert lib.call("_find_next_bit", DATA, 192, start) == next(b for b in bits if b >= start)
    assert lib.call("_find_last_bit", DATA, 192) == 191
    assert lib.call("_find_last_bit", DATA, 191) == [b for b in bits if b < 191][-1]
    assert lib.call("__bitmap_weight", DATA, 190) & 0xFFFFFFFF == len([b for b in bits if b < 190])


def test_sorting_by_a_guest_function(lib: Library) -> None:
    rng = random.Random(5)
    values = [rng.randrange(-1000, 1000) for _ in range(121)]
    lib.guest.write(DATA, struct.pack("<121i", *values))
    lib.call("sort", DATA, len(values), 4, lib.guest.symbol("cmpint"), 0)
    assert list(struct.unpack("<121i", lib.guest.read(DATA, 4 * 121))) == sorted(values)


def test_the_workloads_check_themselves(lib: Library) -> None:
    assert lib.call("test_sort", 500, 1) == 0
    assert lib.call("test_list_sort", 500, 1) == 0


class Tree:
    """A red-black tree in guest memory, in which Python searches and which the guest balances."""

    def __init__(self, lib: Library) -> None:
        self.lib = lib
        self.root = OUT
        lib.guest.write(OUT, bytes(8))

    def node(self, key: int) -> int:
        return DATA + 24 * key

    def word(self, address: int) -> int:
        return self.lib.guest.u64(address)

    def insert(self, key: int) -> None:
        parent, link = 0, self.root
        while self.word(link):
            parent = self.word(link)
            link = parent + (16 if self.node(key) < parent else 8)
        self.lib.guest.write(self.node(key), struct.pack("<QQQ", parent, 0, 0))
        self.lib.guest.write(link, struct.pack("<Q", self.node(key)))
        self.lib.call("rb_insert_color", self.node(key), self.root)

    def keys(self, step: str = "rb_next", first: str = "rb_first") -> list[int]:
        keys, node = [], self.lib.call(first, self.root)
        while node:
            keys.append((node - DATA) // 24)
            node = self.lib.call(step, node)
        return keys

    def black_height(self, node: int) -> int:
        """Return the number of black nodes on each path below `node`, and assert the rules of a red-black
        tree.
        """
        if not node:
            return 1
        color = self.word(node) & 1
        right, left = self.word(node + 8), self.word(node + 16)
        for child in filter(None, (left, right)):
            assert self.word(child) & ~3 == node
            assert color or self.word(child) & 1
        height = self.black_height(left)
        assert height == self.black_height(right)
        return height + color


def test_red_black_trees(lib: Library) -> None:
    tree, rng, keys = Tree(lib), random.Random(6), list(range(40))
    rng.shuffle(keys)
    for key in keys:
        tree.insert(key)
    tree.black_height(tree.word(tree.root))
    assert tree.keys() == sorted(keys)
    assert tree.keys("rb_prev", "rb_last") == sorted(keys, reverse=True)
    rng.shuffle(keys)
    while keys:
        lib.call("rb_erase", tree.node(keys.pop()), tree.root)
        tree.black_height(tree.word(tree.root))
        if len(keys) % 10 == 0:
            assert tree.keys() == sorted(keys)


def test_list_sort_is_stable(lib: Library) -> None:
    """list_sort() keeps the order of equal nodes. Nodes are compared by their third word."""
    rng = random.Random(7)
    values = [rng.randrange(5) for _ in range(37)]
    nodes = [DATA + 24 * (n + 1) for n in range(len(values))]
    ring = [DATA, *nodes, DATA]
    lib.guest.write(DATA, struct.pack("<QQQ", nodes[0], nodes[-1], 0))
    for n, value in enumerate(values):
        lib.guest.write(nodes[n], struct.pack("<QQQ", ring[n + 2], ring[n], value))
    lib.call("list_sort", 0, DATA, lib.guest.symbol("cmp_element"))
    order, node = [], lib.guest.u64(DATA)
    while node != DATA:
        assert lib.guest.u64(lib.guest.u64(node) + 8) == node
        order.append((node - DATA) // 24 - 1)
        node = lib.guest.u64(node)
    assert order == sorted(range(len(values)), key=lambda n: values[n])
