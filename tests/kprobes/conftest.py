"""Booted kernels for the tests of the probe engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import Profile
from tests.ledger import ledger_mismatches

BREAKPOINTS = Profile("breakpoints", ftrace=False, optimizer=False)
"""Every probe is an int3 with a step: what all other ways must be equal to."""


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    """A kernel of the test's own; its text must be the original again when the test ends."""
    with Kernel(profile=BREAKPOINTS) as kernel:
        yield kernel
        assert ledger_mismatches(kernel.machine.text) == []
