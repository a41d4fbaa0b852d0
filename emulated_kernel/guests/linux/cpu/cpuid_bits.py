"""Names of the feature bits of CPUID, as /proc/cpuinfo writes them or Linux names them in its sources.

Source: arch/x86/include/asm/cpufeatures.h (v6.1.176).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from emulated_kernel.util.fast_named_tuple import NamedTuple

AX, BX, CX, DX = range(4)
"""Values of CpuidBit.register: eax, ebx, ecx and edx, which CPUID fills."""


class CpuidBit(NamedTuple):
    """A bit in a register that CPUID fills.

    `register`: AX, BX, CX or DX. `bit`: number of the bit in the register.
    """

    leaf: int
    subleaf: int
    register: int
    bit: int


def _word(leaf: int, subleaf: int, register: int, names: str) -> Iterator[tuple[str, CpuidBit]]:
    """Yield the name and position of each named bit of a register that CPUID fills.

    `names` lists the names in ascending order of their bits. A number before a name is the position of the
    name's bit. A name without a number belongs to the next bit.
    """
    bit = 0
    for name in names.split():
        if name.isdigit():
            bit = int(name)
            continue
        yield name, CpuidBit(leaf, subleaf, register, bit)
        bit += 1


BITS: Mapping[str, CpuidBit] = dict(
    (
        *_word(
            1, 0, DX, "fpu vme de pse tsc msr pae mce cx8 apic 11 sep mtrr pge mca cmov pat pse36 pn clflush"
        ),
        *_word(1, 0, DX, "21 dts acpi mmx fxsr sse sse2 ss ht tm ia64 pbe"),
        *_word(
            1, 0, CX, "pni pclmulqdq dtes64 monitor ds_cpl vmx smx est tm2 ssse3 cid sdbg fma cx16 xtpr pdcm"
        ),
        *_word(1, 0, CX, "17 pcid dca sse4_1 sse4_2 x2apic movbe popcnt tsc_deadline_timer aes xsave"),
        *_word(1, 0, CX, "28 avx f16c rdrand hypervisor"),
        *_word(
            7, 0, BX, "fsgsbase tsc_adjust sgx bmi1 hle avx2 7 smep bmi2 erms invpcid rtm cqm 14 mpx rdt_a"
        ),
        *_word(
            7, 0, BX, "16 avx512f avx512dq rdseed adx smap avx512ifma 23 clflushopt clwb intel_pt avx512pf"
        ),
        *_word(7, 0, BX, "27 avx512er avx512cd sha_ni avx512bw avx512vl"),
        *_word(7, 0, CX, "2 umip pku ospke waitpkg 16 la57 22 rdpid"),
        *_word(
            7, 0, DX, "4 fsrm 9 srbds_ctrl md_clear rtm_always_abort 13 tsx_force_abort serialize hybrid_cpu"
        ),
        *_word(7, 0, DX, "20 ibt 26 spec_ctrl intel_stibp flush_l1d arch_capabilities core_capabilities"),
        *_word(7, 0, DX, "31 spec_ctrl_ssbd"),
        *_word(7, 2, DX, "intel_psfd ipred_ctrl rrsba_ctrl ddpd_u bhi_ctrl mcdt_no"),
        *_word(0xD, 1, AX, "xsaveopt xsavec xgetbv1 xsaves"),
        *_word(
            0x80000001, 0, DX, "11 syscall 19 mp nx 22 mmxext 25 fxsr_opt pdpe1gb rdtscp 29 lm 3dnowext 3dnow"
        ),
        *_word(0x80000001, 0, CX, "lahf_lm cmp_legacy svm extapic cr8_legacy abm sse4a misalignsse"),
        *_word(0x80000001, 0, CX, "8 3dnowprefetch osvw ibs xop skinit wdt 15 lwp fma4 tce 22 topoext"),
        *_word(
            0x80000008, 0, BX, "clzero irperf xsaveerptr 4 rdpru 9 wbnoinvd 12 amd_ibpb 14 amd_ibrs amd_stibp"
        ),
        *_word(
            0x80000008, 0, BX, "17 amd_stibp_always_on 24 amd_ssbd virt_ssbd amd_ssb_no 28 amd_psfd btc_no"
        ),
        *_word(0x80000008, 0, BX, "30 amd_ibpb_ret"),
        *_word(0x80000021, 0, AX, "2 lfence_rdtsc 5 verw_clear 8 autoibrs 27 sbpb ibpb_brtype srso_no"),
        *_word(0x80000021, 0, CX, "1 tsa_sq_no tsa_l1_no"),
    )
)
"""Name of a feature -> its bit."""
_CLAIMED = (
    "ht hypervisor avx vmx hle rtm erms fsrm srbds_ctrl md_clear rtm_always_abort tsx_force_abort "
    "spec_ctrl intel_stibp flush_l1d arch_capabilities spec_ctrl_ssbd intel_psfd ipred_ctrl rrsba_ctrl "
    "ddpd_u bhi_ctrl mcdt_no topoext amd_ibpb amd_ibrs amd_stibp amd_stibp_always_on amd_ssbd virt_ssbd "
    "amd_ssb_no amd_psfd btc_no amd_ibpb_ret lfence_rdtsc verw_clear autoibrs sbpb ibpb_brtype srso_no "
    "tsa_sq_no tsa_l1_no"
)
CLAIMED = frozenset(_CLAIMED.split())
"""Features that the guest may see although the emulator lacks them, because they do no harm to its kernel.

Some are facts about the CPU or hints about speed. Others only add registers, which may be written without
effect. AVX is harmless because the kernel uses it only if XSAVE is available as well.
"""
KEPT_OUT = frozenset({"rdrand", "monitor", "xsave", "xsaveopt", "xsavec", "xgetbv1", "xsaves"})
"""Features that the emulator has and the guest does not see.

With `rdrand` two boots would differ. With `monitor` the guest would not wait by `hlt`. The emulator's XSAVE
lacks the state of most extensions.
"""
