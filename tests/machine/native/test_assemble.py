"""The file of generated native routines is up to date with its sources."""

from __future__ import annotations

from emulated_kernel.machine.native import assemble
from tests.machine.native.host_cpu import NEEDS_ROUTINE

pytestmark = NEEDS_ROUTINE


def test_the_bytes_are_those_of_the_source() -> None:
    assert assemble.ROUTINES.read_text() == assemble.module_text()
