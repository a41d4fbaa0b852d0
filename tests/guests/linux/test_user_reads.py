"""Hits that read user memory in a kernel whose CPU has SMAP: guest code handles the hits and keeps the flag
AC.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from emulated_kernel.guests.linux.boot_cache import started_with_kernel
from emulated_kernel.guests.linux.cpu.cpu_models import MODELS
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.kprobes.profile import Profile
from tests.guests.linux import debian_kernel
from tests.guests.linux.probing import MODES
from tests.guests.linux.user_reads import UserReads, check_hits, check_other_loads_fault

SERVER = MODELS["skylake-sp"]
STAC = b"\x0f\x01\xcb"
CLAC = b"\x0f\x01\xca"
KERNEL_WRITES = "filldir64"
"""Function of the kernel that writes user memory between stac and clac. The address is in di."""


@pytest.fixture(scope="module", autouse=True)
def _cache() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        debian_kernel.image()
        patch.setenv("XDG_CACHE_HOME", str(debian_kernel.lasting_cache("cpus")))
        yield


def user_reads(profile: Profile) -> UserReads:
    return UserReads(
        LinuxEngine(*started_with_kernel(str(debian_kernel.image()), debian_kernel.SEED, SERVER), profile)
    )


@pytest.mark.parametrize("mode", MODES)
def test_hits_are_guest_code(mode: str) -> None:
    in_python = user_reads(replace(MODES[mode], compiled=False))
    check_hits(user_reads(MODES[mode]), in_python)


def test_other_loads_fault() -> None:
    check_other_loads_fault(user_reads(MODES["stepped"]))


@pytest.mark.parametrize("mode", ["stepped", "boosted", "optimized"])
def test_hits_while_the_kernel_writes_user_memory(mode: str) -> None:
    """Hits between stac and clac keep the flag AC.

    Otherwise, the kernel's next store to user memory would fault.
    """
    reads = user_reads(MODES[mode])
    engine = reads.engine
    start = engine.kernel.required(KERNEL_WRITES)
    found = engine.kernel.kallsyms.lookup(start)
    assert found is not None
    code = engine.machine.text.original(start, found.symbol.size)
    within = range(start + code.index(STAC) + 1, start + code.index(CLAC) + 1)
    places = [at for at in engine.components.arch.instruction_boundaries(code, start) if at in within]
    expected = reads.names()
    hit = 0
    for place in places:
        with reads.probed(f"p {place:#x}", ["any=+0(%di):x64 user=+u0(%di):x64 $comm"]):
            assert [reads.names() for _ in range(3)] == [expected] * 3
            records = reads.records()
        hit += bool(records)
        assert all(re.search(r" any=(\w+) user=\1 ", record) for record in records), records
    assert hit > 20
    assert engine.kprobes.compiler.made > 20
