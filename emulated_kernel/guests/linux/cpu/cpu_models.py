"""Table of usual server CPUs as Linux sees them without a hypervisor: current microcode, default options.

Source: the vendors' lists of microcode revisions and CPUID enumerations; /proc/cpuinfo of such servers.
"""

from __future__ import annotations

from emulated_kernel.guests.linux.cpu.production_cpu import AMD, INTEL, ProductionCpu

_COMMON = (
    "fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush mmx fxsr sse sse2 "
    "ht syscall nx pdpe1gb rdtscp lm constant_tsc rep_good nopl nonstop_tsc cpuid aperfmperf pni "
    "pclmulqdq monitor ssse3 fma cx16 sse4_1 sse4_2 movbe popcnt aes xsave avx f16c rdrand lahf_lm abm "
    "3dnowprefetch ssbd ibrs ibpb stibp fsgsbase bmi1 avx2 smep bmi2 xsaveopt arat"
)
_INTEL = (
    f"{_COMMON} dts acpi ss tm pbe arch_perfmon pebs bts xtopology dtes64 ds_cpl vmx smx est tm2 sdbg "
    "xtpr pdcm pcid dca x2apic tsc_deadline_timer cpuid_fault epb tpr_shadow flexpriority ept vpid "
    "ept_ad tsc_adjust erms invpcid dtherm ida pln pts md_clear flush_l1d"
)
_BROADWELL = f"{_INTEL} hle rtm rdseed adx smap intel_pt"
_SKYLAKE = (
    f"{_BROADWELL} mpx avx512f avx512dq clflushopt clwb avx512cd avx512bw avx512vl xsavec xgetbv1 xsaves "
    "pku ospke arch_capabilities"
)
_CASCADE_LAKE = " ".join(sorted({*_SKYLAKE.split(), "ibrs_enhanced", "avx512_vnni"} - {"hle", "rtm"}))
_ICE_LAKE = (
    f"{_CASCADE_LAKE} sha_ni avx512ifma wbnoinvd avx512vbmi umip avx512_vbmi2 gfni vaes vpclmulqdq "
    "avx512_bitalg tme avx512_vpopcntdq la57 rdpid fsrm pconfig"
)
_SAPPHIRE_RAPIDS = (
    f"{_ICE_LAKE} avx_vnni avx512_bf16 waitpkg bus_lock_detect cldemote movdiri movdir64b enqcmd "
    "serialize tsxldtrk amx_bf16 avx512_fp16 amx_tile amx_int8 ibt arch_lbr"
)
_ZEN = (
    f"{_COMMON} mmxext fxsr_opt extd_apicid cmp_legacy svm extapic cr8_legacy sse4a misalignsse osvw "
    "skinit wdt tce topoext perfctr_core perfctr_nb bpext perfctr_llc mwaitx cpb hw_pstate vmmcall "
    "rdseed adx smap clflushopt sha_ni xsavec xgetbv1 clzero irperf xsaveerptr npt lbrv svm_lock "
    "nrip_save tsc_scale vmcb_clean flushbyasid decodeassists pausefilter pfthreshold avic "
    "v_vmsave_vmload vgif overflow_recov succor smca"
)
_ZEN2 = f"{_ZEN} x2apic cat_l3 cdp_l3 mba clwb cqm rdt_a rdpru wbnoinvd umip rdpid"
_ZEN3 = f"{_ZEN2} pcid erms invpcid xsaves pku ospke vaes vpclmulqdq fsrm"
_ZEN4 = (
    f"{_ZEN3} ibrs_enhanced avx512f avx512dq avx512ifma avx512cd avx512bw avx512vl avx512_bf16 "
    "avx512vbmi avx512_vbmi2 gfni avx512_vnni avx512_bitalg avx512_vpopcntdq la57 flush_l1d"
)
_ZEN5 = f"{_ZEN4} avx_vnni movdiri movdir64b avx512_vp2intersect"
_NAPLES = " ".join(sorted(set(_ZEN.split()) - {"ibrs", "stibp"}))
_INTEL_HIDDEN = "spec_ctrl intel_stibp spec_ctrl_ssbd"
_AMD_HIDDEN = "amd_ibpb amd_ibrs amd_stibp amd_stibp_always_on amd_ssbd lfence_rdtsc"
_CASCADE_LAKE_CAPABILITIES = 0x20200AB
_ICE_LAKE_CAPABILITIES = 0x2020D6B
_SAPPHIRE_RAPIDS_CAPABILITIES = 0xC28E1EB


