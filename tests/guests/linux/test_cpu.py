"""--cpu: a kernel boots and patches itself as on a production CPU, and commands name this CPU."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulated_kernel.guests.linux.boot import snapshot
from emulated_kernel.guests.linux.boot_cache import kernel_as_booted, started_with_kernel
from emulated_kernel.guests.linux.cpu.cpu_archive import cpu_of_archive, parts_of, production_cpu
from emulated_kernel.guests.linux.cpu.cpu_models import MODELS
from emulated_kernel.guests.linux.cpu.cpuid_answers import (
    ARCH_CAPABILITIES,
    MICROCODE,
    MISC_ENABLE,
    CpuidAnswers,
)
from emulated_kernel.guests.linux.cpu.cpuid_bits import AX, BITS, BX, CX, DX, KEPT_OUT
from emulated_kernel.guests.linux.cpu.derived_bits import decided_bits, derived_bits
from emulated_kernel.guests.linux.cpu.production_cpu import AMD, INTEL, ProductionCpu, from_text
from emulated_kernel.guests.linux.guest.cpu_report import CpuReport, cpu_text, rdmsr_sites
from emulated_kernel.guests.linux.initramfs import BUFFER
from emulated_kernel.guests.linux.pc.emulated_cpuid import emulated_cpuid
from emulated_kernel.guests.linux.pc.linux_cpu import PRODUCTION_MODEL
from emulated_kernel.image.linux.cpu_features import feature_numbers
from emulated_kernel.image.linux.linux_kernel import ReturnThunks
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from kprobefs.cli.main import main
from kprobefs.daemon.backends import build_kernel
from kprobefs.mount_options import MountOptions
from kprobefs.plan.planned_kernel import planned_kernel
from tests.guests.linux import debian_kernel, probing
from tests.guests.linux.files import Files
from tests.guests.linux.parts import calls_of

RECORDED = sorted(Path(__file__).with_name("cpus").glob("*.cpu"))
SERVER = "skylake-sp"
"""A CPU with page table isolation, on which a thread can read data of the other thread of its core."""
SHORT_COPIES = "sapphire-rapids"
"""A CPU on which also short copies are fast, with all features of the Intel models."""
PLACE = "tcp_sendmsg+5"
GETPID = 39
PATCHED = ("crypto-simd", "aes_ti")
"""Small modules that the kernel patches at the load; the first one depends on another such module."""
FAILING = "aegis128-aesni"
"""A module that depends on other modules, and whose init function needs a feature that the emulator lacks."""
XSAVES = b"\x48\x0f\xc7\x2f"
WORDS = {
    (1, 0, DX): 0,
    (0x80000001, 0, DX): 1,
    (1, 0, CX): 4,
    (0x80000001, 0, CX): 6,
    (7, 0, BX): 9,
    (0xD, 1, AX): 10,
    (0x80000008, 0, BX): 13,
    (7, 0, CX): 16,
    (7, 0, DX): 18,
}
"""Register of CPUID -> the word of Linux's features that it fills."""


def unseen(_done: int, _total: int) -> None:
    """Ignore the progress of a boot."""


# Archives


def archive(**parts: str) -> str:
    return "".join(f"==> /{name.replace('__', '/')} <==\n{text}\n\n" for name, text in parts.items())


INFO = (
    "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 85\nmodel name\t: A CPU\n"
    "stepping\t: 7\nmicrocode\t: 0x5003707\nsiblings\t: 40\ncpu cores\t: 20\nflags\t\t: fpu ibrs\n\n"
    "processor\t: 1\nvendor_id\t: Other\n"
)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_an_archive_says_what_was_recorded(path: Path) -> None:
    cpu = production_cpu(str(path))
    text = path.read_text()
    assert f"model name\t: {cpu.model_name}\n" in text
    assert f"flags\t\t: {' '.join(cpu.flags)}\n" in text
    assert len(cpu.vulnerabilities) == text.count("vulnerabilities/")
    assert all(f"/{file} <==\n{said}\n" in text for file, said in cpu.vulnerabilities.items())
    assert cpu.has_siblings == (cpu.threads == 2)
    assert from_text(cpu.as_text()) == cpu


