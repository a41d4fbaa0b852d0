"""Every pure function of the image, each with a generator of calls."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from random import Random

ARENA = 8192
"""Maximum size in bytes of a call's strings and buffers."""
WORDS = ["", "a", "b", "ab", "abc", "hello", "Hello", "kprobe", "kprobes/list", "0x1f", "x,y", "  pad ", "%"]
LETTERS = "aAbBc xX019_-,.*?[]/\\"


class Result(Enum):
    """The part of the result register that counts."""

    NOTHING = auto()
    BYTE = auto()
    """A number of 8 bits, or a Boolean."""
    SHORT = auto()
    INT = auto()
    WORD = auto()
    POINTER = auto()
    """NULL, or an address in the arena."""


@dataclass(frozen=True)
class Ref:
    """An address in the arena."""

    offset: int


@dataclass(frozen=True)
class Function:
    """The address of a function of the image."""

    name: str


Argument = int | Ref | Function


@dataclass
class Call:
    """Arguments of a call, and the memory to which they point; `bits` is the guest's word size."""

    rng: Random
    bits: int
    memory: bytearray = field(default_factory=bytearray)
    args: tuple[Argument, ...] = ()
    variadic: bool = False

    def place(self, data: bytes) -> Ref:
        """Put data into the arena at a multiple of 8 bytes, and return a reference to it."""
        at = len(self.memory)
        self.memory += data + bytes(-len(data) % 8)
        assert len(self.memory) <= ARENA
        return Ref(at)

    def room(self, size: int) -> Ref:
        """Return a buffer filled with 0xA5, so that bytes which a function leaves unchanged are visible."""
        return self.place(bytes([0xA5]) * size)

    def text(self, longest: int = 24) -> Ref:
        """Return a string, which is often one of a few, so that equal strings occur."""
        return self.string(self.any_text(longest))

    def string(self, text: str) -> Ref:
        return self.place(text.encode("latin-1") + b"\0")

    def any_text(self, longest: int = 24) -> str:
        rng = self.rng
        if rng.random() < 0.4:
            return rng.choice(WORDS)
        return "".join(rng.choice(LETTERS) for _ in range(rng.randrange(longest)))

    def data(self, size: int) -> Ref:
        """Return random bytes, sometimes with few different values."""
        if self.rng.random() < 0.3:
            return self.place(bytes(self.rng.choice(b"\0\xffa") for _ in range(size)))
        return self.place(self.rng.randbytes(size))

    def number(self, bits: int | None = None) -> int:
        """Return a random number of at most `bits` bits. The default is the guest's word size."""
        return self.rng.getrandbits(self.rng.randrange(1, (bits or self.bits) + 1))


Make = Callable[[Call], tuple[Argument, ...]]


@dataclass(frozen=True)
class Pure:
    """A pure function: its results and writes depend only on its arguments and the memory they point to."""

    name: str
    result: Result
    make: Make
    least_bits: int = 32
    """Minimum word size in bits for which the host's result is the same."""


def _char(c: Call) -> int:
    return ord(c.rng.choice(LETTERS + "\0"))


def _two(c: Call) -> tuple[Argument, ...]:
    first = c.any_text()
    second = first if c.rng.random() < 0.2 else c.any_text(6)
    if c.rng.random() < 0.3:
        second = second.swapcase()
    return c.string(first), c.string(second)


def _two_and_length(c: Call) -> tuple[Argument, ...]:
    return (*_two(c), c.rng.randrange(12))


def _string_char(c: Call) -> tuple[Argument, ...]:
    return c.text(), _char(c)


def _string_length_char(c: Call) -> tuple[Argument, ...]:
    return c.text(), c.rng.randrange(30), _char(c)


def _data_char_length(c: Call) -> tuple[Argument, ...]:
    size = c.rng.randrange(40)
    return c.data(size), c.rng.choice([0, 255, 97, c.rng.getrandbits(8)]), size


def _two_data(c: Call) -> tuple[Argument, ...]:
    size = c.rng.randrange(40)
    first = c.rng.randbytes(size)
    changed = bytearray(first)
    if size and c.rng.random() < 0.7:
        changed[c.rng.randrange(size)] = c.rng.getrandbits(8)
    return c.place(first), c.place(bytes(changed)), size


def _move(c: Call) -> tuple[Argument, ...]:
    area, to, source = c.data(256).offset, c.rng.randrange(100), c.rng.randrange(100)
    return Ref(area + to), Ref(area + source), c.rng.randrange(120)


