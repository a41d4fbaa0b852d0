"""Fixture of the tests that run routines on an emulated host."""

from __future__ import annotations

import pytest

from tests.machine.native.host_cpu import ArmHost, HostCpu, X86Host


@pytest.fixture(scope="module", params=[X86Host, ArmHost], ids=["x86_64", "aarch64"])
def host(request: pytest.FixtureRequest) -> HostCpu:
    created: HostCpu = request.param()
    return created