def test_only_the_first_cpu_of_cpuinfo_counts_and_other_parts_are_not_kept() -> None:
    parts = parts_of(
        archive(proc__cpuinfo=INFO, proc__cmdline="root=/dev/sda1 mitigations=auto,nosmt quiet pti=on")
        + archive(sys__vulnerabilities__mds="Not affected", proc__secret="x")
    )
    cpu = cpu_of_archive("here", parts)
    assert (cpu.vendor, cpu.signature, cpu.microcode, cpu.threads) == (INTEL, 0x50657, 0x5003707, 2)
    assert cpu.parameters == ("mitigations=auto,nosmt", "pti=on")
    assert cpu.vulnerabilities == {"mds": "Not affected"}
    assert "sda1" not in cpu.as_text()
    assert "secret" not in cpu.as_text()


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({}, "no cpuinfo in the archive"),
        ({"proc__cpuinfo": INFO}, "no files of vulnerabilities"),
        ({"proc__cpuinfo": "processor: 0\n", "v__vulnerabilities__mds": "x"}, "'cpu family'"),
        ({"proc__cpuinfo": INFO.replace("fpu ibrs", ""), "v__vulnerabilities__mds": "x"}, "flags"),
        ({"proc__cpuinfo": INFO, "v__vulnerabilities__mds": "x", "msr 0x10a": "much"}, "msr 0x10a"),
    ],
)  # fmt: skip
def test_an_incomplete_archive_names_what_it_lacks(parts: dict[str, str], why: str) -> None:
    with pytest.raises(KernelError, match=why):
        cpu_of_archive("it", parts_of(archive(**parts)))


def test_the_command_in_the_error_makes_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of /proc/cpuinfo is no archive; the shell command in the error writes the parts of an
    archive.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "copy").write_text(INFO)
    with pytest.raises(KernelError, match="no cpuinfo in the archive") as refused:
        production_cpu(str(tmp_path / "copy"))
    command = str(refused.value.strerror).split("`")[1]
    # tail fails if the host has no such directory below /sys.
    subprocess.run(["sh", "-c", command], capture_output=True, check=False)
    parts = parts_of((tmp_path / "FILE").read_text())
    assert {"/proc/cpuinfo", "/proc/cmdline", "/proc/sys/kernel/osrelease"} <= parts.keys()


@given(st.text(max_size=2000) | st.text("=> <\n:0x19avp/cuinfo ", max_size=400))
def test_any_text_is_an_archive_or_refused(text: str) -> None:
    with suppress(KernelError):
        assert cpu_of_archive("it", parts_of(text)).vulnerabilities


def test_the_register_of_an_archive_beats_what_is_derived() -> None:
    flags = INFO.replace("fpu ibrs", "fpu ibrs arch_capabilities")
    parts = archive(proc__cpuinfo=flags, v__vulnerabilities__mds="Not affected")
    derived = cpu_of_archive("it", parts_of(parts))
    recorded = cpu_of_archive("it", parts_of(f"{parts}==> msr 0x10a <==\n0x6b\n"))
    assert recorded.capabilities == 0x6B
    assert derived.capabilities & 1 << 5
    assert any("0x10a" in note or "ARCH_CAPABILITIES" in note for note in derived.notes)
    assert not any("ARCH_CAPABILITIES" in note for note in recorded.notes)


