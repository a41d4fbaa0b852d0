"""Pure functions of the images: under emulation they give the same results as the same sources on
the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from emulated_kernel.image.builtin_image import load_image
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import ARCHITECTURES, MachineConfig
from tests.image import pure_host
from tests.image.pure_functions import GFP_KERNEL, compare
from tests.image.pure_table import PURE
from tests.sample import fewer

CALLS = fewer(4000, 2)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    reason = pure_host.why_not()
    if reason is not None:
        pytest.skip(reason)
    return pure_host.build(tmp_path_factory.mktemp("pure"))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with Kernel(MachineConfig(arch=request.param)) as booted:
        yield booted


def test_same_results_as_on_the_host(kernel: Kernel, library: ctypes.CDLL) -> None:
    assert compare(kernel, library, CALLS, seed=1) == []


def test_a_difference_is_noticed(kernel: Kernel, library: ctypes.CDLL) -> None:
    """If the first instruction of a function is replaced by a return, the comparison reports this
    function.
    """
    address = kernel.image.kallsyms.lookup_name("int_sqrt")
    assert address is not None
    code = b"\x67\x80\x00\x00" if kernel.image.arch.startswith("riscv") else b"\xc3"
    original = kernel.machine.memory.read(address, len(code))
    kernel.machine.text.poke(address, code)
    try:
        different = compare(kernel, library, 2 * len(PURE), seed=1)
    finally:
        kernel.machine.text.poke(address, original)
    assert different
    assert all(line.startswith("int_sqrt(") for line in different)


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        # The test vector of SipHash's authors, and values of xxHash for an empty string.
        ("test_hashes", bytes(range(16)) + bytes(range(15)), {0: 0xA129CA6149BE45E5}),
        ("test_hashes", bytes(16), {1: 0xEF46DB3751D8E999, 2: 0x02CC5D05}),
    ],
)
def test_known_hashes(kernel: Kernel, name: str, data: bytes, expected: dict[int, int]) -> None:
    place = kernel.call("__kmalloc", 256, GFP_KERNEL)
    kernel.machine.memory.write(place, data)
    kernel.call(name, place, len(data), place + 128)
    for index, value in expected.items():
        raw = kernel.machine.memory.read(place + 128 + 8 * index, 8)
        assert int.from_bytes(raw, "little") == value


def test_known_check_sums(kernel: Kernel) -> None:
    """CRCs of the string 123456789 are the check values of the catalogue of parametrised CRC algorithms."""
    place = kernel.call("__kmalloc", 64, GFP_KERNEL)
    kernel.machine.memory.write(place, b"123456789")
    for name, start, expected, bits in [
        ("crc16", 0, 0xBB3D, 16),
        ("crc_ccitt", 0, 0x2189, 16),
        ("crc_itu_t", 0, 0x31C3, 16),
        ("crc7_be", 0, 0x75 << 1, 8),
        ("crc32c", 0xFFFFFFFF, 0xE3069283 ^ 0xFFFFFFFF, 32),
    ]:
        assert kernel.call(name, start, place, 9) % (1 << bits) == expected, name


def test_every_function_of_the_table_is_in_every_image() -> None:
    for arch in ARCHITECTURES:
        image = load_image(arch=arch)
        assert [pure.name for pure in PURE if image.kallsyms.lookup_name(pure.name) is None] == []
