"""The unified return hook: it hooks only functions that can be traced, and uses the shadow stack of the
function graph tracer.
"""

from __future__ import annotations

import errno

import pytest

from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.util.errors import KernelError
from tests.kprobes.blacklist import is_blacklisted
from tests.kprobes.return_hook.conftest import Boot


def test_functions_without_fentry_are_refused(boot: Boot) -> None:
    kernel = boot(return_hook="unified")
    lookup = kernel.image.kallsyms.lookup
    untraced = next(
        symbol.name
        for symbol in kernel.image.kallsyms.symbols
        if symbol.is_text
        and symbol.address not in kernel.image.mcount
        and not is_blacklisted(kernel, symbol.address)
        and not symbol.name.endswith(".cold")
        and (where := lookup(symbol.address)) is not None
        and where.offset == 0
        and any(start <= symbol.address < end for start, end in kernel.image.text_ranges)
    )
    with pytest.raises(KernelError) as caught:
        kernel.register_kretprobe(Kretprobe(symbol_name=untraced))
    assert caught.value.errno == errno.EOPNOTSUPP
    rp = Kretprobe(symbol_name="gcd", handler=lambda *_: None)
    kernel.register_kretprobe(rp)
    kernel.call("gcd", 12, 18)
    assert (rp.returns, kernel.kprobes.mode(rp)) == (1, "ftrace")


def test_without_ftrace_nothing_can_be_hooked(boot: Boot) -> None:
    kernel = boot("optprobes-2009", "unified")
    with pytest.raises(KernelError) as caught:
        kernel.register_kretprobe(Kretprobe(symbol_name="gcd"))
    assert caught.value.errno == errno.EOPNOTSUPP