def test_recorded_leaves_of_cpuid_beat_flags() -> None:
    leaves = "CPU:\n   0x00000007 0x00: eax=0x00000002 ebx=0x00000000 ecx=0x00000000 edx=0x04000000\n"
    parts = archive(proc__cpuinfo=INFO, v__vulnerabilities__mds="Not affected", cpuid=leaves)
    cpu = cpu_of_archive("it", parts_of(parts))
    answers = CpuidAnswers(cpu)
    assert answers.cpuid(7, 0, (0, 0, 0, 0)) == (0, 0, 0, 0x04000000)


# Derived features


def test_every_model_derives_from_its_own_words_what_its_table_says() -> None:
    """derived_bits() computes hidden features and ARCH_CAPABILITIES from a CPU's flags and its
    `vulnerabilities` files.
    """
    immune = dict.fromkeys(("meltdown", "mds", "l1tf"), "Not affected")
    hidden, capabilities = derived_bits(INTEL, 6, 106, ("arch_capabilities", "ibrs_enhanced"), immune)
    assert capabilities == 1 << 0 | 1 << 1 | 1 << 5
    assert hidden == ()
    assert derived_bits(AMD, 0x19, 1, (), {"tsa": "Mitigation: Clear CPU buffers"}).hidden == ("verw_clear",)


@given(
    st.dictionaries(st.sampled_from(("mds", "tsa", "mmio_stale_data", "spectre_v2", "retbleed")), st.text())
)
def test_what_is_derived_is_about_files_that_are_there(said: dict[str, str]) -> None:
    flags = ("arch_capabilities",)
    assert derived_bits(INTEL, 6, 85, flags, said).capabilities & ~decided_bits(said) == 0
    assert derived_bits("Other", 6, 85, flags, said) == ((), 0)


# CPUID


@pytest.mark.parametrize("name", MODELS)
def test_cpuid_answers_for_the_cpu_only_what_the_emulator_can(name: str) -> None:
    cpu = MODELS[name]
    answers = CpuidAnswers(cpu)

    def asked(leaf: int, subleaf: int) -> tuple[int, int, int, int]:
        return answers.cpuid(leaf, subleaf, emulated_cpuid(PRODUCTION_MODEL, leaf, subleaf))

    seen = {
        feature for feature, bit in BITS.items() if asked(bit.leaf, bit.subleaf)[bit.register] >> bit.bit & 1
    }
    assert seen <= cpu.features - KEPT_OUT
    assert {"smap", "popcnt"} & cpu.features <= seen
    assert asked(1, 0)[0] == cpu.signature
    vendor = b"".join(asked(0, 0)[at].to_bytes(4, "little") for at in (1, 3, 2))
    assert vendor.decode() == cpu.vendor
    assert asked(0xB, 0)[1] == cpu.threads
    revision = answers.registers[MICROCODE] >> (32 if cpu.vendor == INTEL else 0)
    assert revision == cpu.microcode
    assert answers.registers.get(ARCH_CAPABILITIES, 0) == cpu.capabilities
    # Fast strings are on, without which Linux clears features of Intel's CPUs.
    assert answers.registers.get(MISC_ENABLE) == (1 if cpu.vendor == INTEL else None)
    assert from_text(cpu.as_text()) == cpu


@pytest.mark.parametrize("name", MODELS)
def test_names_of_features_are_known(name: str) -> None:
    assert set(MODELS[name].hidden) <= BITS.keys()
    assert len(set(MODELS[name].flags)) == len(MODELS[name].flags)


# Reports


def test_a_report_says_as_on_production_only_if_everything_is() -> None:
    cpu = cpu_of_archive("it", {"cpuinfo": INFO, "vulnerabilities/mds": "here", "osrelease": "6.1"})
    same = CpuReport(cpu, "6.1", {"mds": "here"})
    assert same.is_as_on_production
    assert "as on production" in same.cpu_description
    for release, said in (("6.2", "here"), ("6.1", "there")):
        other = CpuReport(cpu, release, {"mds": said})
        assert not other.is_as_on_production
        assert "as on production" not in other.cpu_description
        assert any(word in " ".join(other.remarks) for word in ("kernel 6.1, not of 6.2", '"here" there'))
    unknown = CpuReport(cpu, "6.1", {"mds": "here", "tsa": "x"})
    assert any("says nothing about tsa" in remark for remark in unknown.remarks)
    assert not CpuReport(MODELS["milan"], "6.1", {"mds": "here"}).is_as_on_production


