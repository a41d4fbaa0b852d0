"""Random data for compiled handlers: fetch arguments, filters, registers and memory."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.trace.compiled.guest import TARGETS, Guest

GENERAL = {
    "x86_64": ("di", "si", "dx", "cx", "ax", "bx", "r10", "r15"),
    "i386": ("di", "si", "dx", "cx", "ax", "bx", "bp"),
}
TYPES = [f"{sign}{bits}" for sign in "usx" for bits in (8, 16, 32, 64)]
BITFIELDS = ["b1@0/8", "b4@4/8", "b7@3/16", "b1@31/32"]
BITFIELDS += ["b33@20/64", "b64@0/64", "b3@61/64", "b32@0/64", "b32@32/64", "b31@32/64", "b5@30/64"]
OFFSETS = st.one_of(st.integers(-20, 40), st.sampled_from([4096, -4096, (1 << 31) - 1, -(1 << 31)]))
CONTEXTS = st.tuples(
    st.sampled_from([0, 0, 0, 1, 0x102, 0x10001, 0x300, 0xFF]), st.integers(0, 3), st.booleans()
)


class Drawn:
    """Hypothesis strategies for one architecture."""

    def __init__(self, arch: str) -> None:
        self.target = target = TARGETS[arch]
        self.registers = GENERAL[arch]
        top = 1 << target.bits
        self.addresses = st.sampled_from(
            (
                *(target.kernel + offset for offset in (-1, 0, 8, 100, 4090, 8185, 8192)),
                *(target.user, target.user + 4093, target.edge + 4095, target.edge + 4096),
                *(target.stack + 16376, 0, 8, top - 1, top >> 17, top >> 1),
            )
        )
        self.values = st.one_of(self.addresses, st.integers(0, top - 1), st.integers(0, 300))
        self.filters = st.sampled_from(
            [
                None,
                "common_pid == 4242",
                "common_pid != 4242",
                "__probe_ip > 0",
                f"n < 100 || n >= {top >> 1:#x}",
                "m < 0 && (n & 1)",
                "m > -100 || common_flags & 1",
                "!(m == 0) && common_preempt_count <= 3",
                f"cpu == 3 && n != {target.kernel:#x}",
                *(f"CPU {op} {value}" for op in self.OPERATORS for value in (0, 3, 4, 0xFFFFFFFF)),
                *(f"q {op} {value}" for op in self.OPERATORS for value in self.LIMITS),
                *(f"v {op} 0x{value:x}" for op in self.OPERATORS for value in self.LIMITS if value >= 0),
            ]
        )

    OPERATORS = ("==", "!=", "<", "<=", ">", ">=", "&")
    LIMITS = (0, -1, 1 << 32, -(1 << 32), (1 << 32) - 1, 1 << 31, 0x123456789, (1 << 63) - 1)
    """Values that are compared with fields of 8 bytes."""

    def simple(self) -> st.SearchStrategy[str]:
        """Return a strategy for expressions without a dereference."""
        registers = st.sampled_from([f"%{name}" for name in (*self.registers, "sp", "ip")])
        stack = st.sampled_from(["$stack", "$stack0", "$stack3", "$stack63", "$stack64", "$stack2048"])
        arguments = st.sampled_from(["$arg1", "$arg2", "$arg6", "$arg7", "$arg9"])
        limits = (f"\\{self.target.kernel:#x}", f"\\{self.target.mask:#x}")
        return st.one_of(registers, stack, arguments, st.sampled_from(["\\0x10", "\\-1", *limits]))

    def pointers(self, depth: int = 3) -> st.SearchStrategy[str]:
        """Return a strategy for expressions whose last operation is a dereference.

        `depth`: maximum number of dereferences before the last one.
        """
        inner = self.simple()
        if depth:
            inner = st.one_of(inner, self.pointers(depth - 1))
        user = st.sampled_from(["", "", "u"])
        return st.builds(
            lambda at, u, of: f"{at:+d}"[0] + u + f"{at:+d}"[1:] + f"({of})", OFFSETS, user, inner
        )

    def arguments(self) -> st.SearchStrategy[str]:
        """Return a strategy for fetch arguments, of which the parser refuses some."""
        types = st.sampled_from([*TYPES, *BITFIELDS])
        strings = st.sampled_from(["string", "ustring"])
        literals = st.sampled_from(["", "x", "abcdefgh", "fifteen chars.."])
        pointers = self.pointers()
        return st.one_of(
            st.builds("{}:{}".format, self.simple(), types),
            st.builds("{}:{}".format, pointers, types),
            st.builds("{}:{}[{}]".format, pointers, types, st.integers(1, 5)),
            st.builds("{}:{}".format, pointers, strings),
            st.builds("{}:{}[{}]".format, pointers, strings, st.integers(1, 3)),
            st.just("$comm"),
            st.builds('\\"{}"'.format, literals),
            st.builds("@{:#x}:{}".format, self.addresses, types),
        )

    def fill(self, guest: Guest, data: st.DataObject) -> None:
        """Fill the guest's memory with words that may be pointers, and bytes that may be strings."""
        target, word = self.target, guest.word
        places = (
            (target.kernel, 8192),
            (target.user, 4096),
            (target.edge, 4096),
            (target.stack + 15000, 1384),
        )
        for start, size in places:
            pattern = data.draw(st.binary(min_size=16, max_size=40))
            guest.memory.write(start, (pattern * (size // len(pattern) + 1))[:size])
            for at in data.draw(st.lists(st.integers(0, size // word - 1), max_size=8)):
                guest.memory.word(start + at * word - start % word, data.draw(self.values), word)
