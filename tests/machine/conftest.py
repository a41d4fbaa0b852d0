"""Fixture that closes the machines of a test when the test ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.machine import guests


@pytest.fixture(autouse=True)
def _close_machines() -> Iterator[None]:
    yield
    while guests.booted:
        guests.booted.pop().close()
