"""LinuxRule: a rule of kprobes or tracefs that only some versions of Linux have.

Only this file compares versions.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Self

_OLDEST = "5.10"
"""Version that is assumed for a kernel whose release does not begin with a version number."""


class LinuxRule(Enum):
    """Base class of enumerations of rules. Each member is a rule that only some versions have.

    Code tests whether a kernel has a rule, and never its version; only this file compares versions. A
    backport therefore changes only the set of a kernel's rules, and no code.
    """

    def __init__(self, since: str, what: str, source: str, sign: str = "", until: str = "") -> None:
        """Create a rule.

        `since` is the first version that has the rule, and `until` the first later version that lacks it, or
        "". Both are among the versions whose sources were compared (5.10, 6.1, 6.12, 7.2 and 7.3) or whose
        kernels were tested (5.15, 6.8, 6.14 and 6.16 to 7.1). `what` describes the rule, and `source` names a
        place in Linux's source code that implements the rule. `sign` is a text that a kernel has if and only
        if it has the rule, or "". The text is in the kernel's error table or README, or is the name of a
        function followed by `()`.
        """
        self.since = since
        self.what = what
        self.source = source
        self.sign = sign
        self.until = until

    # Enum's hash is a function in Python, and the parser of definitions asks for rules in each line.
    __hash__ = object.__hash__

    @classmethod
    def of(cls, version: str) -> frozenset[Self]:
        """Return the rules that the kernel of `version` has. A version is written as `6.12`."""
        number = _number(version)
        return frozenset(rule for rule in cls if rule._is_in(number))

    @classmethod
    def detected(cls, version: str, texts: str) -> frozenset[Self]:
        """Return the rules that a kernel has, from its `version` and from `texts` in the kernel.

        A rule with a `sign` (see __init__()) is included if the sign occurs in `texts`. Any other rule is
        included according to the version. `texts` is one string: the kernel's error table, its README, and
        `NAME()` for each of its functions that is the sign of a rule.
        """
        number = _number(version)
        return frozenset(rule for rule in cls if (rule.sign in texts if rule.sign else rule._is_in(number)))

    def _is_in(self, number: tuple[int, ...]) -> bool:
        return _number(self.since) <= number and (not self.until or number < _number(self.until))


def series_of(release: str) -> str:
    """Return the version at the beginning of `release`: `6.12` for `6.12.117+deb13-cloud-amd64`.

    If the release begins with no version, return _OLDEST.
    """
    found = re.match(r"\d+\.\d+", release)
    return found[0] if found else _OLDEST


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
