"""An optimizer that waits after each step of patching: text, files and hits during each wait, and what ends a
wait early.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.errors import KernelError
from tests.kprobes.optimizer.conftest import Boot, Probed
from tests.kprobes.optimizer.test_in_kernel import Files

STATS = "/kprobes/stats/kprobes/ev"


class Staged:
    """A kernel with a probe in gcd whose patching stops at each stage. look() calls gcd and checks its
    hit.
    """

    def __init__(self, probed: Probed, offset: int, trap: bytes) -> None:
        self.probed = probed
        self.kprobes = probed.kernel.kprobes
        self.offset = offset
        self.trap = trap
        self.kprobes.set_stages(True)
        self.probe = probed.probe("gcd", offset)

    @property
    def bytes(self) -> bytes:
        detour = self.kprobes.detour(self.probe)
        assert detour is not None
        return self.probed.text("gcd", self.offset, len(detour.jump))

    @property
    def reason(self) -> str:
        return self.kprobes.reason(self.probe).partition("stages: ")[2].partition(";")[0]

    def look(self) -> tuple[bytes, str]:
        """Call gcd, which must hit the probe once; return the text at the probe and the stage."""
        assert self.probed.gcd() == [("gcd", self.offset)]
        return self.bytes, self.reason


KERNELS = [("linux-6.1", "x86_64", 5, b"\xcc"), ("riscv-optprobes-2023", "riscv64", 34, b"\x02\x90")]


@pytest.fixture(params=KERNELS)
def staged(request: pytest.FixtureRequest, boot: Boot) -> Staged:
    """Return a kernel with a probe that is a breakpoint and about to be optimized.

    On RISC-V, the breakpoint has four bytes.
    """
    profile, arch, offset, trap = request.param
    return Staged(boot(profile, arch), offset, trap)


def test_each_stage_and_back(staged: Staged) -> None:
    armed, _ = staged.look()
    detour = staged.kprobes.detour(staged.probe)
    assert detour is not None
    size = len(staged.trap)
    staged.probed.settle()
    assert staged.look() == (staged.trap + armed[size:], "breakpoint written")
    staged.kprobes.next_stage()
    assert staged.look() == (
        staged.trap + detour.jump[size:],
        "tail of the jump written",
    )
    staged.kprobes.next_stage()
    assert staged.bytes == detour.jump
    for _ in range(3):
        assert len(staged.probed.gcd()) == 1
    staged.kprobes.set_optimization(False)
    assert staged.look() == (staged.trap + detour.jump[size:], "breakpoint written over the jump")
    staged.kprobes.next_stage()
    assert staged.look() == (staged.trap + armed[size:], "original tail written")
    staged.kprobes.next_stage()
    assert staged.look() == (armed, "")
    with pytest.raises(KernelError) as caught:
        staged.kprobes.next_stage()
    assert caught.value.errno == errno.EINVAL


def test_an_optimization_turns_round_at_the_same_text(staged: Staged) -> None:
    staged.probed.settle()
    staged.kprobes.next_stage()
    written, _ = staged.look()
    staged.kprobes.disable_kprobe(staged.probe)
    assert (staged.bytes, staged.reason) == (written, "")
    assert staged.probed.gcd() == []
    staged.kprobes.enable_kprobe(staged.probe)
    assert staged.look() == (written, "tail of the jump written")
    staged.kprobes.next_stage()
    assert staged.kprobes.mode(staged.probe) == "optimized"


def test_removed_at_a_stop(staged: Staged) -> None:
    staged.probed.settle()
    staged.kprobes.next_stage()
    staged.probed.kernel.unregister_kprobe(staged.probe)
    assert staged.probed.gcd() == []
    for _ in range(2):
        staged.kprobes.next_stage()
    staged.probed.settle()
    assert staged.probed.kernel.machine.text.ledger == {}


ENDS: dict[str, Callable[[Staged], object]] = {
    "all disarmed": lambda staged: staged.kprobes.set_enabled(False),
    "switched off": lambda staged: staged.kprobes.set_stages(False),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("steps", [0, 1])
def test_ends_at_once(staged: Staged, end: str, steps: int) -> None:
    staged.probed.settle()
    for _ in range(steps):
        staged.kprobes.next_stage()
    ENDS[end](staged)
    assert not staged.probed.optimizer.stages
    if staged.kprobes.table.all_disarmed:
        assert staged.probed.gcd() == []
        assert staged.probed.kernel.machine.text.ledger == {}
        staged.kprobes.set_enabled(True)
        assert staged.look()[0][: len(staged.trap)] != b""
    else:
        assert staged.kprobes.mode(staged.probe) == "optimized"


def test_a_probe_in_the_region_ends_the_stop(staged: Staged) -> None:
    """Arming a probe in the region ends the stop of an unoptimization, because the jump may not cover an
    armed breakpoint.
    """
    staged.probed.settle()
    staged.kprobes.next_stage()
    arch, region = staged.probed.kernel.arch, staged.probed.region(staged.probe.address)
    _, second, *_ = arch.instruction_boundaries(region.code, region.addr)
    inner = Kprobe(addr=second)
    staged.probed.kernel.register_kprobe(inner)
    assert staged.look()[1] == ""
    assert not staged.probed.optimizer.stages
    staged.probed.kernel.unregister_kprobe(inner)


def test_stops_for_a_time(staged: Staged) -> None:
    optimizer = staged.probed.optimizer
    staged.kprobes.set_stages(True, 10)
    now = 0
    for work in (optimizer.work, optimizer.stages.work):
        work._scheduler = optimizer.stages._scheduler
    scheduler = optimizer.stages._scheduler
    scheduler.jiffies = lambda: now
    staged.probed.settle()
    seen = []
    for now in (9, 10, 19, 20, 21):  # noqa: B007 - the scheduler returns it
        optimizer.stages.work.run_if_due()
        seen.append(staged.reason)
    assert seen == ["breakpoint written", *["tail of the jump written"] * 2, "", ""]
    assert staged.kprobes.mode(staged.probe) == "optimized"


def test_the_file(probed: Probed) -> None:
    files = Files(probed.kernel)
    assert files.read("/kprobes/stages") == "0\n"
    for bad in ("2", "1 x", "next", "0 5", ""):
        with pytest.raises(KernelError) as caught:
            files.write("/kprobes/stages", bad)
        assert caught.value.errno == errno.EINVAL
    files.write("/kprobes/stages", "1 250")
    assert files.read("/kprobes/stages") == "1 252\n"
    files.write("/kprobes/stages", "1")
    files.write("/kprobe_events", "p:ev gcd+5")
    files.write("/tracing/events/kprobes/ev/enable", "1")
    files.write(f"{STATS}/optimized", "1")
    head, line = files.read("/kprobes/stages").splitlines()
    assert head == "1"
    assert "gcd+0x5" in line
    assert "breakpoint written" in line
    assert "[OPTIMIZED]" in files.read("/kprobes/list")
    assert "jump leads here" not in files.read(f"{STATS}/detour")
    files.write("/kprobes/stages", "next")
    current = files.read(f"{STATS}/bytes").splitlines()[1]
    assert current.split()[1] == "cc"
    assert probed.text("gcd", 5).hex(" ") in current
    assert files.read(f"{STATS}/mode") == "int3\n"
    files.write("/kprobes/stages", "next")
    assert files.read(f"{STATS}/mode") == "optimized\n"
    assert "jump leads here" in files.read(f"{STATS}/detour")
    files.write("/kprobes/stages", "0")


@pytest.mark.parametrize(("profile", "arch", "offset", "trap"), KERNELS)
def test_a_compiled_handler_moves_no_jump_while_changes_stop(
    boot: Boot, profile: str, arch: str, offset: int, trap: bytes
) -> None:
    """While `kprobes/stages` is 1, the text changes only at stops of the optimizer.

    A handler that is compiled meanwhile does not move the jump.
    """
    probed = boot(profile, arch)
    kprobes = probed.kernel.kprobes
    files = Files(probed.kernel)
    files.write("/kprobe_events", f"p:ev gcd+{offset}")
    files.write("/tracing/events/kprobes/ev/enable", "1")
    files.write(f"{STATS}/optimized", "1")
    head = kprobes.table.get(probed.address("gcd", offset))
    assert head is not None
    assert head.detour is not None
    jump = head.detour.jump

    def texts() -> list[bytes]:
        """Return the text before each of three calls of gcd, which would compile the handler."""
        seen = []
        for _ in range(3):
            seen.append(probed.text("gcd", offset, len(jump)))
            probed.gcd()
        return seen

    assert texts()[-1] != jump
    files.write("/kprobes/stages", "1")
    assert texts() == [jump] * 3
    kprobes.set_optimization(False)
    assert texts() == [trap + jump[len(trap) :]] * 3
    kprobes.set_optimization(True)
    # The change is reversed; the text is the same as at the second stage.
    files.write("/kprobes/stages", "next")
    assert texts() == [jump] * 3
    files.write("/kprobes/stages", "0")
    assert texts()[0] == jump
    assert texts()[-1] != jump
    assert files.read(f"{STATS}/hits") == "18\n"
