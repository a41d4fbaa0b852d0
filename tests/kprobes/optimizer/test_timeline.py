"""States of the list and of the text between enabling and disabling a probe, in the order in which a real
kernel showed these states.
"""

from __future__ import annotations

from emulated_kernel.kprobes.kprobe import Kprobe
from tests.kprobes.optimizer.conftest import GCD_HEAD, GCD_TAIL, Probed
from tests.vfs.oracle import oracle_path, quirks

PLACE = f"gcd+0x{GCD_HEAD:x}"


def states(probed: Probed, probe: Kprobe) -> list[tuple[str, str]]:
    """Return (first byte, flags) after each step of the recorded timeline."""
    kprobes, seen = probed.kernel.kprobes, []

    def look() -> None:
        first = {0xCC: "cc", 0xE9: "e9"}.get(probed.text("gcd", GCD_HEAD)[0], "orig")
        seen.append((first, probed.flags()[PLACE]))

    kprobes.enable_kprobe(probe)
    look()
    probed.settle()
    look()
    kprobes.disable_kprobe(probe)
    look()
    probed.settle()
    look()
    kprobes.enable_kprobe(probe)
    probed.settle()
    kprobes.set_optimization(False)
    look()
    kprobes.set_optimization(True)
    look()
    look()
    probed.settle()
    look()
    kprobes.set_enabled(False)
    look()
    kprobes.set_enabled(True)
    look()
    look()
    probed.settle()
    look()
    return seen


def test_follows_the_recorded_timeline(probed: Probed) -> None:
    (name,) = [name for name in quirks() if name.startswith("optimizer_timeline")]
    (_, original), *steps = quirks()[name]
    expected = [("orig" if original.startswith(code) else code[:2], flags) for _, code, flags in steps]
    assert states(probed, probed.probe("gcd", GCD_HEAD, disabled=True)) == expected


def test_sysctl_waits_for_the_worker_one_way_only(probed: Probed) -> None:
    probed.probe("gcd", GCD_HEAD)
    probed.settle()
    probed.kernel.kprobes.set_optimization(False)
    assert probed.optimizer.work.due is None
    assert not probed.optimizer.allowed
    probed.kernel.kprobes.set_optimization(True)
    assert probed.optimizer.work.due is not None


def test_an_optimizable_probe_is_an_aggregate(probed: Probed) -> None:
    """As in Linux, enabling an optimizable probe while all probes are disarmed removes [DISABLED], but the
    probe is not armed afterwards.

    After another disabling and enabling, the probe is armed.
    """
    kprobes = probed.kernel.kprobes
    alone, aggregated = probed.probe("gcd", 0, disabled=True), probed.probe("gcd", GCD_HEAD, disabled=True)
    kprobes.set_enabled(False)
    for probe in (alone, aggregated):
        kprobes.enable_kprobe(probe)
    kprobes.set_enabled(True)
    assert probed.flags() == {"gcd+0x0": "[DISABLED][FTRACE]", PLACE: ""}
    assert probed.gcd() == []
    assert "disable and enable" in kprobes.reason(aggregated)
    kprobes.disable_kprobe(aggregated)
    kprobes.enable_kprobe(aggregated)
    assert probed.flags()[PLACE] == "[OPTIMIZED]"


class TestRecordedList:
    """The states of kprobes/list in samples/kprobes_list_states.txt, replayed on gcd and int_sqrt without
    return probes.
    """

    def sections(self) -> dict[str, dict[str, str]]:
        path = oracle_path("samples/kprobes_list_states.txt")
        places = {
            "vfs_mkdir+0x0": "gcd+0x0",
            "vfs_mkdir+0x9": PLACE,
            "vfs_mkdir+0xc": f"gcd+0x{GCD_TAIL:x}",
        }
        found: dict[str, dict[str, str]] = {}
        for part in path.read_text().split("--- ")[1:]:
            title, *lines = part.splitlines()
            section: dict[str, str] = {}
            found[title] = section
            for line in lines:
                _, kind, place, *flags = line.split()
                if kind == "k" and place in places:
                    old = section.get(places[place])
                    section[places[place]] = "".join(flags) if old is None else f"{old},{''.join(flags)}"
        return found

    def test_replay(self, probed: Probed) -> None:
        recorded = self.sections()
        kprobes = probed.kernel.kprobes

        def expect(title: str) -> None:
            assert probed.flags() == recorded[title], title

        first = probed.probe("gcd", 0, disabled=True)
        optimizable = probed.probe("gcd", GCD_HEAD, disabled=True)
        second = probed.probe("gcd", 0, disabled=True)
        expect("registered, all disabled")
        kprobes.enable_kprobe(first)
        kprobes.enable_kprobe(optimizable)
        expect("fent+opt just enabled")
        probed.settle()
        expect("after 2s")
        kprobes.enable_kprobe(second)
        expect("fent2 enabled too (same address, aggregated)")
        kprobes.disable_kprobe(first)
        expect("fent disabled, fent2 enabled")
        kprobes.set_optimization(False)
        expect("sysctl optimization=0")
        kprobes.set_optimization(True)
        expect("sysctl optimization=1 immediately")
        probed.settle()
        expect("2s later")
        kprobes.set_enabled(False)
        expect("kprobes/enabled=0")
        kprobes.set_enabled(True)
        expect("kprobes/enabled=1 immediately")
        probed.settle()
        kprobes.set_enabled(False)
        kprobes.set_optimization(False)
        kprobes.set_enabled(True)
        expect("enabled=0; opt=0; enabled=1")
        kprobes.set_optimization(True)
        expect("opt=1")
        probed.settle()
        inside = probed.probe("gcd", GCD_TAIL, disabled=True)
        expect("second probe registered inside the optimized region (disabled)")
        kprobes.enable_kprobe(inside)
        probed.settle()
        expect("second probe inside region enabled")
        kprobes.disable_kprobe(inside)
        probed.settle()
        expect("second probe disabled again")
        kprobes.disable_kprobe(optimizable)
        kprobes.disable_kprobe(second)
        expect("all disabled")
        assert probed.kernel.machine.text.ledger == {}
