"""Fixtures: images, which are loaded once, and a booted guest for each test that uses the guest."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulated_kernel.image.builtin_image import PREBUILT, KernelImage, load_image

from .guest import Guest


@pytest.fixture(scope="session")
def image() -> KernelImage:
    return load_image()


@pytest.fixture(scope="session", params=["x86_64", "i386", "riscv64", "riscv64i"])
def each_image(request: pytest.FixtureRequest) -> KernelImage:
    """Return the image of each architecture, one after the other."""
    return load_image(arch=request.param)


@pytest.fixture(scope="session")
def vmlinux() -> Path:
    return PREBUILT / "x86_64" / "vmlinux"


@pytest.fixture
def guest(image: KernelImage) -> Guest:
    """Return a booted, idle guest whose init task is parked."""
    machine = Guest(image)
    machine.boot()
    machine.to_idle()
    return machine


@pytest.fixture
def task(guest: Guest) -> int:
    """Return a guest task that represents a host process of root."""
    return guest.adopt(1234, "bash")
