"""lazy_pattern(): it behaves as re.compile(), but compiles at the first use."""

from __future__ import annotations

import re

import pytest

from emulated_kernel.util.lazy_pattern import lazy_pattern


@pytest.mark.parametrize("text", ["ABx", "abX and more", "1", ""])
def test_a_lazy_pattern_matches_as_a_compiled_one(text: str) -> None:
    lazy = lazy_pattern("(?P<word>[a-z]+)x", re.IGNORECASE)
    compiled = re.compile("(?P<word>[a-z]+)x", re.IGNORECASE)
    for _ in range(2):
        found, expected = lazy.match(text), compiled.match(text)
        assert (found and found.groupdict()) == (expected and expected.groupdict())
        assert lazy.findall(text) == compiled.findall(text)
        assert lazy.sub(r"<\1>", text) == compiled.sub(r"<\1>", text)
    assert (lazy.pattern, lazy.flags) == (compiled.pattern, compiled.flags)


def test_the_expression_is_compiled_at_the_first_use() -> None:
    wrong = lazy_pattern("(")
    for _ in range(2):
        with pytest.raises(re.error):
            wrong.match("")