# A kernel that has booted on a production CPU


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    """Yield the package of Debian's kernel, and use a separate cache.

    Snapshots of the kernel on production CPUs would push other snapshots out of the usual cache.
    """
    path = debian_kernel.image()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(debian_kernel.lasting_cache("cpus")))
        yield path


@pytest.fixture(scope="module")
def booted(image: Path) -> Iterator[Any]:
    tasks, kernel = started_with_kernel(str(image), debian_kernel.SEED, MODELS[SERVER])
    yield tasks, kernel
    tasks.machine.close()


def test_a_kernel_with_page_table_isolation_is_driven_and_read(booted: Any) -> None:
    tasks, kernel = booted
    said = tasks.shown_cpu.vulnerabilities
    assert said["meltdown"] == "Mitigation: PTI"
    assert said["mds"] == "Mitigation: Clear CPU buffers; SMT vulnerable"
    assert said["retbleed"] == "Mitigation: IBRS"
    assert kernel.booted_returns is ReturnThunks.PLAIN
    assert "Mitigation: PTI" in cpu_text(tasks)
    child = tasks.fork(tasks.init, 4711)
    assert tasks.call(child, GETPID) == child.pid == 4711
    tasks.copy_to_user(child, BUFFER, b"kept")
    assert tasks.copy_from_user(child, BUFFER, 4) == b"kept"
    tasks.exit(child)


@pytest.mark.usefixtures("booted")
def test_probes_hit_in_a_kernel_with_page_table_isolation(image: Path) -> None:
    """Probes hit, although the CPU's page tables lack the pages of slots and detours while a task is in user
    mode.
    """
    mount = build_kernel(
        MountOptions("/mnt", MachineConfig(image=image, seed=debian_kernel.SEED), cpu=SERVER)
    )
    shell = Files(mount, Client(4712, 0, 0))
    shell.write(
        "/kprobe_events", "p:jump vfs_write+0x9\np:entry vfs_write count=$arg3\nr:done vfs_read $retval\n"
    )
    shell.write("/tracing/events/kprobes/enable", "1")
    mount.release(mount.create(shell.client, "/scratch/a", 0o600, os.O_WRONLY))
    shell.write("/scratch/a", "hello")
    assert shell.read("/scratch/a") == "hello"
    trace = shell.read("/tracing/trace")
    assert "entry: (vfs_write+0x4/" in trace or "entry: (vfs_write+0x0/" in trace
    assert "count=0x5" in trace
    assert "jump: (vfs_write+0x9/" in trace
    assert "arg1=0x5" in trace
    assert MODELS[SERVER].title in shell.read("/machine/cpu")
    mount.close()


@pytest.mark.usefixtures("booted")
@pytest.mark.parametrize("place", ["vfs_write", "vfs_write+0x9"])
def test_each_hit_reads_user_memory_in_a_kernel_with_smap(image: Path, place: str) -> None:
    """All hits can read user memory in a kernel with SMAP. Python handles the first hits.

    Later hits are handled by guest code, whose loads from user memory fault.
    """
    mount = build_kernel(
        MountOptions("/mnt", MachineConfig(image=image, seed=debian_kernel.SEED), cpu=SERVER)
    )
    shell = Files(mount, Client(4713, 0, 0))
    mount.release(mount.create(shell.client, "/scratch/a", 0o600, os.O_WRONLY))
    shell.write(
        "/kprobe_events",
        f"p:kernel {place} text=+0(%si):string word=+0(%si):u32 byte=+1(%si):s8\n"
        f"p:user {place} text=+0(%si):ustring word=+u0(%si):u32\n",
    )
    shell.write("/tracing/events/kprobes/enable", "1")
    for _ in range(6):
        shell.write("/scratch/a", "hello")
    lines = shell.read("/tracing/trace").splitlines()
    word = int.from_bytes(b"hell", "little")
    for event, byte in (("kernel", f" byte={ord('e')}"), ("user", "")):
        records = [line for line in lines if f" {event}: " in line]
        assert len(records) == 6
        assert all(f'text="hello" word={word}{byte}' in line for line in records), records
    mount.close()


