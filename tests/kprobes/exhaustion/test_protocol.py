"""Every stage of patching, with another CPU at every instruction, proved for a sample of an image's places.

`python -m stress.exhaustion` proves all places.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import pytest

from emulated_kernel.arch.analysis.detour_region import LiveRegisters
from emulated_kernel.arch.analysis.tactic import Tactic
from emulated_kernel.arch.riscv.insn import REGISTER_NAMES, decode_all
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.codegen.deferred_free import DeferredFree
from emulated_kernel.kprobes.hit.insn_slots import InsnSlots
from emulated_kernel.kprobes.hit.partial_jumps import PartialJumpDetector
from emulated_kernel.kprobes.hit.steps import Steps
from emulated_kernel.kprobes.quiescence import Span
from emulated_kernel.machine.text.text_poke import PokeStep, TextPoker
from emulated_kernel.util.config import MachineConfig
from stress.exhaustion.compiled import CompiledProof
from stress.exhaustion.proof import Place, Proof
from stress.exhaustion.sites import SiteProof, fentry_sites
from tests.arch.decoding import insn_length
from tests.kprobes.optimizer.conftest import Boot, Probed
from tests.kprobes.optimizer.regions import exits, instructions, is_optimizable, live_at_exit
from tests.sample import fewer

Where = tuple[str, int, int]
RISCV_OPTPROBES = "riscv-optprobes-2023"
SAMPLE = fewer(40, 20)
COMPILED_SAMPLE = fewer(10, 10)
SITES_SAMPLE = fewer(5, 5)
BUDGET = 0.05
"""Seconds until a guest that a broken protocol makes loop is interrupted."""
BROKEN = {"x86_64": ("linux-6.1", 12), "riscv64": (RISCV_OPTPROBES, 4)}
"""Architecture -> profile, and number of places at which a broken protocol must be found."""


def sample(places: Sequence[Where], size: int, is_one: Callable[[Where], bool]) -> Iterator[Where]:
    """Yield about `size` places for which `is_one` is true, evenly spread over `places`.

    A check of all places would take longer than the proof of a few.
    """
    for start in range(0, len(places), len(places) // size):
        yield from islice(filter(is_one, places[start:]), 1)


def optimizable(proof: Proof, size: int) -> Iterator[Where]:
    """Return a sample of the places that can be optimized by a jump."""
    return sample(instructions(proof.probed), size, lambda place: is_optimizable(proof.probed, place))


def sites(proof: Proof, size: int) -> Iterator[Where]:
    """Return a sample of the fentry sites."""
    return sample(list(fentry_sites(proof.probed)), size, lambda _place: True)


def check(proof: Proof, places: Iterable[Where]) -> None:
    """Run the proof for each of `places`. Problems are collected in `proof.problems`."""
    for place in places:
        proof.check(place)


@pytest.mark.parametrize(
    ("arch", "profile"),
    [
        ("x86_64", "linux-6.1"),
        ("x86_64", "linux-6.1-nopreempt"),
        ("x86_64", "optprobes-2009"),
        ("i386", "linux-6.1"),
        ("i386", "optprobes-2009"),
        ("riscv64", RISCV_OPTPROBES),
        ("riscv64i", RISCV_OPTPROBES),
    ],
)
def test_every_cpu_goes_on_well(boot: Boot, arch: str, profile: str) -> None:
    proof = Proof(boot(profile, arch))
    check(proof, optimizable(proof, SAMPLE))
    assert proof.problems == []
    assert proof.runs > SAMPLE * 200
    assert proof.probed.kernel.machine.text.ledger == {}


@pytest.mark.parametrize(
    ("arch", "save_regs"),
    [
        *(("x86_64", None), ("x86_64", "live"), ("i386", None), ("i386", "all")),
        *(("riscv64", None), ("riscv64", "live"), ("riscv64i", "all")),
    ],
)
def test_where_linux_refuses(arch: str, save_regs: str | None) -> None:
    """The proof holds for a sample of the places at which only the extended strategy writes a jump."""
    with Kernel(MachineConfig(arch=arch, strategy="extended", save_regs=save_regs)) as kernel:
        probed = Probed(kernel)
        proof = Proof(probed) if save_regs is None else CompiledProof(probed)

        def is_one(place: Where) -> bool:
            return is_optimizable(probed, place) and bool(probed.region(place[2]).tactics)

        check(proof, sample(instructions(probed), COMPILED_SAMPLE * 2, is_one))
        assert proof.problems == []
        assert proof.runs > COMPILED_SAMPLE * 200
        assert kernel.machine.text.ledger == {}


@pytest.fixture
def riscv_calls() -> Iterator[CompiledProof]:
    """Return the proof of a kernel in which a detour may contain a relocated call."""
    with Kernel(MachineConfig(arch="riscv64", strategy="extended", save_regs="live")) as kernel:
        yield CompiledProof(Probed(kernel))


def test_a_call_of_a_function_that_names_another_temporary(riscv_calls: CompiledProof) -> None:
    """The proof holds for a relocated call although the called function's code makes more registers look
    live.

    Only the calling function decides which temporary registers are free there.
    """
    proof = riscv_calls
    probed = proof.probed
    verdict = probed.verdict

    def is_one(place: Where) -> bool:
        address = place[2]
        if not is_optimizable(probed, place) or Tactic.RELOCATED_BRANCH not in probed.region(address).tactics:
            return False
        leads_to = exits(probed, address, proof.length(address))
        return any(
            verdict.live_at(end).registers - live_at_exit(probed, address, end).registers for end in leads_to
        )

    [place] = sample(instructions(probed), 1, is_one)
    proof.check(place)
    assert proof.problems == []
    assert proof.runs > 1000


def test_a_temporary_that_the_called_function_reads(riscv_calls: CompiledProof) -> None:
    """At an exit into another function, a temporary register is live if an instruction of that function reads
    the register before any write.
    """
    probed = riscv_calls.probed
    image = probed.kernel.image
    symbols = {symbol.name: symbol for symbol in image.kallsyms.symbols}
    caller, called = symbols["ksys_read"].address, symbols["mutex_unlock"].address
    code = image.read(called, symbols["mutex_unlock"].size)
    insns = decode_all(code, called, compressed=True)
    [(tail, register)] = [(at, REGISTER_NAMES[insn.rs1]) for at, insn in insns if insn.is_indirect_jump]
    assert register in probed.verdict.live_at(called).registers
    assert register not in live_at_exit(probed, caller, called).registers
    assert register in live_at_exit(probed, caller, tail).registers


@pytest.mark.parametrize(
    ("arch", "profile", "save_regs"),
    [
        ("x86_64", "linux-6.1", "live"),
        ("x86_64", "linux-6.1", "all"),
        ("i386", "linux-6.1", "live"),
        ("i386", "linux-6.1", "all"),
        ("riscv64", RISCV_OPTPROBES, "live"),
        ("riscv64i", RISCV_OPTPROBES, "all"),
    ],
)
def test_with_handlers_in_guest_code(arch: str, profile: str, save_regs: str) -> None:
    with Kernel(MachineConfig(arch=arch, profile=profile, save_regs=save_regs)) as kernel:
        proof = CompiledProof(Probed(kernel))
        check(proof, optimizable(proof, COMPILED_SAMPLE))
        assert proof.problems == []
        assert proof.runs > COMPILED_SAMPLE * 800
        native = kernel.machine.hooks.native_traps
        assert native > COMPILED_SAMPLE * 100 or not kernel.machine.hooks.is_native
        assert kernel.machine.text.ledger == {}


@pytest.mark.parametrize(
    ("arch", "profile", "save_regs"),
    [
        ("x86_64", "kprobes-2010", None),
        ("x86_64", "kprobes-2010", "live"),
        ("x86_64", "djprobe-2007", None),
        ("i386", "kprobes-2010", "all"),
        ("riscv64", "linux-6.1", None),
        ("riscv64", "linux-6.1", "live"),
        ("riscv64i", "linux-6.1", "all"),
    ],
)
def test_where_there_are_only_breakpoints(arch: str, profile: str, save_regs: str | None) -> None:
    with Kernel(MachineConfig(arch=arch, profile=profile, save_regs=save_regs)) as kernel:
        probed = Probed(kernel)
        proof = Proof(probed) if save_regs is None else CompiledProof(probed)
        check(proof, optimizable(proof, COMPILED_SAMPLE))
        assert proof.problems == []
        assert proof.runs > COMPILED_SAMPLE * (10 if save_regs is None else 50)
        assert kernel.machine.text.ledger == {}


def returns(proof: Proof) -> Iterator[Where]:
    """Return one place for a jump whose first instruction is a `ret`, which Python emulates."""
    probed = proof.probed
    read = probed.kernel.image.read

    def is_one(place: Where) -> bool:
        return read(place[2], 1) == b"\xc3" and is_optimizable(probed, place)

    return sample(instructions(probed), 1, is_one)


@pytest.mark.parametrize("arch", ["x86_64", "i386"])
@pytest.mark.parametrize("profile", ["linux-6.1", "optprobes-2009", "kprobes-2010"])
@pytest.mark.parametrize("save_regs", [None, "live"])
def test_an_emulated_instruction(arch: str, profile: str, save_regs: str | None) -> None:
    with Kernel(MachineConfig(arch=arch, profile=profile, save_regs=save_regs)) as kernel:
        probed = Probed(kernel)
        proof = Proof(probed) if save_regs is None else CompiledProof(probed)
        check(proof, returns(proof))
        assert proof.problems == []
        assert proof.runs > 10


@pytest.mark.parametrize(("arch", "save_regs"), [("x86_64", "live"), ("i386", "all"), ("riscv64", "live")])
def test_fentry_sites(arch: str, save_regs: str) -> None:
    with Kernel(MachineConfig(arch=arch, save_regs=save_regs)) as kernel:
        proof = SiteProof(Probed(kernel))
        check(proof, sites(proof, SITES_SAMPLE))
        assert proof.problems == []
        assert proof.runs > SITES_SAMPLE * 1000
        assert kernel.machine.text.ledger == {}


def replace_all_at_once(
    poker: TextPoker, insns: Mapping[int, bytes], restored: Collection[int] = (), size: int = 0
) -> None:
    """Write all instructions, and all restored text, at once, without a breakpoint first.

    `insns`: address -> bytes of an instruction. `restored`: addresses at which `size` bytes of the original
    text are written again.
    """
    poker._text.poke_batch(insns.items())
    poker._text.restore_batch([*restored], size)
    poker._text.sync()


def longer(proof: Proof, size: int) -> Iterator[Where]:
    """Return a sample of the places for jumps whose first instruction is longer than a byte."""
    probed = proof.probed
    arch, read = probed.kernel.arch, probed.kernel.image.read

    def is_one(place: Where) -> bool:
        return insn_length(arch, read(place[2], 16)) > 1 and is_optimizable(probed, place)

    return sample(instructions(probed), size, is_one)


class AllReported(BaseException):
    """Ends a proof that has reported all problems that are sought."""


class SoughtProblems(list[str]):
    """The problems of a proof. `patterns`: regular expressions of the problems that are sought."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = patterns

    def append(self, line: str) -> None:
        """Append a problem. Raise AllReported if all problems that are sought are in the list."""
        super().append(line)
        if all(any(re.search(pattern, problem) for problem in self) for pattern in self._patterns):
            raise AllReported


