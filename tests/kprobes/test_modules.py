"""Probes in modules: registered by symbol and by address, gone with the module's code, and possible again
after the module is loaded again.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.optimizer.optimizer import Optimizer
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.kprobes.listed import list_lines
from tests.kprobes.scripted import script
from tests.ledger import ledger_mismatches


class Probed:
    """A kernel with a loaded module, and the hits of the probes in this module."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.hits: list[str] = []

    def probe(self, place: str, **options: Any) -> Kprobe:
        """Register a probe on SYMBOL+OFFSET that records its hits."""
        symbol, _, offset = place.partition("+")

        def note(_kprobe: Kprobe, _regs: Any) -> None:
            self.hits.append(place)

        kprobe = Kprobe(symbol_name=symbol, offset=int(offset or "0", 0), pre_handler=note, **options)
        self.kernel.register_kprobe(kprobe)
        return kprobe

    def address(self, symbol: str) -> int:
        found = self.kernel.live.kallsyms.lookup_name(symbol)
        assert found is not None
        return found

    def listed(self) -> list[str]:
        """Return the lines of kprobes/list without addresses."""
        return [line.split(maxsplit=2)[2] for line in list_lines(self.kernel.kprobes)]

    def every_probe(self, *functions: str) -> list[Kprobe]:
        """Register a probe at each offset below 16 of each function where this is possible."""
        found = []
        for function in functions:
            for offset in range(16):
                with suppress(KernelError):
                    found.append(self.probe(f"{function}+{offset}"))
        return found

    @property
    def optimizer(self) -> Optimizer:
        optimizer = self.kernel.kprobes.optimizer
        assert optimizer is not None
        return optimizer

    def optimize(self) -> None:
        self.optimizer.work.flush()


@pytest.fixture
def probed() -> Iterator[Probed]:
    with Kernel() as kernel:
        kernel.load_module("ktgt")
        yield Probed(kernel)
        assert not ledger_mismatches(kernel.machine.text)


def test_the_blacklist_names_its_module(probed: Probed) -> None:
    own = [line for line in probed.kernel.kprobes.blacklist_text() if "[" in line]
    start = probed.address("ktgt_np")
    assert len(own) == 1
    assert own[0].startswith(f"0x{start:016x}-")
    assert own[0].endswith("\tktgt_np [ktgt]\n")


def resources(kernel: Kernel) -> tuple[int, int, int]:
    """Return the numbers of slots, of pieces of executable memory, and of breakpoint handlers in use."""
    kernel.kprobes.garbage.collect()
    text = kernel.machine.text
    return kernel.kprobes.slots.used, text._slots.used, len(kernel.machine.breakpoints)


class TestPlaces:
    def test_by_symbol_with_and_without_the_module(self, probed: Probed) -> None:
        probed.probe("ktgt_add+5")
        probed.probe("ktgt:ktgt_add")
        assert probed.kernel.call("ktgt_add", 3, 4) == 7
        assert probed.hits == ["ktgt:ktgt_add", "ktgt_add+5"]
        assert sorted(probed.listed()) == [
            "ktgt_add+0x0  ktgt [FTRACE]\n",
            "ktgt_add+0x5  ktgt [OPTIMIZED]\n",
        ]

    @pytest.mark.parametrize(
        ("place", "number"),
        [
            ("ktgt_np", errno.EINVAL),
            ("ktgt_data", errno.EINVAL),
            ("ktgt:ktgt_initfn", errno.ENOENT),
            ("ktgt:no_such", errno.ENOENT),
            ("other:ktgt_add", errno.ENOENT),
            ("ktgt_add+100000", errno.ENOENT),
            ("ktgt_add+1", errno.EILSEQ),
        ],
    )
    def test_where_none_can_be(self, place: str, number: int, probed: Probed) -> None:
        before = resources(probed.kernel)
        with pytest.raises(KernelError) as failure:
            probed.probe(place)
        assert failure.value.errno == number
        assert resources(probed.kernel) == before

    def test_a_bug_site(self, probed: Probed) -> None:
        (site,) = set(probed.kernel.live.bugs) - set(probed.kernel.image.bugs)
        with pytest.raises(KernelError) as failure:
            probed.kernel.register_kprobe(Kprobe(addr=site))
        assert failure.value.errno == errno.EINVAL

    def test_a_fault_is_fixed_up_in_the_module(self, probed: Probed) -> None:
        probes = probed.every_probe("ktgt_peek")
        assert len(probes) > 3
        assert probed.kernel.call("ktgt_peek", 0) == (1 << 64) - 1
        banner = probed.address("linux_banner")
        assert probed.kernel.call("ktgt_peek", banner) == int.from_bytes(b"Linux ve", "little")


