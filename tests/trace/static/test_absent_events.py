"""docs/reference/compatibility.md lists all static events of Linux that kprobefs's own kernel lacks, and no
others.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.events.link_order import linux_events

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "compatibility.md"
ROW = re.compile(r"^\| `(\w+)` \| ((?:`[\w*]+`(?:, )?)+) \| ", re.MULTILINE)


def test_absent_events_are_told(kernel: Kernel) -> None:
    _, _, table = PAGE.read_text().partition("static events of Linux are absent")
    told = {
        group: re.findall(r"`([\w*]+)`", names) for group, names in ROW.findall(table.partition("\n\n- ")[0])
    }
    registry = kernel.tracing.kprobe_events.registry
    for group in set(registry.groups()) - {"syscalls"}:
        absent = {name for each, name in linux_events() if each == group} - set(registry.in_group(group))
        patterns = told.pop(group, [])
        assert absent == {name for name in absent if any(fnmatchcase(name, each) for each in patterns)}, group
        for each in patterns:
            assert any(fnmatchcase(name, each) for name in absent), (group, each)
            assert not any(fnmatchcase(name, each) for name in registry.in_group(group)), (group, each)
    assert told == {}
