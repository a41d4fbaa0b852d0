"""Names of argument registers in questions, translated for each architecture."""

from __future__ import annotations

import re

from emulated_kernel.arch.architectures import arch_named

_ARGUMENT_OF = {name: number for number, name in enumerate(("di", "si", "dx", "cx", "r8"))}
"""Register of x86_64 in a question -> number of the argument that it holds at a function's entry."""
_REGISTER = re.compile(rf"%({'|'.join(_ARGUMENT_OF)})\b")


def for_processor(text: str, architecture: str) -> str:
    """Return a question in which the argument registers of x86_64 are replaced by those of `architecture`."""
    arguments = arch_named(architecture).registers.arguments
    return _REGISTER.sub(lambda found: f"%{arguments[_ARGUMENT_OF[found[1]]]}", text)