class TestGone:
    def test_all_kinds_give_back_what_they_hold(self, probed: Probed) -> None:
        """Unloading the module frees what int3, optimized and fentry probes use, with one probe or several at
        an address.
        """
        kernel = probed.kernel
        # The page of slots that the first probe allocates stays allocated.
        kernel.unregister_kprobe(probed.probe("vfs_read+5"))
        probed.optimize()
        before = resources(kernel)
        probes = probed.every_probe("ktgt_add", "ktgt_str", "ktgt_warn", "ktgt_add")
        probed.optimize()
        assert {kernel.kprobes.mode(probe) for probe in probes} == {"int3", "optimized", "ftrace"}
        kernel.unload_module("ktgt")
        assert resources(kernel) == before
        assert kernel.machine.text.ledger == {}
        assert all(line.startswith("0xffffffffc00000") and " [GONE]" in line for line in probed.listed())
        assert {kernel.kprobes.mode(probe) for probe in probes} == {"gone"}
        for probe in probes:
            kernel.unregister_kprobe(probe)
        assert probed.listed() == []

    def test_they_can_be_disabled_but_not_enabled(self, probed: Probed) -> None:
        kernel = probed.kernel
        probe = probed.probe("ktgt_add+5")
        kernel.unload_module("ktgt")
        kernel.disable_kprobe(probe)
        with pytest.raises(KernelError) as failure:
            kernel.enable_kprobe(probe)
        assert failure.value.errno == errno.EINVAL
        assert kernel.kprobes.reason(probe).endswith("the probed code is gone")

    def test_the_queue_of_the_optimizer_forgets_them(self, probed: Probed) -> None:
        kernel = probed.kernel
        queued = probed.probe("ktgt_add+5")
        assert probed.optimizer.optimizing
        kernel.unload_module("ktgt")
        assert not probed.optimizer.optimizing
        probed.optimize()
        assert kernel.kprobes.mode(queued) == "gone"

    def test_one_that_waits_for_its_unoptimization(self, probed: Probed) -> None:
        kernel = probed.kernel
        probe = probed.probe("ktgt_add+5")
        probed.optimize()
        assert kernel.kprobes.table.is_patched(probe)
        kernel.unregister_kprobe(probe)
        assert probed.optimizer.unoptimizing
        kernel.unload_module("ktgt")
        probed.optimize()
        assert probed.listed() == []
        assert not probed.optimizer.is_queued(probe)

    def test_one_that_waits_to_be_freed(self, probed: Probed) -> None:
        """A probe was unregistered and its text restored, but a task may still be in its detour when the
        module is unloaded.

        The detour is freed when no task is in the detour.
        """
        kernel, optimizer = probed.kernel, probed.optimizer
        probe = probed.probe("ktgt_add+5")
        probed.optimize()
        kernel.unregister_kprobe(probe)
        scheduler = script(kernel)
        scheduler.quiescent_in = lambda _spans: False
        probed.optimize()
        assert optimizer.freeing
        kernel.unload_module("ktgt")
        probed.optimize()
        scheduler.quiescent_in = lambda _spans: True
        probed.optimize()
        assert not optimizer.freeing

    def test_all_armed_and_disarmed_leaves_them_alone(self, probed: Probed) -> None:
        kernel = probed.kernel
        probed.every_probe("ktgt_add")
        kernel.unload_module("ktgt")
        kernel.kprobes.set_enabled(False)
        kernel.kprobes.set_enabled(True)
        assert all("[GONE]" in line for line in probed.listed())

    def test_disarmed_fentry_probes_go_too(self, probed: Probed) -> None:
        probed.probe("ktgt_add")
        probed.kernel.kprobes.set_enabled(False)
        probed.kernel.unload_module("ktgt")
        assert "[GONE][FTRACE]" in probed.listed()[0]