def finds(proof: Proof, places: Iterable[Where], *problems: str) -> bool:
    """Return True if the proof reports all `problems`, which are regular expressions.

    Stop as soon as all of them were reported. The kernel is unusable afterwards.
    """
    proof.problems = SoughtProblems(problems)
    try:
        check(proof, places)
    except AllReported:
        return True
    return False


class TestBrokenProtocols:
    """The proof, which passes for the sound patching protocol, finds each broken protocol.

    The probed instructions are longer than a byte.
    """

    kind: type[Proof] = Proof

    @pytest.fixture(params=BROKEN)
    def proof(self, request: pytest.FixtureRequest) -> Iterator[Proof]:
        profile, self.sample = BROKEN[request.param]
        config = MachineConfig(arch=request.param, profile=profile, save_regs="live", run_budget=BUDGET)
        with Kernel(config) as kernel:
            yield self.kind(Probed(kernel))

    def finds(self, proof: Proof, *problems: str) -> bool:
        return finds(proof, longer(proof, 15 * self.sample), *problems)

    def test_sound(self, proof: Proof) -> None:
        check(proof, longer(proof, fewer(self.sample, 3)))
        assert proof.problems == []

    @pytest.mark.parametrize("step", [PokeStep.BREAKPOINT, PokeStep.TAIL])
    def test_a_sync_left_out(self, proof: Proof, step: PokeStep, monkeypatch: pytest.MonkeyPatch) -> None:
        text = proof.probed.kernel.machine.text
        write = TextPoker._write

        def write_without(poker: TextPoker, now: PokeStep, insns: Mapping[int, bytes]) -> None:
            with monkeypatch.context() as patch:
                if now is step:
                    patch.setattr(text, "sync", lambda: None)
                write(poker, now, insns)

        monkeypatch.setattr(TextPoker, "_write", write_without)
        assert self.finds(proof, "stale")

    def test_all_bytes_at_once(self, proof: Proof, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TextPoker, "replace_all", replace_all_at_once)
        assert self.finds(proof, "optimizing.*stale")

    def test_no_waiting_for_the_region(self, proof: Proof, monkeypatch: pytest.MonkeyPatch) -> None:
        def jump_over(place: Place, interiors: object, _slots: object) -> None:
            place._watched("optimizing", lambda: place._hold(False), interiors)  # type: ignore[arg-type]

        monkeypatch.setattr(Place, "_delays", jump_over)
        assert self.finds(proof, "interior")

    def test_a_detour_freed_too_soon(self, proof: Proof, monkeypatch: pytest.MonkeyPatch) -> None:
        optimizer = proof.probed.optimizer

        def forgetful(_optimizer: object) -> list[Span]:
            return []

        monkeypatch.setattr(type(optimizer), "_affected", forgetful)
        assert self.finds(proof, "detour isn't waited for", "region or slot isn't waited for")