def test_a_snapshot_is_of_one_cpu(image: Path) -> None:
    places = {snapshot.place(image, 1, cpu) for cpu in (None, *MODELS.values())}
    assert len(places) == len(MODELS) + 1
    assert snapshot.place(image, 1, MODELS["milan"]) in places


def test_offline_text_has_alternatives_of_features_that_the_emulator_lacks(image: Path, booted: Any) -> None:
    _, kernel = booted
    offline, report = kernel_as_booted(str(image), debian_kernel.SEED, MODELS[SERVER], unseen)
    assert report.cpu == MODELS[SERVER]
    start, end = kernel.text
    guest = kernel.read(start, end - start)
    there = offline.read(start, end - start)
    # The emulator shows no XSAVES.
    assert there.count(XSAVES) > guest.count(XSAVES)
    numbers = feature_numbers(kernel)
    assert numbers["xsaves"] not in booted[0].shown_cpu.features
    assert numbers["smap"] in booted[0].shown_cpu.features


@pytest.mark.parametrize("name", [SERVER, SHORT_COPIES])
@pytest.mark.usefixtures("booted")
def test_a_kernel_keeps_the_features_of_fast_copies(image: Path, name: str) -> None:
    """memmove() of 5.10 and 6.1 writes beyond the end of short copies if the guest has fsrm without erms."""
    tasks, kernel = started_with_kernel(str(image), debian_kernel.SEED, MODELS[name])
    numbers = feature_numbers(kernel)
    shown = tasks.shown_cpu
    tasks.machine.close()
    assert shown is not None
    copies = {"rep_good", "erms", "fsrm"}
    assert {
        feature for feature in copies if numbers[feature] in shown.features
    } == copies & shown.cpu.features


def test_bits_of_cpuid_have_the_kernels_names() -> None:
    numbers = feature_numbers(probing.kernel())
    shared = [name for name in BITS if name in numbers and BITS[name][:3] in WORDS]
    assert len(shared) > 100
    for name in shared:
        leaf, subleaf, register, bit = BITS[name]
        assert numbers[name] == 32 * WORDS[leaf, subleaf, register] + bit, name


def test_the_sites_of_rdmsr_are_instructions() -> None:
    kernel = probing.kernel()
    sites = rdmsr_sites(kernel)
    assert kernel.kallsyms.lookup_name("native_read_msr") is not None
    assert len(sites) > 10
    assert all(kernel.read(site, 2) == b"\x0f\x32" for site in sites)


