"""FtraceHash, which determines the order of functions in set_graph_function."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from emulated_kernel.trace.tracers.ftrace_hash import FtraceHash

# As Debian's 6.1.176 listed them: vfs_statx, vfs_symlink, vfs_setpos, vfs_statfs, vfs_submount, ...
RECORDED = (
    *(0xFFFFFFFF813511B0, 0xFFFFFFFF81359B10, 0xFFFFFFFF81347B70, 0xFFFFFFFF813908C0, 0xFFFFFFFF81374BA0),
    *(0xFFFFFFFF813C6630, 0xFFFFFFFF81390840, 0xFFFFFFFF813D03D0, 0xFFFFFFFF8137DD90),
)


def test_the_order_is_the_one_of_the_recorded_kernel() -> None:
    assert tuple(FtraceHash.moved(FtraceHash(sorted(RECORDED)))) == RECORDED


@given(st.sets(st.integers(0, (1 << 64) - 1), max_size=50), st.integers(0, 12))
def test_it_is_a_set(sites: set[int], bits: int) -> None:
    found = FtraceHash(sites, bits)
    assert sorted(found) == sorted(sites)
    for site in sorted(sites)[::2]:
        found.remove(site)
        assert site not in found
    assert sorted(found) == sorted(sites)[1::2]
