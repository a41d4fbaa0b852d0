"""Draw docs/images: the text of a probe at each stage of patching, and a listing of `kprobefs explain`.

The pictures are those of `kprobefs explain --stages` and `--svg`. With --check, compare them with the
existing ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kprobefs.plan.explanation import Explanation
from kprobefs.plan.picture import picture
from kprobefs.plan.place import find_place
from kprobefs.plan.planned_kernel import planned_kernel
from kprobefs.plan.stages_picture import stages_picture

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs/images"
PLACES = {"x86_64": "gcd+0x5", "riscv64": "gcd+0x22"}
"""Architecture -> place of the probe."""


def explained(arch: str) -> Explanation:
    """Return the explanation of the probed place of the architecture `arch`; see PLACES."""
    kernel = planned_kernel(arch, None, None, None)
    return Explanation(kernel, find_place(PLACES[arch], kernel.tables))


def main(arguments: list[str]) -> int:
    """Write the pictures, or compare them with the existing ones; return the exit status."""
    status = 0
    pictures = {f"patching-{arch}": stages_picture(explained(arch)) for arch in PLACES}
    pictures["explain-x86_64"] = picture([explained("x86_64")], whole=False)
    for name, drawn in pictures.items():
        path = PICTURES / f"{name}.svg"
        if arguments != ["--check"]:
            path.write_text(drawn)
        elif not path.is_file() or path.read_text() != drawn:
            print(f"{path.relative_to(ROOT)}: not current; run scripts/patching_pictures.py", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
