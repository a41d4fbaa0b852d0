"""Grammar that generates texts by rules, and a mutator that damages texts and files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random

_REFERENCE = re.compile(r"<([a-z_]+)>")
_TOKEN = re.compile(rb"\w+|\s+|[^\w\s]")
_MAX_DEPTH = 12
_LONG = (2, 8, 63, 64, 256, 1023, 4094, 4096)
"""Numbers of repetitions of a token, near the limits of names, lines and pages."""
_WORDS = tuple(
    value.to_bytes(8, "little", signed=True)
    for value in (
        0,
        1,
        2,
        7,
        8,
        64,
        127,
        255,
        4095,
        4096,
        65535,
        1 << 31,
        1 << 32,
        (1 << 63) - 1,
        -1,
        -2,
        -8,
        -4096,
    )
)
_MAX_SIZE = 300_000
"""Maximum size of a text in bytes; the longest text takes more than two FUSE requests."""


class Grammar:
    """Grammar with named rules; `<name>` in an alternative stands for a text of that rule.

    The first alternative of a recursive rule must not be recursive. At the maximum depth of recursion, only
    this alternative is used.
    """

    def __init__(self, rules: Mapping[str, Sequence[str]]) -> None:
        self._rules = {
            name: [_REFERENCE.split(alternative) for alternative in alternatives]
            for name, alternatives in rules.items()
        }
        # The even parts are the texts between references.
        self.tokens = sorted({part for rule in self._rules.values() for parts in rule for part in parts[::2]})

    def text(self, random: Random, rule: str, depth: int = 0) -> str:
        """Return a random text that the rule called `rule` generates. Raises: KeyError (no such rule).

        `depth`: depth of the recursion so far.
        """
        alternatives = self._rules[rule]
        parts = alternatives[0] if depth > _MAX_DEPTH else random.choice(alternatives)
        return "".join(
            self.text(random, part, depth + 1) if index % 2 else part for index, part in enumerate(parts)
        )


class Mutator:
    """Damages texts; `tokens` are the words that it inserts."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = tokens

    def damage(self, random: Random, data: bytes) -> bytes:
        """Return the text with a few tokens or bytes changed."""
        change = self.tokens if random.random() < 0.7 else self.bytes
        for _ in range(random.randint(1, 4)):
            data = change(random, data)[:_MAX_SIZE]
        return data

    def damage_file(self, random: Random, data: bytes) -> bytes:
        """Return the data of a binary file cut off, or with a few bytes or words changed."""
        if random.random() < 0.1:
            return data[: random.randint(0, len(data))]
        changed = bytearray(data)
        # Most changes are near both ends of the file, where the headers are.
        for _ in range(random.randint(1, 6)):
            at = random.choice((random.randrange(64), random.randrange(len(data)), -random.randint(1, 2000)))
            at = max(at, -len(data)) % len(data)
            word = random.choice(_WORDS)[: random.choice((1, 1, 2, 4, 8))]
            changed[at : at + len(word)] = word
        return bytes(changed[: len(data)])

    def tokens(self, random: Random, data: bytes) -> bytes:
        """Return a text in which one token was dropped, repeated, swapped, replaced or inserted."""
        tokens = _TOKEN.findall(data) or [b""]
        at = random.randrange(len(tokens))
        match random.randrange(6):
            case 0:
                del tokens[at]
            case 1:
                tokens[at] *= random.choice(_LONG)
            case 2:
                other = random.randrange(len(tokens))
                tokens[at], tokens[other] = tokens[other], tokens[at]
            case 3:
                tokens[at] = random.choice(self._tokens)
            case 4:
                tokens.insert(at, random.choice(self._tokens))
            case _:
                tokens[at:at] = tokens[random.randrange(len(tokens)) :]
        return b"".join(tokens)

    def bytes(self, random: Random, data: bytes) -> bytes:
        """Return data in which bytes at a random position were changed, inserted, cut out or repeated."""
        at, end = sorted((random.randint(0, len(data)), random.randint(0, len(data))))
        match random.randrange(6):
            case 0:
                return data[:at]
            case 1:
                return data[:at] + data[end:]
            case 2:
                return data[:at] + data[at:end] * random.choice(_LONG[:4]) + data[end:]
            case 3:
                return (
                    data[:at] + random.choice((b"\0", b"\n", b"\xff", b"\xc3\xa9", b"\r", b" ")) + data[at:]
                )
            case 4:
                return data[:at] + random.randbytes(random.choice((1, 2, 8))) + data[at:]
            case _:
                return data[:at] + random.randbytes(1) + data[at + 1 :]
