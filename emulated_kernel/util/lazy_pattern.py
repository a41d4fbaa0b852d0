"""lazy_pattern(): a regular expression that is compiled at its first use, for a faster start."""

from __future__ import annotations

import re

# Not from typing, which takes longer to import than most modules here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import AnyStr

    def lazy_pattern(pattern: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
        """Return an object that compiles `pattern` when one of its attributes is first used.

        The object has the attributes of a compiled pattern, but the functions of the module re do not accept
        it.
        """

else:

    class lazy_pattern:
        """A regular expression that is compiled when an attribute is used for the first time."""

        def __init__(self, pattern, flags=0):
            self._given = pattern, flags

        def __getattr__(self, name):
            # Python calls this method only for attributes that the object does not have yet.
            value = getattr(re.compile(*self._given), name)
            setattr(self, name, value)
            return value