class TestBrokenCompilers(TestBrokenProtocols):
    """With handlers in guest code, the proof finds the broken protocols, and in addition broken compilers of
    handlers.
    """

    kind = CompiledProof

    def test_replaced_code_forgotten(self, proof: Proof, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(DeferredFree, "spans", [])
        assert self.finds(proof, "replaced code isn't waited for", "region or slot isn't waited for")

    def test_something_live_not_saved(self, proof: Proof, monkeypatch: pytest.MonkeyPatch) -> None:
        """The proof finds a compiler that does not save live registers.

        The proof starts at the places where most registers that calls do not preserve are live, because the
        fault shows soonest there.
        """
        nothing = LiveRegisters(frozenset({"sp"}), flags=False)
        verdict = proof.probed.kernel.kprobes.compiler._verdict
        places = list(longer(proof, 15 * self.sample))
        places.sort(
            key=lambda place: sum(name[0] != "s" for name in verdict.live_at(place[2]).registers),
            reverse=True,
        )
        monkeypatch.setattr(verdict, "live_at", lambda _addr: nothing)
        assert finds(proof, places, "compiled: code|stub")


class TestBrokenOnRiscv:
    """The proof finds faults that only RISC-V can have: a jump is two instructions, and a breakpoint may be
    written in two pieces.
    """

    @pytest.fixture
    def proof(self) -> Iterator[Proof]:
        with Kernel(MachineConfig(arch="riscv64", profile=RISCV_OPTPROBES, run_budget=BUDGET)) as kernel:
            yield Proof(Probed(kernel))

    def test_interrupted_within_the_jump(self, proof: Proof, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(PartialJumpDetector, "contains", lambda _self, _ip: False)
        assert finds(proof, longer(proof, 2), r"jump \+0x4")

    def test_interrupted_within_the_nops(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with Kernel(MachineConfig(arch="riscv64", run_budget=BUDGET)) as kernel:
            proof = SiteProof(Probed(kernel))
            monkeypatch.setattr(PartialJumpDetector, "contains", lambda _self, _ip: False)
            assert finds(proof, sites(proof, 1), r"nop \+0x2", r"call \+0x4")

    def test_a_long_breakpoint_at_once(self, proof: Proof, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TextPoker, "replace_all", replace_all_at_once)
        assert finds(proof, longer(proof, 24), ": arming.*stale", ": disarming.*stale")


class TestBrokenBreakpoints:
    """On kernels without jumps, the proof finds a slot that is freed too soon, and a CPU in a single step
    that is overlooked.
    """

    @pytest.fixture(params=[("x86_64", "djprobe-2007"), ("riscv64", "linux-6.1")])
    def proof(self, request: pytest.FixtureRequest) -> Iterator[Proof]:
        arch, profile = request.param
        config = MachineConfig(arch=arch, profile=profile, save_regs="live", run_budget=BUDGET)
        with Kernel(config) as kernel:
            yield CompiledProof(Probed(kernel))

    def test_a_slot_freed_too_soon(self, proof: Proof, monkeypatch: pytest.MonkeyPatch) -> None:
        free = InsnSlots.free

        def free_now(slots: InsnSlots, slot: int, *, dirty: bool, on_free: Callable[[], None]) -> None:  # noqa: ARG001
            free(slots, slot, on_free=on_free)

        monkeypatch.setattr(InsnSlots, "free", free_now)
        assert finds(proof, longer(proof, 8), "slot isn't waited for")

    def test_a_cpu_in_a_step_unseen(self, proof: Proof, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Steps, "at", lambda _self, _ip: None)
        assert finds(proof, longer(proof, 8), r"slot \+0x0 is not seen")


def test_sites_that_become_calls_together_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextPoker, "replace_all", replace_all_at_once)
    with Kernel(MachineConfig(run_budget=BUDGET)) as kernel:
        proof = SiteProof(Probed(kernel))
        assert finds(proof, sites(proof, 1), "arming all.*stale")


def test_a_site_that_becomes_a_call_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextPoker, "replace_all", replace_all_at_once)
    with Kernel(MachineConfig(run_budget=BUDGET)) as kernel:
        proof = SiteProof(Probed(kernel))
        assert finds(proof, sites(proof, 1), "arming.*stale")