def _intel(
    title: str, model: int, stepping: int, microcode: int, flags: str, capabilities: int = 0, hidden: str = ""
) -> ProductionCpu:
    return ProductionCpu(
        title,
        INTEL,
        6,
        model,
        stepping,
        model_name=title,
        microcode=microcode,
        threads=2,
        has_siblings=True,
        flags=tuple(flags.split()),
        hidden=tuple(f"{_INTEL_HIDDEN} {hidden}".split()),
        capabilities=capabilities,
    )


def _amd(
    title: str, family: int, model: int, stepping: int, microcode: int, flags: str, hidden: str
) -> ProductionCpu:
    return ProductionCpu(
        title,
        AMD,
        family,
        model,
        stepping,
        model_name=title,
        microcode=microcode,
        threads=2,
        has_siblings=True,
        flags=tuple(flags.split()),
        hidden=tuple(hidden.split()),
    )


MODELS = {
    "haswell-ep": _intel("Intel Xeon E5 v3 (Haswell)", 0x3F, 2, 0x49, _INTEL),
    "broadwell-ep": _intel("Intel Xeon E5 v4 (Broadwell)", 0x4F, 1, 0xB000040, _BROADWELL),
    "skylake-sp": _intel("Intel Xeon Scalable (Skylake)", 0x55, 4, 0x2007006, _SKYLAKE, 0x2020000),
    "cascade-lake": _intel(
        "Intel Xeon Scalable, 2nd generation (Cascade Lake)",
        0x55,
        7,
        0x5003707,
        _CASCADE_LAKE,
        _CASCADE_LAKE_CAPABILITIES,
    ),
    "ice-lake-sp": _intel(
        "Intel Xeon Scalable, 3rd generation (Ice Lake)",
        0x6A,
        6,
        0xD0003F5,
        _ICE_LAKE,
        _ICE_LAKE_CAPABILITIES,
    ),
    "sapphire-rapids": _intel(
        "Intel Xeon Scalable, 4th generation (Sapphire Rapids)",
        0x8F,
        8,
        0x2B000603,
        _SAPPHIRE_RAPIDS,
        _SAPPHIRE_RAPIDS_CAPABILITIES,
        "bhi_ctrl rrsba_ctrl",
    ),
    "emerald-rapids": _intel(
        "Intel Xeon Scalable, 5th generation (Emerald Rapids)",
        0xCF,
        2,
        0x21000283,
        _SAPPHIRE_RAPIDS,
        _SAPPHIRE_RAPIDS_CAPABILITIES,
        "bhi_ctrl rrsba_ctrl",
    ),
    "naples": _amd("AMD EPYC 7001 (Naples)", 0x17, 0x01, 2, 0x8001279, _NAPLES, "amd_ibpb ibpb_brtype"),
    "rome": _amd("AMD EPYC 7002 (Rome)", 0x17, 0x31, 0, 0x830107C, _ZEN2, f"{_AMD_HIDDEN} ibpb_brtype"),
    "milan": _amd(
        "AMD EPYC 7003 (Milan)", 0x19, 0x01, 1, 0xA0011DE, _ZEN3, f"{_AMD_HIDDEN} btc_no ibpb_brtype sbpb"
    ),
    "genoa": _amd(
        "AMD EPYC 9004 (Genoa)",
        0x19,
        0x11,
        1,
        0xA101154,
        _ZEN4,
        f"{_AMD_HIDDEN} autoibrs btc_no ibpb_brtype sbpb amd_ibpb_ret",
    ),
    "turin": _amd(
        "AMD EPYC 9005 (Turin)",
        0x1A,
        0x02,
        1,
        0xB00215A,
        _ZEN5,
        f"{_AMD_HIDDEN} autoibrs btc_no ibpb_brtype sbpb srso_no amd_ibpb_ret",
    ),
}
"""Name for option --cpu -> the CPU model."""


def model_named(name: str) -> ProductionCpu | None:
    """Return the CPU called `name` in the table MODELS; None if the table does not have it."""
    return MODELS.get(name.lower())


def capabilities_of(family: int, model: int, stepping: int) -> int:
    """Return IA32_ARCH_CAPABILITIES of an Intel CPU; 0 if the table MODELS does not have the CPU."""
    for cpu in MODELS.values():
        if cpu.vendor == INTEL and (cpu.family, cpu.model, cpu.stepping) == (family, model, stepping):
            return cpu.capabilities
    return 0
