"""Draws docs/images: the text of a probe at each stage of patching, and a listing of `kprobefs explain`.

patching-ARCH.svg shows the text before, at each stage of patching, and afterwards. Its bytes are those of a
kernel that runs during the command. With --check, compare the pictures with the existing ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.config import MachineConfig
from kprobefs.plan.explanation import Explanation
from kprobefs.plan.picture import picture as explanation_picture
from kprobefs.plan.place import find_place
from kprobefs.plan.planned_kernel import planned_kernel

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs/images"
FUNCTION = "gcd"
EXPLAINED = "gcd+5"
"""Place whose listing explain-x86_64.svg shows."""
ARCHS = {"x86_64": ("linux-6.1", 5), "riscv64": ("riscv-optprobes-2023", 34)}
"""Architecture -> name of the profile, and offset in bytes of the probe in FUNCTION."""
COLOURS = {"original": "#dff0e0", "breakpoint": "#f6c9c7", "jump": "#cfe1f8"}
"""Kind of a byte -> its colour."""
BYTE = 34
"""Width in pixels of a byte in the picture."""
FONT = 12
"""Size in pixels of the monospaced font of a row's note."""
CHARACTER = 0.61 * FONT
"""Width in pixels of a character: that of usual monospaced fonts, or slightly more."""
LEFT = 250
TOP = 60
ROW = 42
"""Height of a row in pixels. LEFT and TOP are the position of the first byte of the first row."""


class Row(NamedTuple):
    """The text of the probed place after a stage."""

    title: str
    code: bytes
    kinds: list[str]
    """The key of COLOURS for each byte."""
    note: str
    """The code that a CPU executes at the place."""


class Pictured:
    """A probe in a kernel that stops at each stage in which it changes a jump."""

    def __init__(self, kernel: Kernel, offset: int) -> None:
        self.kernel = kernel
        self.kprobes = kernel.kprobes
        self.kprobes.set_stages(True)
        self.start = kernel.kallsyms_lookup_name(FUNCTION) + offset
        self.probe = Kprobe(addr=self.start, disabled=True)
        self.kprobes.register_kprobe(self.probe)
        head = self.kprobes.table.valid(self.probe)
        detour = self.kprobes.detour(self.probe)
        assert head is not None
        assert detour is not None
        assert head.insn is not None
        self.jump = detour.jump
        self.detour = detour.address
        self.size = detour.length
        self.armed = kernel.arch.breakpoint_for(head.insn.prepared.length)
        self.trap = kernel.arch.breakpoint
        """The breakpoint that text patching itself uses: the shortest one of the architecture."""

    def row(self, title: str, note: str, trap: bytes = b"", jump: bytes = b"") -> Row:
        """Return a row for the present text, which consists of `trap`, then `jump`, then original bytes.

        `title` is the text to the left of the bytes, and `note` the text to the right.
        """
        text = self.kernel.machine.text
        code = text.current(self.start, self.size)
        written = trap + jump
        if code != written + text.original(self.start, self.size)[len(written) :]:
            raise LookupError(f"{title}: the text is {code.hex(' ')}")
        kinds = ["breakpoint"] * len(trap) + ["jump"] * len(jump)
        kinds += ["original"] * (self.size - len(kinds))
        return Row(title, code, kinds, note)

    def instructions(self, code: bytes) -> str:
        """Return the disassembly of bytes at the probed address."""

        def name(address: int) -> str | None:
            return "detour" if address == self.detour else None

        insns = self.kernel.arch.disassembler.insns(code, self.start, name)
        return "; ".join(text for _, _, text in insns)

    def flush(self) -> None:
        """Run the optimizer now."""
        assert self.kprobes.optimizer is not None
        self.kprobes.optimizer.flush()

    def rows(self) -> Iterator[Row]:
        """Arm the probe, wait until it is optimized, and disable it. Yield a row after each stage."""
        original = self.instructions(self.kernel.machine.text.original(self.start, self.size))
        mixed = self.trap + self.armed[len(self.trap) :]
        tail = self.jump[len(self.trap) :]
        trap = self.instructions(self.trap)
        yield self.row("before", original)
        self.kprobes.enable_kprobe(self.probe)
        yield self.row("armed", f"{self.instructions(self.armed)}, then the copies in the detour", self.armed)
        self.flush()
        yield self.row("optimize 1: breakpoint", f"{trap}, then the copies in the detour", mixed)
        self.kprobes.next_stage()
        yield self.row("optimize 2: tail", f"{trap}, then the copies in the detour", self.trap, tail)
        self.kprobes.next_stage()
        yield self.row("optimize 3: jump", self.instructions(self.jump), b"", self.jump)
        self.kprobes.disable_kprobe(self.probe)
        self.flush()
        yield self.row("back 1: breakpoint", f"{trap}, then the copies in the detour", self.trap, tail)
        self.kprobes.next_stage()
        yield self.row("back 2: original tail", f"{trap}, then the copies in the detour", mixed)
        self.kprobes.next_stage()
        yield self.row("disarmed", original)


