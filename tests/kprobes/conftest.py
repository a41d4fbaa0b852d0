"""Booted kernels for the tests of the probe engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import Profile
from tests.ledger import ledger_mismatches

BREAKPOINTS = Profile("breakpoints", ftrace=False, optimizer=False)
"""Profile in which every hit is an int3 and a single step; all other modes must give equal results."""


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    """Yield a kernel for one test, and check that its text is the original again afterwards."""
    with Kernel(profile=BREAKPOINTS) as kernel:
        yield kernel
        assert ledger_mismatches(kernel.machine.text) == []
