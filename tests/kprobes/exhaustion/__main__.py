"""The whole proof: python -m tests.kprobes.exhaustion [--profile P] [--arch A] [--detour D] [--sites]
[--states N] [--part I/N].
"""

from __future__ import annotations

import argparse
import sys

from emulated_kernel.config import MachineConfig
from emulated_kernel.kernel import Kernel
from tests.kprobes.exhaustion.compiled import CompiledProof
from tests.kprobes.exhaustion.proof import Proof
from tests.kprobes.exhaustion.sites import SiteProof, fentry_sites
from tests.kprobes.optimizer.conftest import Probed
from tests.kprobes.optimizer.regions import optimizable


def main() -> int:
    """Check every optimizable address of the image; 1 if anything goes wrong anywhere."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="linux-6.1")
    parser.add_argument("--arch", default="x86_64")
    parser.add_argument("--detour", choices=["python", "liveness", "save-all"], default="python")
    parser.add_argument("--sites", action="store_true", help="fentry sites instead of optimizable places")
    parser.add_argument("--states", type=int, default=1, help="register states a place, 3 at most")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="every Nth place, from the Ith on")
    parsed = parser.parse_args()
    first, step = map(int, parsed.part.split("/"))
    is_compiled = parsed.detour != "python"
    detour = parsed.detour if is_compiled else None
    with Kernel(MachineConfig(arch=parsed.arch, profile=parsed.profile, detour=detour)) as kernel:
        probed = Probed(kernel)
        kind = SiteProof if parsed.sites else CompiledProof if is_compiled else Proof
        proof = kind(probed, parsed.states)
        places = list(fentry_sites(probed) if parsed.sites else optimizable(probed))[first::step]
        for number, place in enumerate(places, 1):
            proof.check(place)
            if sys.stderr.isatty() or not number % 500:
                print(f"{number}/{len(places)} places, {proof.runs} runs", end="\r", file=sys.stderr)
    print(f"{len(places)} places, {proof.runs} runs, {len(proof.problems)} problems")
    print(*proof.problems[:20], sep="\n")
    return int(bool(proof.problems))


if __name__ == "__main__":
    sys.exit(main())
