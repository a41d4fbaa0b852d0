"""Calls as a stack walk looks for them."""

from __future__ import annotations

import pytest

from emulated_kernel.arch.base import CallSite
from emulated_kernel.arch.x86.arch import X86_64

_ARCH = X86_64()
_RETURN = 0xFFFFFFFF81000100


@pytest.mark.parametrize(
    ("code", "site"),
    [
        ("90 90 e8 fb ff ff ff", CallSite(_RETURN - 5)),
        ("90 90 e8 00 01 00 00", CallSite(_RETURN + 0x100)),
        ("ff d0", CallSite(None)),
        ("90 41 ff d3", CallSite(None)),
        ("ff 53 08", CallSite(None)),
        ("ff 90 80 00 00 00", CallSite(None)),
        ("ff 15 00 00 00 00", CallSite(None)),
        ("ff 94 24 80 00 00 00", CallSite(None)),
        ("ff e0", None),
        ("90 90 90 90 90 90 90", None),
        ("d0", None),
        ("", None),
    ],
)
def test_call_before(code: str, site: CallSite | None) -> None:
    assert _ARCH.call_before(bytes.fromhex(code), _RETURN) == site


def test_jump_targets() -> None:
    code = bytes.fromhex("55 5d e9 10 00 00 00 eb f7")
    targets = set(_ARCH.jump_targets(code, 0x1000))
    assert {0x1017, 0x1000} <= targets
