"""The chain of callers equals what calls and returns have made, at any instruction; see chains.py."""

from __future__ import annotations

import pytest

from emulated_kernel.config import MachineConfig
from emulated_kernel.kernel import Kernel
from tests.trace.functions.chains import ARCHITECTURES, Chains, exercise

SAMPLE = 12
"""Of how many instructions one is compared."""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_chains_at_any_instruction(arch: str) -> None:
    with Kernel(MachineConfig(arch=arch, clock="virtual", run_budget=600)) as kernel:
        chains = Chains(kernel, SAMPLE)
        with kernel.lock:
            exercise(kernel)
        assert chains.failures == []
        assert chains.examples == []
        assert chains.compared > 500
