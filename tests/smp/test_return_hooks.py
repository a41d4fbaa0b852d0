"""Return probes on several CPUs: guest code hooks and handles returns, with switches of CPU between any two
instructions.
"""

from __future__ import annotations

import pytest

from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.return_hook.return_hooks import SHADOW_STACKS
from tests.smp.conftest import Boot, clients
from tests.smp.seeds import seeds
from tests.smp.test_races import GFP_KERNEL, assert_well, function_calls, together

FUNCTIONS = ("__kmalloc", "int_sqrt")
CPUS = 4


@pytest.mark.parametrize("stack", SHADOW_STACKS)
@pytest.mark.parametrize("maxactive", [1, 0])
@pytest.mark.parametrize("seed", seeds(6, 6))
def test_every_call_counts_once(boot: Boot, stack: str, maxactive: int, seed: int) -> None:
    kernel = boot(CPUS, "x86_64", seed=seed, quantum=20)
    kernel.kretprobes.hooks.select_return_hook(stack)
    probes = {name: Kretprobe(symbol_name=name, maxactive=maxactive) for name in FUNCTIONS}
    in_python = Kretprobe(symbol_name="gcd", maxactive=maxactive, handler=lambda *_: None)
    kernel.register_kretprobes([*probes.values(), in_python])
    tasks = clients(kernel, CPUS)
    for number in range(8):
        with function_calls(kernel, tasks, "int_sqrt", number * number) as calls:
            assert together(kernel, calls) == [number] * CPUS
        with function_calls(kernel, tasks, "gcd", 12, 18) as calls:
            assert together(kernel, calls) == [6] * CPUS
        with function_calls(kernel, tasks, "__kmalloc", 64, GFP_KERNEL) as calls:
            held = together(kernel, calls)
        assert len(set(held)) == CPUS
    for name, entries in (("int_sqrt", 8 * CPUS), ("gcd", 8 * CPUS)):
        rp = probes.get(name, in_python)
        assert rp.hook is not None
        assert (rp.returns + rp.nmissed, rp.hook.active) == (entries, 0)
    rp = probes["__kmalloc"]
    assert rp.hook is not None
    assert rp.hook.active == 0
    assert rp.returns + rp.nmissed >= 8 * CPUS
    native = [rp.hook.code is not None for rp in probes.values() if rp.hook is not None]
    assert native == [True] * len(FUNCTIONS)
    kernel.unregister_kretprobes([*probes.values(), in_python])
    assert_well(kernel)


@pytest.mark.parametrize("stack", SHADOW_STACKS)
@pytest.mark.parametrize("nr_maxactive", [1, 0])
def test_calls_of_one_fprobe_keep_their_functions(boot: Boot, stack: str, nr_maxactive: int) -> None:
    """Functions of an fprobe share one pool of nodes.

    Returns of lcm, and of gcd inside lcm, are recorded for the right function.
    """
    kernel = boot(CPUS, "x86_64", seed=2, quantum=20)
    kernel.kretprobes.hooks.select_return_hook(stack)
    ring = kernel.hit_ring("ax", capacity=1024)
    fp = ring.fprobe("[gl]c[dm]", nr_maxactive=nr_maxactive)
    kernel.register_fprobe(fp)
    tasks = clients(kernel, CPUS)
    for _ in range(8):
        with function_calls(kernel, tasks, "lcm", 4, 6) as calls:
            assert together(kernel, calls) == [12] * CPUS
    assert fp.hook is not None
    assert fp.hook.code is not None
    assert (fp.hook.returned + fp.nmissed, fp.hook.active) == (2 * 8 * CPUS, 0)
    assert fp.hook.returned == ring.hits
    expected = {"gcd": (2,), "lcm": (12,)}
    named = {kernel.image.kallsyms.lookup_name(name): result for name, result in expected.items()}
    assert all(named[entry.address] == entry.registers for entry in ring.entries())
    kernel.unregister_fprobe(fp)
    assert_well(kernel)