def _copy(c: Call) -> tuple[Argument, ...]:
    size = c.rng.randrange(200)
    return c.room(size), c.data(size), size


def _fill(c: Call) -> tuple[Argument, ...]:
    size = c.rng.randrange(200)
    return c.room(size + 8), c.rng.getrandbits(8), size


def _into(c: Call) -> tuple[Argument, ...]:
    return c.room(64), c.text()


def _into_sized(c: Call) -> tuple[Argument, ...]:
    return c.room(64), c.text(), c.rng.randrange(32)


def _append(c: Call) -> tuple[Argument, ...]:
    return c.place(c.any_text().encode("latin-1").ljust(64, b"\0")), c.text()


def _append_sized(c: Call) -> tuple[Argument, ...]:
    return (*_append(c), c.rng.randrange(32, 64))


def _number_text(c: Call) -> str:
    rng = c.rng
    digits = rng.choice(["0123456789", "01234567", "0123456789abcdefABCDEF"])
    body = "".join(rng.choice(digits) for _ in range(rng.randrange(22)))
    if rng.random() < 0.2:
        body = str(rng.choice([2**7, 2**8, 2**15, 2**16, 2**31, 2**32, 2**63, 2**64]) - rng.randrange(2))
    sign, prefix = rng.choice(["", "", "-", "+"]), rng.choice(["", "", "0x", "0"])
    return sign + prefix + body + rng.choice(["", "", "\n", "x", "k", "M", " "])


def _parse_word(c: Call) -> tuple[Argument, ...]:
    return c.string(_number_text(c)), c.rng.choice([0, 8, 10, 16]), c.room(8)


def _simple_parse(c: Call) -> tuple[Argument, ...]:
    return c.string(_number_text(c)), 0, c.rng.choice([0, 8, 10, 16])


def _hash(c: Call) -> tuple[Argument, ...]:
    size = c.rng.randrange(300)
    return c.number(32), c.data(size), size


def _keyed(c: Call) -> tuple[Argument, ...]:
    size = c.rng.randrange(60)
    return c.data(size), size, c.number(32)


