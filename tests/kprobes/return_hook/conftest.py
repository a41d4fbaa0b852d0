"""Booted kernels for the tests of return hooks, with each shadow stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import PROFILES
from emulated_kernel.kprobes.return_hook.return_hooks import SHADOW_STACKS
from emulated_kernel.util.config import MachineConfig
from tests.ledger import ledger_mismatches
from tests.sample import share

Boot = Callable[..., Kernel]


def profiles_with_stacks(part: int) -> list[tuple[str, str]]:
    """Return pairs of a profile and a shadow stack.

    A short run has half of the pairs: those of the parts 0 and 1 are different.
    """
    return [
        (profile, stack)
        for number, profile in enumerate(sorted(PROFILES))
        for stack in share(list(SHADOW_STACKS), number + part, 2)
    ]


@pytest.fixture
def boot() -> Iterator[Boot]:
    """Yield a function that boots a kernel; check that the text is the original again afterwards."""
    kernels: list[Kernel] = []

    def build(profile: str = "linux-6.1", return_hook: str | None = None, **options: object) -> Kernel:
        config = MachineConfig(profile=profile, return_hook=return_hook, **options)  # type: ignore[arg-type]
        kernels.append(Kernel(config))
        return kernels[-1]

    yield build
    for kernel in kernels:
        assert ledger_mismatches(kernel.machine.text) == []
        kernel.close()


@pytest.fixture(params=list(SHADOW_STACKS))
def stack(request: pytest.FixtureRequest) -> str:
    """Return the name of a shadow stack; a test runs once with each shadow stack."""
    return str(request.param)


@pytest.fixture
def kernel(boot: Boot, stack: str) -> Kernel:
    """Return a kernel with the shadow stack `stack`."""
    return boot(return_hook=stack)


def dmesg(kernel: Kernel) -> list[str]:
    """Return the messages of the kernel log."""
    return [message.text for message in kernel.guest.kernel.messages()]
