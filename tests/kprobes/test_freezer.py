"""The freezer: tasks that were really preempted, threads that don't freeze, and the commit."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from emulated_kernel.arch.analysis.region import Region
from emulated_kernel.config import MachineConfig
from emulated_kernel.errors import KernelError
from emulated_kernel.host.executive.executive import NSEC_PER_JIFFY
from emulated_kernel.kernel import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.machine.guest_info import TaskInfo
from tests.ledger import ledger_mismatches

PF_NOFREEZE, PF_FROZEN = 0x8000, 0x10000
ARCHITECTURES = ("x86_64", "i386")
FOR_EVER = 1 << 28
MAX_PREEMPTIONS = 500
CLIENTS = range(5000, 5003)


class Freezing:
    """A preemptible kernel of djprobe's with a thread that spins through crc32_le()."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.places = self.regions()

    def task(self, comm: str) -> TaskInfo:
        return next(task for task in self.kernel.guest.kernel.tasks() if task.comm == comm)

    def flags(self, task: TaskInfo) -> int:
        return self.kernel.machine.memory.read_u32(task.addr + self.kernel.image.abi["task_struct.flags"])

    def set_flag(self, task: TaskInfo, flag: int) -> None:
        at = task.addr + self.kernel.image.abi["task_struct.flags"]
        self.kernel.machine.memory.write_u32(at, self.flags(task) | flag)

    def start(self, function: str, argument: int, name: str) -> TaskInfo:
        """Run a kernel thread."""
        address = self.kernel.image.kallsyms.by_name(function)[0].address
        self.kernel.call("kthread_run", address, argument, name.encode())
        return self.task(name)

    def regions(self) -> list[tuple[int, int]]:
        """Offset and length of the regions of the loop in crc32_le() that have an inner boundary."""
        verdict, entry = (
            self.kernel.kprobes.verdict,
            self.kernel.image.kallsyms.by_name("crc32_le")[0].address,
        )
        found = []
        for offset in range(0x10, 0x40):
            region = verdict.detoured(entry + offset)
            if isinstance(region, Region):
                found.append((offset, region.length))
        return found

    def time(self) -> Kprobe:
        """A probe by which time passes while the thread runs; the guest's own time stands still then."""
        advance = self.kernel.machine.clock.advance
        return Kprobe(symbol_name="crc32_le", pre_handler=lambda _kprobe, _regs: advance(NSEC_PER_JIFFY))

    def preempt_in_region(self) -> tuple[int, int]:
        """Let ticks preempt the thread until one met it within a region; the region's offset and length."""
        kernel = self.kernel
        entry = kernel.image.kallsyms.by_name("crc32_le")[0].address
        for _ in range(MAX_PREEMPTIONS):
            kernel.register_kprobe(time := self.time())
            kernel.call("msleep", 4)
            kernel.unregister_kprobe(time)
            for offset, length in self.places:
                inner = [(entry + offset + 1, entry + offset + length)]
                with kernel.lock:
                    is_met = not kernel.guest.kernel.is_quiescent(inner)
                if is_met:
                    return offset, length
        pytest.fail("never preempted within a region")

    def register(self, place: tuple[int, int]) -> Kprobe:
        offset, length = place
        kprobe = Kprobe(
            symbol_name="crc32_le", offset=offset, length=length, pre_handler=lambda _kprobe, _regs: None
        )
        self.kernel.register_kprobe(kprobe)
        return kprobe

    def refused(self) -> str:
        """What a commit says that ends in EBUSY; nothing is written then."""
        before = dict(self.kernel.machine.text.ledger)
        with pytest.raises(KernelError) as caught:
            self.kernel.commit_kprobes()
        assert caught.value.errno == errno.EBUSY
        assert self.kernel.machine.text.ledger == before
        return caught.value.strerror or ""


@pytest.fixture(params=ARCHITECTURES)
def freezing(request: pytest.FixtureRequest) -> Iterator[Freezing]:
    config = MachineConfig(arch=request.param, quantum=20, run_budget=5, profile="djprobe-2007-preempt")
    with Kernel(config) as kernel:
        yield Freezing(kernel)
        assert ledger_mismatches(kernel.machine.text) == []


def test_a_task_that_was_preempted_in_the_region_runs_on_to_the_refrigerator(freezing: Freezing) -> None:
    kernel = freezing.kernel
    freezing.start("load_memory", FOR_EVER, "spin")
    kprobe = freezing.register(freezing.preempt_in_region())
    frozen: list[int] = []
    seen = Kprobe(
        symbol_name="thaw_processes",
        pre_handler=lambda _kprobe, _regs: frozen.append(freezing.flags(freezing.task("spin")) & PF_FROZEN),
    )
    kernel.register_kprobe(freezing.time())
    kernel.register_kprobe(seen)
    kernel.commit_kprobes()
    kernel.unregister_kprobe(seen)
    assert frozen == [PF_FROZEN]
    assert kernel.kprobes.mode(kprobe) == "optimized"
    assert kernel.machine.text.current(kprobe.address, 1) == b"\xe9"
    assert not freezing.flags(freezing.task("spin")) & PF_FROZEN


def test_who_never_comes_to_a_safe_point(freezing: Freezing) -> None:
    kernel = freezing.kernel
    sleeper = freezing.start("schedule_timeout_uninterruptible", FOR_EVER, "sleeper")
    kprobe = freezing.register(freezing.places[0])
    assert "not all tasks freeze" in freezing.refused()
    told = "\n".join(message.text for message in kernel.guest.messages())
    assert "Freezing of tasks failed after 2.000 seconds (1 tasks refusing to freeze):" in told
    assert f"task:sleeper pid:{sleeper.pid}" in told
    assert not any(freezing.flags(task) & PF_FROZEN for task in kernel.guest.kernel.tasks())
    kernel.call("wake_up_process", sleeper.addr)
    kernel.commit_kprobes()
    assert kernel.kprobes.mode(kprobe) == "optimized"


def test_clients_go_on_behind_the_commit(freezing: Freezing) -> None:
    """Those in user mode; each answers its next system call."""
    kernel = freezing.kernel
    guest = kernel.guest
    with kernel.lock:
        tasks = [guest.mirror.resident(pid, "client") for pid in CLIENTS]
        with guest.frozen() as all_frozen:
            assert all_frozen
            states = {task.comm: task.state for task in guest.kernel.tasks()}
            assert (states["client"], states["init"], states["kthreadd"]) == ("D", "D", "I")
        for task in tasks:
            assert guest.syscalls.call(task, "getpid") == task.pid


def test_a_thaw_that_is_killed_leaves_nobody_frozen(freezing: Freezing) -> None:
    kernel = freezing.kernel
    kprobe = freezing.register(freezing.places[0])

    def redirect(_kprobe: Kprobe, _regs: object) -> int:
        kernel.machine.regs.ip = kernel.image.kallsyms.by_name("do_task_dead")[0].address
        return 1

    fatal = Kprobe(symbol_name="thaw_processes", pre_handler=redirect)
    kernel.register_kprobe(fatal)
    with pytest.raises(KernelError):
        kernel.commit_kprobes()
    kernel.unregister_kprobe(fatal)
    assert kernel.kprobes.mode(kprobe) == "optimized"
    assert kernel.call("gcd", 12, 18) == 6
    kernel.commit_kprobes()
