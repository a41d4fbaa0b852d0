"""Return probes on i386: both trampolines, with each shadow stack."""

from __future__ import annotations

from typing import Any

import pytest

from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.profile import PROFILES
from emulated_kernel.util.errors import KernelError
from tests.kprobes.return_hook.conftest import Boot, profiles_with_stacks


@pytest.mark.parametrize(("profile", "stack"), profiles_with_stacks(0))
def test_returns_are_seen_and_nothing_changes(boot: Boot, profile: str, stack: str) -> None:
    kernel = boot(profile=profile, return_hook=stack, arch="i386")
    machine = kernel.machine
    gcd = kernel.image.kallsyms.lookup_name("gcd")
    plain = machine.execute(_start(machine, gcd))
    returned: list[tuple[int, int]] = []

    def handler(_instance: Any, regs: Any) -> None:
        returned.append((regs.ax, regs.sp))

    probe = Kretprobe(symbol_name="gcd", handler=handler)
    if stack == "unified" and not PROFILES[profile].ftrace:
        with pytest.raises(KernelError, match="can't be traced"):
            kernel.register_kretprobe(probe)
        return
    kernel.register_kretprobe(probe)
    hooked = machine.execute(_start(machine, gcd))
    assert hooked == plain
    assert returned == [(12, machine.calls.stack_top + 4)]
    assert [kernel.call("gcd", 48, 36) for _ in range(3)] == [12] * 3
    assert [value for value, _ in returned] == [12] * 4
    kernel.unregister_kretprobe(probe)


def _start(machine: Any, address: int | None) -> Any:
    assert address is not None
    values = {"ax": 48, "dx": 36, "bx": 0x11111111, "si": 0x22222222, "flags": 0x246}
    return machine.regs.snapshot()._replace(ip=address, sp=machine.calls.stack_top, **values)
