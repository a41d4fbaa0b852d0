"""Derives CPU features that /proc/cpuinfo does not name, and the bits of IA32_ARCH_CAPABILITIES.

The input is the content of the files in /sys/devices/system/cpu/vulnerabilities. Linux computes these files
from the features; this module does the reverse.
Source: arch/x86/kernel/cpu/common.c:cpu_set_bug_bits and bugs.c (v6.1.176).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from emulated_kernel.guests.linux.cpu.production_cpu import AMD, HYGON, HYPERVISOR, INTEL
from emulated_kernel.util.fast_named_tuple import NamedTuple

IMMUNE = "Not affected"
_IBRS_ALL = 1 << 1
_RSBA = 1 << 2
_TSX_CTRL = 1 << 7
_FB_CLEAR = 1 << 17
_BHI_NO = 1 << 20
_PBRSB_NO = 1 << 24
_GDS_CTRL = 1 << 25
_RFDS_CLEAR = 1 << 28
_IMMUNITIES = {
    "meltdown": 1 << 0,
    "spec_store_bypass": 1 << 4,
    "mds": 1 << 5,
    "itlb_multihit": 1 << 6,
    "tsx_async_abort": 1 << 8,
    "mmio_stale_data": 1 << 13 | 1 << 14 | 1 << 15,
    "gather_data_sampling": 1 << 26,
    "reg_file_data_sampling": 1 << 27,
    "indirect_target_selection": 1 << 62,
}
"""Vulnerability's file in sysfs -> bits of IA32_ARCH_CAPABILITIES set if the file says "Not affected".

Mirrors: arch/x86/include/asm/msr-index.h:MSR_IA32_ARCH_CAPABILITIES (v6.1.176).
"""
_ABOUT = {
    "retbleed": _RSBA,
    "tsx_async_abort": _TSX_CTRL,
    "mmio_stale_data": _FB_CLEAR,
    "gather_data_sampling": _GDS_CTRL,
    "reg_file_data_sampling": _RFDS_CLEAR,
}
"""Vulnerability's file in sysfs -> bit of IA32_ARCH_CAPABILITIES on which the file's text depends."""
_ZEN_OLD = 0x17
_ZEN_FIRST_SSBD = 0x30
"""First model of family 17h that reports the feature amd_ssbd (control of speculative store bypass)."""
_SRSO_FAMILIES = range(0x17, 0x1B)


class Derived(NamedTuple):
    """Features that /proc/cpuinfo does not name, and bits of IA32_ARCH_CAPABILITIES."""

    hidden: tuple[str, ...]
    capabilities: int


def derived_bits(
    vendor: str, family: int, model: int, flags: Collection[str], vulnerabilities: Mapping[str, str]
) -> Derived:
    """Return the features that /proc/cpuinfo does not name, and the bits of IA32_ARCH_CAPABILITIES.

    Both are derived from the reports of the kernel that runs on the CPU. `flags`: the flags in /proc/cpuinfo.
    `vulnerabilities`: file of /sys/devices/system/cpu/vulnerabilities -> its content. A file may be missing;
    then it adds no feature and no bit.
    """
    if vendor == INTEL:
        hidden = _intel_features(flags, vulnerabilities)
        return Derived(tuple(sorted(hidden)), _capabilities(flags, vulnerabilities))
    if vendor in (AMD, HYGON):
        return Derived(tuple(sorted(_amd_features(family, model, flags, vulnerabilities))), 0)
    return Derived((), 0)


def _capabilities(flags: Collection[str], said: Mapping[str, str]) -> int:
    if "arch_capabilities" not in flags:
        return 0
    spectre = said.get("spectre_v2", "")
    found = 0
    for file, bits in _IMMUNITIES.items():
        if said.get(file) == IMMUNE:
            found |= bits
    for holds, bit in (
        ("ibrs_enhanced" in flags, _IBRS_ALL),
        (said.get("retbleed", IMMUNE) != IMMUNE, _RSBA),
        ("TSX disabled" in said.get("tsx_async_abort", ""), _TSX_CTRL),
        (said.get("mmio_stale_data", "").startswith("Mitigation"), _FB_CLEAR),
        ("PBRSB-eIBRS: Not affected" in spectre, _PBRSB_NO),
        ("BHI: Not affected" in spectre, _BHI_NO),
        (said.get("gather_data_sampling", "").startswith("Mitigation: Microcode"), _GDS_CTRL),
        (said.get("reg_file_data_sampling", "").startswith("Mitigation"), _RFDS_CLEAR),
    ):
        if holds:
            found |= bit
    return found


def decided_bits(said: Mapping[str, str]) -> int:
    """Return the mask of the bits of IA32_ARCH_CAPABILITIES whose values, 0 or 1, follow from `said`.

    `said`: file of /sys/devices/system/cpu/vulnerabilities -> its content.
    """
    spectre = said.get("spectre_v2", "")
    found = _IBRS_ALL
    for file in said:
        found |= _IMMUNITIES.get(file, 0) | _ABOUT.get(file, 0)
    for text, bit in (("PBRSB-eIBRS", _PBRSB_NO), ("BHI", _BHI_NO)):
        if text in spectre:
            found |= bit
    return found


def _intel_features(flags: Collection[str], said: Mapping[str, str]) -> Iterator[str]:
    for flag, feature in (("ibrs", "spec_ctrl"), ("stibp", "intel_stibp"), ("ssbd", "spec_ctrl_ssbd")):
        if flag in flags:
            yield feature
    if "BHI_DIS_S" in said.get("spectre_v2", ""):
        yield "bhi_ctrl"
    if said.get("srbds", "").startswith("Mitigation: Microcode"):
        yield "srbds_ctrl"


def _amd_features(family: int, model: int, flags: Collection[str], said: Mapping[str, str]) -> Iterator[str]:
    for flag, feature in (
        ("ibrs", "amd_ibrs"),
        ("ibpb", "amd_ibpb"),
        ("stibp", "amd_stibp"),
        ("ibrs_enhanced", "autoibrs"),
    ):
        if flag in flags:
            yield feature
    has_own_bit = HYPERVISOR in flags or family > _ZEN_OLD or model >= _ZEN_FIRST_SSBD
    if "ssbd" in flags and "virt_ssbd" not in flags and has_own_bit:
        yield "amd_ssbd"
    if "STIBP: always-on" in said.get("spectre_v2", ""):
        yield "amd_stibp_always_on"
    if said.get("spec_store_bypass") == IMMUNE:
        yield "amd_ssb_no"
    if said.get("retbleed") == IMMUNE:
        yield "btc_no"
    overflow = said.get("spec_rstack_overflow", "")
    if overflow.startswith("Mitigation: "):
        yield "ibpb_brtype"
    if overflow == IMMUNE and family in _SRSO_FAMILIES:
        yield "srso_no"
    tsa = said.get("tsa", "")
    if tsa.startswith("Mitigation: "):
        yield "verw_clear"
    if tsa == IMMUNE:
        yield from ("tsa_sq_no", "tsa_l1_no")