def picture(arch: str) -> str:
    """Return the picture of an architecture as SVG."""
    profile, offset = ARCHS[arch]
    with Kernel(MachineConfig(arch=arch, profile=profile)) as kernel, kernel.lock:
        pictured = Pictured(kernel, offset)
        rows = list(pictured.rows())
    after = LEFT + pictured.size * BYTE + 20
    width = after + round(CHARACTER * max(len(row.note) for row in rows)) + 20
    height = TOP + len(rows) * ROW + 44
    title = f"{FUNCTION}+{offset:#x} on {arch}: {pictured.size} bytes of text at each stage of patching"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="14"',
        '  font-family="Helvetica, Arial, sans-serif">',
        f"  <title>{escape(title)}</title>",
        f'  <rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'  <text x="20" y="34" font-weight="bold">{escape(title)}</text>',
    ]
    for number, row in enumerate(rows):
        lines += _drawn(row, TOP + number * ROW, after)
    lines += _legend(height - 18)
    return "\n".join([*lines, "</svg>\n"])


def _drawn(row: Row, top: int, after: int) -> Iterator[str]:
    """Yield the lines of SVG that draw a row. `top` and `after` are positions in pixels."""
    yield f'  <text x="20" y="{top + 20}">{escape(row.title)}</text>'
    for number, (byte, kind) in enumerate(zip(row.code, row.kinds, strict=True)):
        left = LEFT + number * BYTE
        box = f'x="{left}" y="{top}" width="{BYTE}" height="30"'
        yield f'  <rect {box} fill="{COLOURS[kind]}" stroke="#444"/>'
        place = f'x="{left + BYTE // 2}" y="{top + 20}" text-anchor="middle"'
        yield f'  <text {place} font-family="monospace">{byte:02x}</text>'
    note = f'font-family="monospace" font-size="{FONT}">{escape(row.note)}'
    yield f'  <text x="{after}" y="{top + 20}" {note}</text>'


def _legend(baseline: int) -> Iterator[str]:
    """Yield the lines of SVG that explain the colours."""
    for number, (kind, colour) in enumerate(COLOURS.items()):
        left = 20 + 120 * number
        yield f'  <rect x="{left}" y="{baseline - 12}" width="14" height="14" fill="{colour}" stroke="#444"/>'
        yield f'  <text x="{left + 22}" y="{baseline}">{kind}</text>'


def listing() -> str:
    """Return the picture that `kprobefs explain --svg` writes for EXPLAINED."""
    kernel = planned_kernel("x86_64", None, None, None)
    return explanation_picture([Explanation(kernel, find_place(EXPLAINED, kernel.tables))], whole=False)


def main(arguments: list[str]) -> int:
    """Write the pictures, or compare them with the existing ones; return the exit status."""
    status = 0
    pictures = {f"patching-{arch}": picture(arch) for arch in ARCHS}
    pictures["explain-x86_64"] = listing()
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