def test_commands_answer_for_the_cpu(image: Path, booted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    del booted
    arguments = ["explain", PLACE, "--image", str(image), "--cpu", SERVER, "--json"]
    assert main(arguments) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert answer["cpu"] == MODELS[SERVER].title
    assert answer["others"] == []
    kernel = planned_kernel(None, str(image), None, None, cpu=SERVER)
    assert kernel.cpu_description == MODELS[SERVER].title
    arguments = ["coverage", "--image", str(image), "--cpu", SERVER, "--function", "tcp_*", "--json"]
    assert main(arguments) == 0
    (counted,) = json.loads(capsys.readouterr().out)
    assert MODELS[SERVER].title in counted["subject"]
    (place,) = (each for each in counted["symbols"] if each["name"] == "tcp_sendmsg")
    assert place["verdicts"]["optimized"] == sum(
        each["verdict"] == "optimized" for each in answer["instructions"]
    )


@pytest.mark.usefixtures("booted")
def test_a_planned_module_has_the_text_of_a_loaded_one(image: Path) -> None:
    """The kernel patches a module for the CPU when it loads the module."""
    base = planned_kernel(None, str(image), None, None, cpu=SERVER)
    planned = base.with_modules(PATCHED)
    mount = build_kernel(
        MountOptions("/mnt", MachineConfig(image=image, seed=debian_kernel.SEED), cpu=SERVER)
    )
    of_file = planned_kernel(None, str(image), None, None).with_modules(PATCHED)
    assert len(of_file.modules) == 3
    for module in (each.module for each in of_file.modules):
        Files(mount, Client(4714, 0, 0)).write("/machine/modules", f"load {module.name}\n")
        loaded = calls_of(mount).engine.live.find(module.name)
        assert loaded is not None
        start, end = loaded.text
        assert planned.tables.read(start, end - start) == loaded.code[start]
        text = module.code[module.text.start]
        assert text != loaded.code[start][: len(text)]
    mount.close()
    assert planned.remarks == base.remarks


@pytest.mark.usefixtures("booted")
def test_a_planned_module_that_the_guest_cannot_load(
    image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A module whose init function fails has the text of its file, and a remark says why."""
    base = planned_kernel(None, str(image), None, None, cpu=SERVER)
    planned = base.with_modules([FAILING, *PATCHED])
    assert len(planned.remarks) == len(base.remarks) + 1
    failing, *others = (name.replace("-", "_") for name in (FAILING, *PATCHED))
    assert failing in planned.remarks[-1]
    assert not any(other in planned.remarks[-1] for other in others)
    found = {each.module.name: each.module for each in planned.modules}
    parts = sorted(part for module in found.values() for part in module.text_ranges)
    assert all(before.end <= after.start for before, after in pairwise(parts))
    of_file = planned_kernel(None, str(image), None, None).with_modules([FAILING])
    (text,) = (each.module.text for each in of_file.modules if each.module.name == failing)
    assert found[failing].text.end - found[failing].text.start == text.end - text.start
    functions = f"{failing}:crypto_aegis128_aesni_setkey", "aes_ti:aesti_set_key"
    assert all(map(planned.tables.kallsyms.by_name, functions))
    file = tmp_path / "x.probes"
    file.write_text("".join(f"p {function}\n" for function in functions))
    assert main(["check", str(file), "--image", str(image), "--cpu", SERVER, "--json"]) == 0
    (checked,) = json.loads(capsys.readouterr().out)
    assert checked["kernels"][0]["remarks"] == [*planned.remarks]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["explain", PLACE, "--cpu", SERVER], "--cpu: only possible with a distribution's kernel"),
        (["coverage", "--cpu", SERVER], "--cpu: only possible with a distribution's kernel"),
        (["check", "/dev/null", "--cpu", SERVER], "--cpu: only possible with a distribution's kernel"),
        (["run", "--cpu", SERVER, "--", "true"], "--cpu: only possible with a distribution's kernel"),
    ],
)  # fmt: skip
def test_cpu_needs_a_distributions_kernel(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) in (2, 125)
    assert why in capsys.readouterr().err


def test_an_unknown_cpu_names_the_known_ones(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", PLACE, "--image", str(image), "--cpu", "/nowhere"]) == 2
    said = capsys.readouterr().err
    assert "--cpu /nowhere" in said
    assert "milan" in said


def test_fields_of_a_cpu_survive_text() -> None:
    cpu = ProductionCpu("t", "v", 6, 1, 2, cpuid=((1, 0, 1, 2, 3, 4),), parameters=("a",), notes=("n",))
    assert from_text(cpu.as_text()) == cpu
    assert {field.name for field in fields(cpu)} == json.loads(cpu.as_text()).keys()
