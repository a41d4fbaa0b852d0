"""At any instruction, a call chain has exactly the calls that have not returned yet; stress/chains.py tests
more functions.
"""

from __future__ import annotations

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.return_hook.return_hooks import SHADOW_STACKS
from emulated_kernel.util.config import ARCHITECTURES
from stress.chains import Code, compare
from tests.sample import share

ONE_OF = 24
"""One of this number of instructions is compared."""


CASES = [
    (arch, hook)
    for number, arch in enumerate(ARCHITECTURES)
    for hook in (None, *share(list(SHADOW_STACKS), number, len(ARCHITECTURES)))
]


@pytest.mark.parametrize(("arch", "hook"), CASES)
def test_chains_at_any_instruction(arch: str, hook: str | None) -> None:
    # The extended strategy also writes jumps where Linux refuses, and so relocates calls.
    strategy = None if hook is None else "extended"
    chains = compare(arch, hook, ONE_OF, strategy)
    assert chains.examples == []
    assert chains.compared[Code.TEXT] > 500
    if hook is not None:
        # Copied instructions and handlers, too, are compared.
        assert chains.compared[Code.COPY] > 10
        assert chains.compared[Code.HANDLER] > 10


def test_code_is_analysed_once_until_it_changes() -> None:
    """The analysis of a detour's code is made once, and again after the text has changed.

    Another detour may then be at the same address.
    """
    with Kernel() as kernel:
        tables = kernel.tracing.system.stack._tables
        (symbol,) = kernel.image.kallsyms.by_name("vfs_read")
        detour = symbol.address, range(symbol.address, symbol.address + symbol.size)
        frames = tables.of_detour(*detour)
        assert tables.of_detour(*detour) is frames
        kernel.register_kprobe(Kprobe(symbol_name="vfs_read"))
        assert tables.of_detour(*detour) is not frames
