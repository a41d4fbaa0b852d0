"""Every operation that changes probes needs the control lock, and fails without the lock."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.hit.ftrace import FtraceSites
from emulated_kernel.kprobes.hit.ftrace_ops import FtraceOps
from emulated_kernel.kprobes.kinds.fprobe import Fprobe
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.registry import Kprobes

CHANGES: dict[str, Callable[[Kprobes, Kprobe], object]] = {
    "register": lambda kprobes, _probe: kprobes.register_kprobe(Kprobe(symbol_name="gcd")),
    "unregister": lambda kprobes, probe: kprobes.unregister_kprobe(probe),
    "enable": lambda kprobes, probe: kprobes.enable_kprobe(probe),
    "disable": lambda kprobes, probe: kprobes.disable_kprobe(probe),
    "arm all": lambda kprobes, _probe: kprobes.set_enabled(True),
    "disarm all": lambda kprobes, _probe: kprobes.set_enabled(False),
    "optimization": lambda kprobes, _probe: kprobes.set_optimization(False),
    "optimized": lambda kprobes, probe: kprobes.set_optimized(probe, False),
    "commit": lambda kprobes, _probe: kprobes.commit_kprobes(),
    "kill": lambda kprobes, _probe: kprobes.kill_within(()),
    "tables": lambda kprobes, _probe: kprobes.tables_changed(),
    "handler": lambda kprobes, probe: kprobes.handler_changed(probe),
    "text": lambda kprobes, probe: kprobes.poker.replace(probe.address, b"\xcc"),
}


@pytest.mark.usefixtures("strict_lock")
def test_no_change_without_the_lock() -> None:
    with Kernel() as kernel:
        probe = Kprobe(symbol_name="gcd", offset=5)
        kernel.register_kprobe(probe)
        for name, change in CHANGES.items():
            with pytest.raises(AssertionError, match="control lock"):
                change(kernel.kprobes, probe)
            assert kernel.kprobes.mode(probe) == "int3", name
        with kernel.lock:
            kernel.kprobes.disable_kprobe(probe)
        assert kernel.kprobes.mode(probe) == "disarmed"


OTHER_CHANGES: dict[str, Callable[[Kernel], object]] = {
    "call": lambda kernel: kernel.guest.call_function("gcd", 12, 18),
    "tracer": lambda kernel: sites(kernel).attach(FtraceOps(lambda _site, _regs: None, lambda: "none"), ()),
    "register fprobe": lambda kernel: kernel.fprobes.register_fprobe(Fprobe(filter="gcd")),
    "unregister fprobe": lambda kernel: kernel.fprobes.unregister_fprobe(Fprobe(filter="gcd")),
    "return hook": lambda kernel: kernel.kretprobes.hooks.add(lambda _instance, _regs: None, 1),
    "shadow stack": lambda kernel: kernel.kretprobes.hooks.select_return_hook("fgraph"),
    "make instance": lambda kernel: kernel.trace_arrays.make("other"),
    "remove instance": lambda kernel: kernel.trace_arrays.remove("none"),
    "code of sites": lambda kernel: sites(kernel).set_code(FtraceOps(lambda *_: None, lambda: "none"), {}),
    "buffers": lambda kernel: kernel.trace.resize_buffer(64),
    "current tracer": lambda kernel: kernel.trace.set_tracer("function"),
    "files opened": lambda kernel: kernel.mount().open_in_guest(),
    "clock": lambda kernel: kernel.components.clock.select("virtual", None),
    "start load": lambda kernel: kernel.loads.parsed("fork")(),
    "stop load": lambda kernel: kernel.loads.parsed("stop")(),
}


def sites(kernel: Kernel) -> FtraceSites:
    assert kernel.kprobes.sites is not None
    return kernel.kprobes.sites


@pytest.mark.usefixtures("strict_lock")
@pytest.mark.parametrize("change", OTHER_CHANGES)
def test_nothing_else_changes_without_the_lock(change: str) -> None:
    with Kernel() as kernel, pytest.raises(AssertionError, match="control lock"):
        OTHER_CHANGES[change](kernel)