def _bitmap(c: Call, bits: int = 192) -> Ref:
    rng = c.rng
    kind = rng.randrange(4)
    value = [0, 2**bits - 1, rng.getrandbits(bits), rng.getrandbits(bits) & rng.getrandbits(bits)][kind]
    return c.place(value.to_bytes(bits // 8, "little"))


def _find(c: Call) -> tuple[Argument, ...]:
    return _bitmap(c), c.rng.randrange(193)


def _find_from(c: Call) -> tuple[Argument, ...]:
    return (*_find(c), c.rng.randrange(200))


def _bit_sets(c: Call) -> tuple[Argument, ...]:
    return _bitmap(c), _bitmap(c), c.rng.randrange(1, 193)


def _bit_operation(c: Call) -> tuple[Argument, ...]:
    # Whole words of any machine: how a rest is filled depends on the word.
    return c.room(24), _bitmap(c), _bitmap(c), 64 * c.rng.randrange(1, 4)


def _bit_shift(c: Call) -> tuple[Argument, ...]:
    return c.room(24), _bitmap(c), c.rng.randrange(192), 192


def _bit_range(c: Call) -> tuple[Argument, ...]:
    start = c.rng.randrange(192)
    return _bitmap(c), start, c.rng.randrange(193 - start)


def _zero_area(c: Call) -> tuple[Argument, ...]:
    return _bitmap(c), 192, c.rng.randrange(192), c.rng.randrange(1, 20), c.rng.choice([0, 1, 3, 7])


def _packet(c: Call) -> tuple[Argument, ...]:
    size = c.rng.randrange(200)
    return c.data(size), size, c.number(32)


def _pseudo_header(c: Call) -> tuple[Argument, ...]:
    return c.number(32), c.number(32), c.number(16), c.rng.choice([6, 17]), c.number(32)


def _sort(c: Call) -> tuple[Argument, ...]:
    values = [c.rng.randrange(-99, 99) for _ in range(c.rng.randrange(40))]
    return c.place(struct.pack(f"<{len(values)}i", *values)), len(values), 4, Function("cmpint"), 0


def _sort_pairs(c: Call) -> tuple[Argument, ...]:
    """Make a call of sort() with elements of 8 or 12 bytes and distinct keys, so that only one order is
    right.
    """
    count, size = c.rng.randrange(40), c.rng.choice([8, 12])
    keys = c.rng.sample(range(-500, 500), count)
    base = c.place(b"".join(struct.pack("<i", key) + c.rng.randbytes(size - 4) for key in keys))
    return base, count, size, Function("cmpint"), 0


def _search(c: Call) -> tuple[Argument, ...]:
    values = sorted(c.rng.sample(range(200), c.rng.randrange(40)))
    base = c.place(struct.pack(f"<{len(values)}i", *values))
    return c.place(struct.pack("<i", c.rng.randrange(200))), base, len(values), 4, Function("cmpint")


def _glob(c: Call) -> tuple[Argument, ...]:
    parts = ["a", "b", "*", "?", "[a-b]", "[!a]", "[^x]", "\\*", "[]a]"]
    pattern = "".join(c.rng.choice(parts) for _ in range(c.rng.randrange(7)))
    return c.string(pattern), c.string("".join(c.rng.choice("ab*]^") for _ in range(c.rng.randrange(9))))


def _bool_text(c: Call) -> tuple[Argument, ...]:
    return c.string(c.rng.choice(["y", "n", "on", "off", "oN", "1", "0", "x", "o", ""])), c.room(1)


def _format(c: Call) -> tuple[Argument, ...]:
    rng = c.rng
    c.variadic = True
    form, values = "", []
    for _ in range(rng.randrange(4)):
        flags = "".join(flag for flag in "-+ #0" if rng.random() < 0.25)
        width = rng.choice(["", "", str(rng.randrange(20))])
        precision = rng.choice(["", "", f".{rng.randrange(12)}"])
        kind = rng.choice("dduxXocsp%")
        length = rng.choice(["", "", "l", "h", "hh", "z"]) if kind in "duxXo" else ""
        if kind == "p":
            flags, precision, kind = "", "", "px"
            width = width.strip("0") or "20"
        form += rng.choice(["", " ", "n=", "|"]) + f"%{flags}{width}{precision}{length}{kind}"
        if kind == "s":
            values.append(c.text())
        elif kind != "%":
            values.append(c.number(31) if length in ("l", "z") or kind == "px" else c.number(32))
    return c.room(128), rng.choice([0, 1, 5, 20, 120]), c.string(form), *values


def _hex_text(c: Call) -> tuple[Argument, ...]:
    count = c.rng.randrange(12)
    text = c.rng.randbytes(count).hex()
    if count and c.rng.random() < 0.3:
        at = c.rng.randrange(len(text))
        text = text[:at] + c.rng.choice("gGzZ@ ") + text[at + 1 :]
    return c.room(16), c.string(text.upper() if c.rng.random() < 0.5 else text), count


def _base64(c: Call) -> tuple[Argument, ...]:
    size = c.rng.randrange(40)
    return c.data(size), size, c.room(64)


def _from_base64(c: Call) -> tuple[Argument, ...]:
    alphabet = "ABCXYZabcxyz019-_" + ("=+/\0" if c.rng.random() < 0.2 else "")
    text = "".join(c.rng.choice(alphabet) for _ in range(c.rng.randrange(40)))
    return c.string(text), len(text), c.room(40)


def _option(c: Call) -> tuple[Argument, ...]:
    words = [c.rng.choice(["on", "off", "fast", "on2", ""]) for _ in range(c.rng.randrange(5))]
    return c.string(",".join(words)), c.string(c.rng.choice(["on", "off", "fast"]))


def _words(c: Call) -> tuple[Argument, ...]:
    count = c.rng.randrange(20)
    return c.data(4 * count), count, c.number(32)


def _transformed(least: int, most: int, out: int, values: int = 256) -> Make:
    """Return a generator of calls of a function in lib/test_pure.c.

    The function gets `least` to `most` bytes below `values`, and a buffer of `out` bytes for its result.
    """

    def make(c: Call) -> tuple[Argument, ...]:
        size = c.rng.randrange(least, most + 1)
        return c.place(bytes(c.rng.randrange(values) for _ in range(size))), size, c.room(out)

    return make


def _numbers(c: Call) -> tuple[Argument, ...]:
    data = b"".join(c.number(64).to_bytes(8, "little") for _ in range(3))
    return c.place(data), 24, c.room(200)


def _parsed(c: Call) -> tuple[Argument, ...]:
    text = _number_text(c)
    return c.string(text), len(text) + 1, c.room(600)


def _split(c: Call) -> tuple[Argument, ...]:
    parts = [c.rng.choice(["1", "-2", "0x10", "3-5", "a", "", "77"]) for _ in range(c.rng.randrange(6))]
    text = "".join(part + c.rng.choice([",", " ", ", "]) for part in parts)
    return c.string(text), len(text) + 1, c.room(400)


def _one(bits: int | None = None) -> Make:
    return lambda c: (c.number(bits),)


def _pair(bits: int | None = None) -> Make:
    return lambda c: (c.number(bits), c.number(bits))


def _byte(c: Call) -> tuple[Argument, ...]:
    return (c.rng.getrandbits(8),)


def _product(c: Call) -> tuple[Argument, ...]:
    return c.number(c.bits // 2), c.number(c.bits // 2)


def _text(c: Call) -> tuple[Argument, ...]:
    return (c.text(),)


R = Result
PURE = (
    # lib/string.c and the architecture's memory functions
    Pure("strlen", R.WORD, _text),
    Pure("strnlen", R.WORD, lambda c: (c.text(), c.rng.randrange(20))),
    Pure("strcmp", R.INT, _two),
    Pure("strncmp", R.INT, _two_and_length),
    Pure("strcasecmp", R.INT, _two),
    Pure("strncasecmp", R.INT, _two_and_length),
    Pure("strcpy", R.POINTER, _into),
    Pure("strncpy", R.POINTER, _into_sized),
    Pure("strlcpy", R.WORD, _into_sized),
    Pure("strscpy", R.WORD, _into_sized),
    Pure("strcat", R.POINTER, _append),
    Pure("strncat", R.POINTER, _append_sized),
    Pure("strlcat", R.WORD, _append_sized),
    Pure("strchr", R.POINTER, _string_char),
    Pure("strchrnul", R.POINTER, _string_char),
    Pure("strrchr", R.POINTER, _string_char),
    Pure("strnchr", R.POINTER, _string_length_char),
    Pure("strnchrnul", R.POINTER, _string_length_char),
    Pure("strstr", R.POINTER, _two),
    Pure("strnstr", R.POINTER, _two_and_length),
    Pure("strspn", R.WORD, _two),
    Pure("strcspn", R.WORD, _two),
    Pure("strpbrk", R.POINTER, _two),
    Pure("strim", R.POINTER, _text),
    Pure("skip_spaces", R.POINTER, _text),
    Pure("strreplace", R.POINTER, lambda c: (c.text(), _char(c) or 97, _char(c))),
    Pure("sysfs_streq", R.BYTE, _two),
    Pure("memcmp", R.INT, _two_data),
    Pure("memchr", R.POINTER, _data_char_length),
    Pure("memchr_inv", R.POINTER, _data_char_length),
    Pure("memscan", R.POINTER, _data_char_length),
    Pure("memcpy", R.POINTER, _copy),
    Pure("memmove", R.POINTER, _move),
    Pure("memset", R.POINTER, _fill),
    # numbers in strings
    Pure("kstrtoul", R.INT, _parse_word, 64),
    Pure("kstrtol", R.INT, _parse_word, 64),
    Pure("kstrtobool", R.INT, _bool_text),
    Pure("simple_strtoul", R.WORD, _simple_parse),
    Pure("simple_strtol", R.WORD, _simple_parse),
    Pure("snprintf", R.INT, _format),
    Pure("scnprintf", R.INT, _format),
    Pure("hex_to_bin", R.INT, _byte),
    Pure("hex2bin", R.INT, _hex_text),
    Pure("bin2hex", R.POINTER, lambda c: (c.room(64), c.data(24), c.rng.randrange(24))),
    Pure("test_hexdump", R.INT, _transformed(4, 60, 280)),
    Pure("base64_encode", R.INT, _base64),
    Pure("base64_decode", R.INT, _from_base64),
    Pure("parse_option_str", R.BYTE, _option),
    Pure("glob_match", R.BYTE, _glob),
    # check sums and hashes
    Pure("crc32_le", R.INT, _hash),
    Pure("crc32_be", R.INT, _hash),
    Pure("crc32_le_shift", R.INT, lambda c: (c.number(32), c.rng.randrange(300))),
    Pure("crc32c", R.INT, _hash),
    Pure("crc16", R.SHORT, lambda c: (c.number(16), *_hash(c)[1:])),
    Pure("crc_ccitt", R.SHORT, lambda c: (c.number(16), *_hash(c)[1:])),
    Pure("crc_itu_t", R.SHORT, lambda c: (c.number(16), *_hash(c)[1:])),
    Pure("crc7_be", R.BYTE, lambda c: (c.number(8), *_hash(c)[1:])),
    Pure("sha256", R.NOTHING, lambda c: (*_packet(c)[:2], c.room(32))),
    Pure("jhash", R.INT, _keyed),
    Pure("jhash2", R.INT, _words),
    Pure("jhash_3words", R.INT, lambda c: tuple(c.number(32) for _ in range(4))),
    Pure("xxh32", R.INT, _keyed),
    Pure("csum_partial", R.INT, _packet),
    Pure("ip_compute_csum", R.SHORT, lambda c: _packet(c)[:2]),
    Pure("ip_fast_csum", R.SHORT, lambda c: (c.data(60), c.rng.randrange(5, 16))),
    Pure("csum_tcpudp_nofold", R.INT, _pseudo_header),
    Pure("csum_tcpudp_magic", R.SHORT, _pseudo_header),
    # arithmetic
    Pure("int_sqrt", R.WORD, _one()),
    Pure("gcd", R.WORD, _pair()),
    Pure("lcm", R.WORD, _product),
    Pure("lcm_not_zero", R.WORD, _product),
    Pure("roundup_pow_of_two", R.WORD, lambda c: (c.number(c.bits - 1),)),
    Pure("ilog2_u32", R.INT, _one(32)),
    Pure("bcd2bin", R.INT, _byte),
    Pure("bin2bcd", R.BYTE, lambda c: (c.rng.randrange(100),)),
    Pure("bitrev8", R.BYTE, _byte),
    Pure("bitrev32", R.INT, _one(32)),
    Pure("__sw_hweight32", R.INT, _one(32)),
    Pure("msecs_to_jiffies", R.WORD, _one(22)),
    Pure("jiffies_to_msecs", R.INT, _one(20)),
    # bitmaps
    Pure("_find_first_bit", R.WORD, _find),
    Pure("_find_first_zero_bit", R.WORD, _find),
    Pure("_find_last_bit", R.WORD, _find),
    Pure("_find_next_bit", R.WORD, _find_from),
    Pure("_find_next_zero_bit", R.WORD, _find_from),
    Pure("__bitmap_weight", R.INT, _find),
    Pure("__bitmap_equal", R.BYTE, _bit_sets),
    Pure("__bitmap_subset", R.BYTE, _bit_sets),
    Pure("__bitmap_intersects", R.BYTE, _bit_sets),
    Pure("__bitmap_and", R.BYTE, _bit_operation),
    Pure("__bitmap_andnot", R.BYTE, _bit_operation),
    Pure("__bitmap_or", R.NOTHING, _bit_operation),
    Pure("__bitmap_xor", R.NOTHING, _bit_operation),
    Pure("__bitmap_complement", R.NOTHING, lambda c: (c.room(24), _bitmap(c), 192)),
    Pure("__bitmap_shift_left", R.NOTHING, _bit_shift),
    Pure("__bitmap_shift_right", R.NOTHING, _bit_shift),
    Pure("__bitmap_set", R.NOTHING, _bit_range),
    Pure("__bitmap_clear", R.NOTHING, _bit_range),
    Pure("bitmap_find_next_zero_area", R.WORD, _zero_area),
    # sorting, searching, structures
    Pure("sort", R.NOTHING, _sort),
    Pure("sort", R.NOTHING, _sort_pairs),
    Pure("bsearch", R.POINTER, _search),
    Pure("test_math64", R.INT, _numbers),
    Pure("test_hashes", R.INT, _transformed(16, 200, 64)),
    Pure("test_random", R.INT, _transformed(8, 8, 200)),
    Pure("test_time", R.INT, _transformed(14, 14, 64)),
    Pure("test_sha256_steps", R.INT, _transformed(0, 400, 32)),
    Pure("test_parse", R.INT, _parsed),
    Pure("test_split", R.INT, _split),
    Pure("test_rbtree", R.INT, _transformed(0, 120, 400, 64)),
    Pure("test_lists", R.INT, _transformed(0, 100, 200)),
    Pure("test_lists", R.INT, _transformed(0, 100, 200, 8)),
    Pure("test_kfifo", R.INT, _transformed(0, 60, 2400)),
    Pure("test_xarray", R.INT, _transformed(0, 120, 800)),
    Pure("test_idr", R.INT, _transformed(0, 80, 1300)),
)
