"""Booted kernels for the tests of the probe engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulated_kernel.kernel import Kernel


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    """A kernel of the test's own; its text must be the original again when the test ends."""
    with Kernel() as kernel:
        yield kernel
        assert kernel.machine.text.verify() == []