class TestAgain:
    def test_a_new_probe_where_a_gone_one_is(self, probed: Probed) -> None:
        kernel = probed.kernel
        old = [probed.probe("ktgt_add"), probed.probe("ktgt_add+5")]
        kernel.unload_module("ktgt")
        kernel.load_module("ktgt")
        new = [probed.probe("ktgt_add"), probed.probe("ktgt_add+5")]
        assert kernel.call("ktgt_add", 1, 1) == 2
        assert probed.hits == ["ktgt_add", "ktgt_add+5"]
        assert sorted(probed.listed()) == [
            "ktgt_add+0x0  ktgt [FTRACE]\n",
            "ktgt_add+0x0  ktgt [GONE][FTRACE]\n",
            "ktgt_add+0x5  ktgt [GONE][OPTIMIZED]\n",
            "ktgt_add+0x5  ktgt [OPTIMIZED]\n",
        ]
        probed.optimize()
        assert kernel.kprobes.table.is_patched(new[1])
        for probe in old + new:
            kernel.unregister_kprobe(probe)
        assert probed.listed() == []

    def test_other_code_at_the_same_address(self, probed: Probed) -> None:
        """If another module is loaded at the address of an unloaded one, the analysis of the old code is not
        used for the new code.
        """
        kernel = probed.kernel
        probed.every_probe("ktgt_add", "ktgt_str")
        kernel.unload_module("ktgt")
        kernel.load_module("twins")
        address = probed.address("first_twin")
        assert kernel.live.kallsyms.lookup(address).module == "twins"  # type: ignore[union-attr]
        assert kernel.call("first_twin", 4) == 10
        probes = probed.every_probe("first_twin", "second_twin")
        probed.hits.clear()
        assert kernel.call("first_twin", 4) == 10
        assert kernel.call("second_twin", 4) == 18
        assert set(probed.hits) >= {"first_twin+0", "second_twin+0"}
        assert not any(probe.is_gone for probe in probes)


class TestInit:
    def test_a_probe_in_init_text_is_gone_when_init_is_over(self, probed: Probed) -> None:
        kernel = probed.kernel
        kernel.unload_module("ktgt")
        caught: list[int] = []
        later = Kprobe(symbol_name="ktgt:ktgt_initfn", pre_handler=lambda _k, regs: caught.append(regs.di))
        notify = kernel.modules.notify

        def register(state: Any, module: int) -> None:
            notify(state, module)
            if kernel.live.kallsyms.lookup_name("ktgt:ktgt_initfn") and later.addr is None:
                kernel.kprobes.register_kprobe(later)

        kernel.modules.notify = register
        kernel.load_module("ktgt")
        assert caught == [21]
        assert later.is_gone
        assert probed.listed() == [f"0x{later.addr:x} [GONE][FTRACE]\n"]
        assert kernel.live.kallsyms.lookup(later.address) is None


def test_names_of_two_functions(probed: Probed) -> None:
    """If two functions have the same name, a probe by name is on the first one in kallsyms.

    A probe by address can be on either.
    """
    kernel = probed.kernel
    kernel.load_module("twins")
    first, second = kernel.live.kallsyms.by_name("twins:twin")
    probed.probe("twins:twin")
    assert list_lines(kernel.kprobes)[0].startswith(f"{first.address:016x}")
    kprobe = Kprobe(addr=second.address, pre_handler=lambda _k, _r: probed.hits.append("second"))
    kernel.register_kprobe(kprobe)
    assert kernel.call("second_twin", 0) == 6
    assert kernel.call("first_twin", 0) == 2
    assert probed.hits == ["second", "twins:twin"]


@pytest.mark.parametrize("profile", ["linux-6.1", "linux-6.1-nopreempt", "kprobes-2010", "optprobes-2009"])
def test_all_profiles(profile: str) -> None:
    with Kernel(MachineConfig(profile=profile)) as kernel:
        probed = Probed(kernel)
        kernel.load_module("ktgt")
        probes = probed.every_probe("ktgt_add", "ktgt_str", "ktgt_peek")
        assert kernel.call("ktgt_add", 3, 4) == 7
        assert kernel.call("ktgt_str", "ab") == 195
        assert kernel.call("ktgt_peek", 0) == (1 << 64) - 1
        assert len(probed.hits) > 10
        kernel.unload_module("ktgt")
        assert all(probe.is_gone for probe in probes)
        assert kernel.kprobes.slots.used == 0
