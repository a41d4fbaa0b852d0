"""The probe registry: Linux's checks, aggregation, enabling and arming, batches, exhaustion."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.table import hash_address
from emulated_kernel.machine.memory.pool import UnitPool
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.errors import KernelError
from tests.kprobes.boundaries import all_boundaries
from tests.kprobes.listed import list_lines
from tests.sample import share

INT3 = 0xCC


def address(kernel: Kernel, name: str) -> int:
    found = kernel.image.kallsyms.lookup_name(name)
    assert found is not None, name
    return found


def refused(kernel: Kernel, kprobe: Kprobe) -> str:
    """Return the name of the errno with which registering `kprobe` fails.

    Check that no part of the registration remains.
    """
    before = (list_lines(kernel.kprobes), dict(kernel.machine.text.ledger), kernel.kprobes.slots.used)
    with pytest.raises(KernelError) as caught:
        kernel.register_kprobe(kprobe)
    after = (list_lines(kernel.kprobes), dict(kernel.machine.text.ledger), kernel.kprobes.slots.used)
    assert before == after
    return caught.value.name


def flags(kernel: Kernel) -> list[str]:
    """Return the flags that kprobes/list shows for each probe."""
    return [line.rstrip("\n").split("    ")[-1] for line in list_lines(kernel.kprobes)]


def is_armed(kernel: Kernel, addr: int) -> bool:
    return kernel.machine.memory.read(addr, 1)[0] == INT3


# Where a probe may stand


def test_refused_places(kernel: Kernel) -> None:
    (text,) = kernel.image.text_ranges
    strlen = address(kernel, "strlen")
    inside = next(b for b in all_boundaries(kernel.image) if b.addr >= strlen and b.size > 1)
    places = {
        "both names of a place": (Kprobe(symbol_name="strlen", addr=strlen), "EINVAL"),
        "both, unknown": (Kprobe(symbol_name="no_such_function", addr=strlen), "EINVAL"),
        "no place": (Kprobe(), "EINVAL"),
        "no place but an offset": (Kprobe(offset=4), "EINVAL"),
        "unknown symbol": (Kprobe(symbol_name="no_such_function"), "ENOENT"),
        "unknown symbol, disabled": (Kprobe(symbol_name="no_such_function", disabled=True), "ENOENT"),
        "below the kernel": (Kprobe(addr=text.start - PAGE_SIZE), "ENOENT"),
        "user memory": (Kprobe(addr=0x1000), "ENOENT"),
        "behind the kernel": (Kprobe(addr=kernel.image.kallsyms.end), "ENOENT"),
        "offset that leaves the kernel": (Kprobe(symbol_name="strlen", offset=1 << 40), "ENOENT"),
        "data": (Kprobe(symbol_name="init_task"), "EINVAL"),
        "read-only data": (Kprobe(symbol_name="linux_banner"), "EINVAL"),
        "NOKPROBE": (Kprobe(addr=kernel.image.blacklist[0].start), "EINVAL"),
        "inside of NOKPROBE": (Kprobe(addr=kernel.image.blacklist[0].start + 1), "EINVAL"),
        "entry code": (Kprobe(symbol_name="asm_host_interrupt"), "EINVAL"),
        "BUG()": (Kprobe(addr=next(iter(kernel.image.bugs))), "EINVAL"),
        "inside an instruction": (Kprobe(addr=inside.addr + 1), "EILSEQ"),
    }
    assert {name: refused(kernel, kprobe) for name, (kprobe, _) in places.items()} == {
        name: errno_name for name, (_, errno_name) in places.items()
    }


def test_a_refused_probe_can_be_used_for_another_place(kernel: Kernel) -> None:
    kprobe = Kprobe(symbol_name="strlen", offset=1 << 40)
    assert refused(kernel, kprobe) == "ENOENT"
    kprobe.offset = 0
    kernel.register_kprobe(kprobe)
    kernel.unregister_kprobe(kprobe)
    kernel.register_kprobe(kprobe)
    assert kprobe.address == address(kernel, "strlen")
    kernel.unregister_kprobe(kprobe)


def test_an_address_without_a_name_and_an_offset(kernel: Kernel) -> None:
    vfs_read = address(kernel, "vfs_read")
    second = next(b.addr for b in all_boundaries(kernel.image) if b.addr > vfs_read)
    by_offset = Kprobe(addr=vfs_read, offset=second - vfs_read)
    kernel.register_kprobe(by_offset)
    assert by_offset.address == second
    assert list_lines(kernel.kprobes) == [f"{second:016x}  k  vfs_read+0x{second - vfs_read:x}    \n"]
    kernel.unregister_kprobe(by_offset)


def test_registering_twice(kernel: Kernel) -> None:
    by_address = Kprobe(addr=address(kernel, "strlen"))
    kernel.register_kprobe(by_address)
    assert refused(kernel, by_address) == "EINVAL"
    kernel.register_kprobe(Kprobe(symbol_name="strlen"))
    assert refused(kernel, by_address) == "EINVAL"


def test_nmissed_and_failures_begin_at_zero(kernel: Kernel) -> None:
    kprobe = Kprobe(symbol_name="strlen")
    kprobe.nmissed, kprobe.raised = 7, 3
    kernel.register_kprobe(kprobe)
    assert (kprobe.nmissed, kprobe.failures) == (0, 0)


def test_what_needs_a_registered_probe(kernel: Kernel) -> None:
    kprobe = Kprobe(symbol_name="strlen")
    kernel.unregister_kprobe(kprobe)
    for act in (kernel.enable_kprobe, kernel.disable_kprobe):
        with pytest.raises(KernelError) as caught:
            act(kprobe)
        assert caught.value.errno == errno.EINVAL
    kernel.unregister_kprobe(lost := Kprobe(addr=address(kernel, "strlen")))
    assert lost.addr is None
    kernel.register_kprobe(Kprobe(symbol_name="strlen"))
    with pytest.raises(KernelError):
        kernel.disable_kprobe(Kprobe(addr=address(kernel, "strlen")))
    assert is_armed(kernel, address(kernel, "strlen"))


# Batches


def test_batch_is_all_or_nothing(kernel: Kernel) -> None:
    for bad in (Kprobe(symbol_name="no_such_function"), Kprobe(symbol_name="init_task")):
        batch = [Kprobe(symbol_name=name) for name in ("strlen", "vfs_read", "strlen")]
        with pytest.raises(KernelError):
            kernel.register_kprobes([*batch, bad, Kprobe(symbol_name="vfs_write")])
        assert list_lines(kernel.kprobes) == []
        assert kernel.machine.text.ledger == {}
        assert kernel.kprobes.slots.used == 0
        assert len(kernel.machine.breakpoints) == 1, "the tracepoints' alone"
    kernel.register_kprobes(batch)
    assert len(list_lines(kernel.kprobes)) == 3
    kernel.unregister_kprobes(batch)
    assert kernel.machine.text.ledger == {}


def test_empty_batch_and_the_same_probe_twice(kernel: Kernel) -> None:
    with pytest.raises(KernelError) as caught:
        kernel.register_kprobes([])
    assert caught.value.errno == errno.EINVAL
    kernel.unregister_kprobes([])
    kprobe = Kprobe(symbol_name="strlen")
    with pytest.raises(KernelError):
        kernel.register_kprobes([kprobe, kprobe])
    assert list_lines(kernel.kprobes) == []


def test_slot_exhaustion(kernel: Kernel) -> None:
    pages = kernel.machine.memory.host_pages
    taken = list(_all_of(pages))
    boundaries = [b for b in all_boundaries(kernel.image) if b.refusal is None]
    stepped = [Kprobe(addr=b.addr) for b in share(boundaries, 0, 12)]
    with pytest.raises(KernelError) as caught:
        kernel.register_kprobes(stepped)
    assert caught.value.errno == errno.ENOMEM
    assert (list_lines(kernel.kprobes), kernel.kprobes.slots.used) == ([], 0)
    assert kernel.machine.text.ledger == {}
    for page in taken:
        pages.free(page)
    kernel.register_kprobes(stepped)
    assert len(kernel.machine.text.ledger) == len(stepped)
    kernel.unregister_kprobes(stepped)
    assert kernel.kprobes.slots.used == 0


def _all_of(pages: UnitPool) -> Iterator[int]:
    try:
        while True:
            yield pages.alloc(PAGE_SIZE)
    except HardwareError:
        return


# Several probes at one address


def test_aggregated_probes(kernel: Kernel) -> None:
    order: list[int] = []

    def handler(number: int, result: int = 0) -> Any:
        return lambda _kprobe, _regs: order.append(number) or result

    def post(number: int) -> Any:
        return lambda _kprobe, _regs: order.append(number)

    probes = [
        Kprobe(symbol_name="strlen", pre_handler=handler(n), post_handler=post(-n) if n != 2 else None)
        for n in (1, 2, 3)
    ]
    kernel.register_kprobes(probes)
    assert kernel.kprobes.slots.used <= 1
    assert kernel.call("strlen", "abc") == 3
    assert order == [3, 2, 1, -3, -1]
    order.clear()
    kernel.disable_kprobe(probes[2])
    kernel.call("strlen", "")
    assert order == [2, 1, -1]
    order.clear()
    kernel.unregister_kprobe(probes[0])
    kernel.enable_kprobe(probes[2])
    kernel.call("strlen", "")
    assert order == [3, 2, -3]
    kernel.unregister_kprobes(probes)
    assert list_lines(kernel.kprobes) == []
    assert not is_armed(kernel, address(kernel, "strlen"))


def test_a_handler_that_returns_1_ends_the_hit(kernel: Kernel) -> None:
    order: list[str] = []

    def skip(_kprobe: Kprobe, regs: Any) -> int:
        order.append("skip")
        regs.ip = kernel.machine.memory.read_u64(regs.sp)
        regs.sp += 8
        regs.ax = 42
        return 1

    older = Kprobe(symbol_name="strlen", pre_handler=lambda *_: order.append("older"))  # type: ignore[func-returns-value]
    newer = Kprobe(symbol_name="strlen", pre_handler=skip, post_handler=lambda *_: order.append("post"))
    kernel.register_kprobes([older, newer])
    assert kernel.call("strlen", "abc") == 42
    assert order == ["skip"]
    assert kernel.kprobes.hits.may_interrupt()
    kernel.disable_kprobe(newer)
    assert kernel.call("strlen", "abc") == 3
    assert order == ["skip", "older"]


def test_disabling_members_and_the_head(kernel: Kernel) -> None:
    strlen = address(kernel, "strlen")
    one, two = Kprobe(addr=strlen), Kprobe(addr=strlen, disabled=True)
    kernel.register_kprobes([one, two])
    assert flags(kernel) == ["[DISABLED]", ""]
    kernel.disable_kprobe(one)
    assert not is_armed(kernel, strlen)
    kernel.disable_kprobe(one)
    kernel.enable_kprobe(two)
    kernel.enable_kprobe(two)
    assert is_armed(kernel, strlen)
    assert flags(kernel) == ["", "[DISABLED]"]
    kernel.unregister_kprobe(two)
    assert not is_armed(kernel, strlen)
    kernel.enable_kprobe(one)
    assert is_armed(kernel, strlen)


def test_a_second_probe_arms_a_disabled_first(kernel: Kernel) -> None:
    strlen = address(kernel, "strlen")
    first = Kprobe(addr=strlen, disabled=True)
    kernel.register_kprobe(first)
    assert not is_armed(kernel, strlen)
    kernel.register_kprobe(Kprobe(addr=strlen))
    assert is_armed(kernel, strlen)
    assert flags(kernel) == ["", "[DISABLED]"]


# All disarmed


def test_enabling_a_lone_probe_while_all_are_disarmed_does_nothing(kernel: Kernel) -> None:
    """As in Linux, enable_kprobe() succeeds, but the probe stays disabled when all probes are armed again."""
    kprobe = Kprobe(symbol_name="strlen", disabled=True)
    kernel.register_kprobe(kprobe)
    kernel.kprobes.set_enabled(False)
    kernel.enable_kprobe(kprobe)
    assert flags(kernel) == ["[DISABLED]"]
    kernel.kprobes.set_enabled(True)
    assert flags(kernel) == ["[DISABLED]"]
    assert kernel.machine.text.ledger == {}


def test_enabling_an_aggregated_probe_while_all_are_disarmed_clears_its_own_flag_only(kernel: Kernel) -> None:
    strlen = address(kernel, "strlen")
    probes = [Kprobe(addr=strlen, disabled=True) for _ in range(2)]
    kernel.register_kprobes(probes)
    kernel.kprobes.set_enabled(False)
    kernel.enable_kprobe(probes[0])
    kernel.kprobes.set_enabled(True)
    assert flags(kernel) == ["[DISABLED]", ""]
    assert not is_armed(kernel, strlen)


def test_registering_and_disabling_while_all_are_disarmed(kernel: Kernel) -> None:
    names = ("strlen", "vfs_read", "vfs_write")
    kernel.register_kprobe(probes := Kprobe(symbol_name=names[0]))
    kernel.kprobes.set_enabled(False)
    kernel.kprobes.set_enabled(False)
    others = [Kprobe(symbol_name=name) for name in names[1:]]
    kernel.register_kprobes(others)
    kernel.disable_kprobe(others[0])
    assert kernel.machine.text.ledger == {}
    assert sorted(flags(kernel)) == ["", "", "[DISABLED]"]
    kernel.kprobes.set_enabled(True)
    assert kernel.machine.text.ledger.keys() == {probes.address, others[1].address}
    kernel.kprobes.set_enabled(False)
    kernel.unregister_kprobes([probes, *others])
    kernel.kprobes.set_enabled(True)
    assert kernel.machine.text.ledger == {}


def test_list_is_in_the_order_of_the_hash_buckets(kernel: Kernel) -> None:
    probeable = [b.addr for b in all_boundaries(kernel.image) if b.refusal is None][::40]
    probes = [Kprobe(addr=addr) for addr in probeable]
    kernel.register_kprobes(probes)
    again = Kprobe(addr=probeable[0])
    kernel.register_kprobe(again)
    listed = [int(line.split()[0], 16) for line in list_lines(kernel.kprobes)]
    table: list[list[int]] = [[] for _ in range(64)]
    for addr in probeable:
        table[hash_address(addr)].insert(0, addr)
    expected = [addr for chain in table for addr in chain]
    expected.insert(expected.index(probeable[0]), probeable[0])
    assert listed == expected
    assert [probe.address for probe in kernel.kprobes] == expected
    assert max(map(len, table)) > 1, "no bucket has a chain"
    # A read continues with the next bucket, and does not read earlier buckets again.
    records = list(kernel.kprobes.list_records(0))
    assert len(records) == len(table)
    assert list(kernel.kprobes.list_records(60)) == records[60:]
    kernel.unregister_kprobes([*probes, again])
