"""KernelSymbols, which names addresses for tracing: remembered answers agree with the current symbol
tables.
"""

from __future__ import annotations

import pytest

from emulated_kernel.image.kallsyms import Location
from emulated_kernel.image.live_image import LiveKallsyms
from emulated_kernel.kernel.api import Kernel


def test_a_symbol_is_looked_up_once_until_the_tables_change(monkeypatch: pytest.MonkeyPatch) -> None:
    with Kernel() as kernel:
        symbols = kernel.tracing.symbols
        address = symbols.lookup_name("vfs_read")
        assert address is not None
        asked: list[int] = []
        lookup = LiveKallsyms.lookup

        def counting(table: LiveKallsyms, where: int) -> Location | None:
            asked.append(where)
            return lookup(table, where)

        symbols.tables_changed()
        monkeypatch.setattr(LiveKallsyms, "lookup", counting)
        found = [symbols.lookup(address + 1) for _ in range(3)]
        assert [str(each) for each in found] == [str(found[0])] * 3
        assert str(found[0]).startswith("vfs_read+0x1/")
        assert asked == [address + 1]
        symbols.tables_changed()
        symbols.lookup(address + 1)
        assert asked == [address + 1] * 2
