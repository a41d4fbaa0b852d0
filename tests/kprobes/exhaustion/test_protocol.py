"""Every stage of patching with another CPU everywhere: a sample of the places; the whole is a command."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest

from emulated_kernel.arch.base import Live
from emulated_kernel.config import MachineConfig
from emulated_kernel.kernel import Kernel
from emulated_kernel.kprobes.garbage import TextGarbage
from emulated_kernel.kprobes.optimizer import Spans
from emulated_kernel.kprobes.text_poke import PokeStep, TextPoker
from tests.kprobes.exhaustion.compiled import CompiledProof
from tests.kprobes.exhaustion.proof import Place, Proof
from tests.kprobes.exhaustion.sites import SiteProof, fentry_sites
from tests.kprobes.optimizer.conftest import Boot, Probed
from tests.kprobes.optimizer.regions import optimizable

Where = tuple[str, int, int]
RISCV_OPTPROBES = "riscv-optprobes-2023"
SAMPLE = 40
COMPILED_SAMPLE = 10
SITES_SAMPLE = 5
BROKEN = {"x86_64": ("linux-6.1", 12), "riscv64": (RISCV_OPTPROBES, 4)}
"""Where protocols are broken: the profile, and how many places have to do."""


Find = Callable[[Probed], Iterator[Where]]
found: dict[tuple[Find, str, str], list[Where]] = {}
"""Looking through an image takes longer than proving a few of its places."""


def find_places(proof: Proof, find: Find) -> list[Where]:
    """All that there are."""
    kernel = proof.probed.kernel
    key = find, kernel.config.arch, kernel.kprobes.profile.name
    if key not in found:
        found[key] = list(find(proof.probed))
    return found[key]


def check_sample(proof: Proof, size: int, find: Find = optimizable) -> None:
    """A sample of the places, evenly spread over the image."""
    places = find_places(proof, find)
    for place in places[:: len(places) // size]:
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
    check_sample(proof, SAMPLE)
    assert proof.problems == []
    assert proof.runs > SAMPLE * 200
    assert proof.probed.kernel.machine.text.ledger == {}


@pytest.mark.parametrize(
    ("arch", "profile", "detour"),
    [
        ("x86_64", "linux-6.1", "liveness"),
        ("x86_64", "linux-6.1", "save-all"),
        ("i386", "linux-6.1", "liveness"),
        ("i386", "linux-6.1", "save-all"),
        ("riscv64", RISCV_OPTPROBES, "liveness"),
        ("riscv64i", RISCV_OPTPROBES, "save-all"),
    ],
)
def test_with_handlers_in_guest_code(arch: str, profile: str, detour: str) -> None:
    with Kernel(MachineConfig(arch=arch, profile=profile, detour=detour)) as kernel:
        proof = CompiledProof(Probed(kernel))
        check_sample(proof, COMPILED_SAMPLE)
        assert proof.problems == []
        assert proof.runs > COMPILED_SAMPLE * 800
        assert kernel.machine.text.ledger == {}


@pytest.mark.parametrize(
    ("arch", "detour"), [("x86_64", "liveness"), ("i386", "save-all"), ("riscv64", "liveness")]
)
def test_fentry_sites(arch: str, detour: str) -> None:
    with Kernel(MachineConfig(arch=arch, detour=detour)) as kernel:
        proof = SiteProof(Probed(kernel))
        check_sample(proof, SITES_SAMPLE, fentry_sites)
        assert proof.problems == []
        assert proof.runs > SITES_SAMPLE * 1000
        assert kernel.machine.text.ledger == {}


def replace_at_once(poker: TextPoker, va: int, insn: bytes) -> None:
    """All bytes of an instruction with no breakpoint before."""
    poker._text.poke(va, insn)
    poker._text.sync()


def replace_all_at_once(poker: TextPoker, insns: Mapping[int, bytes]) -> None:
    poker._text.poke_batch(insns.items())
    poker._text.sync()


def problems(proof: Proof, size: int) -> list[str]:
    """What the proof says of a handful of places."""
    lengths = proof.probed.kernel._arch.decode_length
    read = proof.probed.kernel.image.read
    places = [p for p in find_places(proof, optimizable) if lengths(read(p[2], 16), p[2]) > 1]
    for place in places[:: len(places) // size]:
        proof.check(place)
    return proof.problems


class TestBrokenProtocols:
    """The same proof finds each of them, at places whose first instruction is longer than a byte."""

    kind: type[Proof] = Proof

    @pytest.fixture(params=BROKEN)
    def proof(self, request: pytest.FixtureRequest) -> Iterator[Proof]:
        profile, self.sample = BROKEN[request.param]
        config = MachineConfig(arch=request.param, profile=profile, detour="liveness", run_budget=0.2)
        with Kernel(config) as kernel:
            yield self.kind(Probed(kernel))

    def problems(self, proof: Proof) -> list[str]:
        return problems(proof, self.sample)

    def test_sound(self, proof: Proof) -> None:
        assert self.problems(proof) == []

    @pytest.mark.parametrize("step", [PokeStep.BREAKPOINT, PokeStep.TAIL])
    def test_a_sync_left_out(self, proof: Proof, step: PokeStep, monkeypatch: pytest.MonkeyPatch) -> None:
        text = proof.probed.kernel.machine.text
        write = TextPoker._write

        def write_without(poker: TextPoker, now: PokeStep, va: int, insn: bytes) -> None:
            with monkeypatch.context() as patch:
                if now is step:
                    patch.setattr(text, "sync", lambda: None)
                write(poker, now, va, insn)

        monkeypatch.setattr(TextPoker, "_write", write_without)
        assert any("stale" in line for line in self.problems(proof))

    def test_all_bytes_at_once(self, proof: Proof, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TextPoker, "replace", replace_at_once)
        assert any("optimizing" in line and "stale" in line for line in self.problems(proof))

    def test_no_waiting_for_the_region(self, proof: Proof, monkeypatch: pytest.MonkeyPatch) -> None:
        def jump_over(place: Place, interiors: object, _slots: object) -> None:
            place._watched("optimizing", lambda: place._hold(False), interiors)  # type: ignore[arg-type]

        monkeypatch.setattr(Place, "_delays", jump_over)
        assert any("interior" in line for line in self.problems(proof))

    def test_a_detour_freed_too_soon(self, proof: Proof, monkeypatch: pytest.MonkeyPatch) -> None:
        optimizer = proof.probed.optimizer

        def forgetful(_optimizer: object) -> Spans:
            return []

        monkeypatch.setattr(type(optimizer), "_affected", forgetful)
        found = self.problems(proof)
        assert any("detour isn't waited for" in line for line in found)
        assert any("region or slot isn't waited for" in line for line in found)


class TestBrokenCompilers(TestBrokenProtocols):
    """The same with handlers in guest code."""

    kind = CompiledProof

    def test_replaced_code_forgotten(self, proof: Proof, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TextGarbage, "spans", [])
        found = self.problems(proof)
        assert any("replaced code isn't waited for" in line for line in found)
        assert any("region or slot isn't waited for" in line for line in found)

    def test_something_live_not_saved(self, proof: Proof, monkeypatch: pytest.MonkeyPatch) -> None:
        nothing = Live(frozenset({"sp"}), flags=False)
        monkeypatch.setattr(proof.probed.kernel.kprobes.compiler, "_live_at", lambda _addr: nothing)
        found = self.problems(proof)
        assert any("compiled: code" in line or "stub" in line for line in found)


class TestBrokenOnRiscv:
    """What there is to break where a jump is two instructions, and a breakpoint may be two pieces."""

    @pytest.fixture
    def proof(self) -> Iterator[Proof]:
        with Kernel(MachineConfig(arch="riscv64", profile=RISCV_OPTPROBES, run_budget=0.2)) as kernel:
            yield Proof(Probed(kernel))

    def test_interrupted_within_the_jump(self, proof: Proof) -> None:
        proof.probed.kernel.kprobes.hits.is_in_jump = lambda _ip: False
        assert any("jump +0x4" in line for line in problems(proof, 2))

    def test_interrupted_within_the_nops(self) -> None:
        with Kernel(MachineConfig(arch="riscv64", run_budget=0.2)) as kernel:
            proof = SiteProof(Probed(kernel))
            kernel.kprobes.hits.is_in_jump = lambda _ip: False
            check_sample(proof, 1, fentry_sites)
            assert any("nop +0x2" in line for line in proof.problems)
            assert any("call +0x4" in line for line in proof.problems)

    def test_a_long_breakpoint_at_once(self, proof: Proof, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TextPoker, "replace_all", replace_all_at_once)
        found = problems(proof, 4)
        assert any(": arming" in line and "stale" in line for line in found)
        assert any(": disarming" in line and "stale" in line for line in found)


def test_sites_that_become_calls_together_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextPoker, "replace_all", replace_all_at_once)
    with Kernel(MachineConfig(run_budget=0.2)) as kernel:
        proof = SiteProof(Probed(kernel))
        check_sample(proof, 1, fentry_sites)
        assert any("arming all" in line and "stale" in line for line in proof.problems)


def test_a_site_that_becomes_a_call_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextPoker, "replace", replace_at_once)
    with Kernel(MachineConfig(run_budget=0.2)) as kernel:
        proof = SiteProof(Probed(kernel))
        check_sample(proof, 1, fentry_sites)
        assert any("arming" in line and "stale" in line for line in proof.problems)
