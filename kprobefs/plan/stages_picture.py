"""The picture of a probe's text at each stage in which its jump is written and removed, as SVG.

The bytes are read from kprobefs's own kernel, which runs while the picture is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.util.config import MachineConfig
from kprobefs.common.errors import CliError, ExitStatus, escape_for_terminal
from kprobefs.measure.verdicts import ProbeOutcome
from kprobefs.plan.explanation import Explanation

_COLOURS = {"original": "#dff0e0", "breakpoint": "#f6c9c7", "jump": "#cfe1f8"}
"""Kind of a byte -> its colour."""
_BYTE = 34
"""Width in pixels of a byte in the picture."""
_FONT = 12
"""Size in pixels of the monospaced font of a row's note."""
_CHARACTER = 0.61 * _FONT
"""Width in pixels of a character: that of usual monospaced fonts, or slightly more."""
_LEFT = 250
_TOP = 60
_ROW = 42
"""Height of a row in pixels.

The constants _LEFT and _TOP above are the x and y coordinates of the first byte of the first row.
"""


class _Row(NamedTuple):
    """A row of the picture: the code at the probed place after a stage."""

    title: str
    code: bytes
    kinds: list[str]
    """For each byte, its kind: a key of _COLOURS."""
    note: str
    """Text to the right of the bytes: the code that a CPU executes at the place."""


class _Pictured:
    """A probe in a kernel that stops after each step of writing or removing the probe's jump."""

    def __init__(self, kernel: Kernel, address: int) -> None:
        self.kernel = kernel
        self.kprobes = kernel.kprobes
        self.kprobes.set_stages(True)
        self.start = address
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
        """The breakpoint that is in place while text is patched: the shortest one of the architecture."""

    def row(self, title: str, note: str, trap: bytes = b"", jump: bytes = b"") -> _Row:
        """Return a row for the present text, which must be `trap`, then `jump`, then original bytes.

        `title` is the text to the left of the bytes, and `note` the text to the right. Raises: LookupError
        (the text differs from this).
        """
        text = self.kernel.machine.text
        code = text.current(self.start, self.size)
        written = trap + jump
        if code != written + text.original(self.start, self.size)[len(written) :]:
            raise LookupError(f"{title}: the text is {code.hex(' ')}")
        kinds = ["breakpoint"] * len(trap) + ["jump"] * len(jump)
        kinds += ["original"] * (self.size - len(kinds))
        return _Row(title, code, kinds, note)

    def instructions(self, code: bytes) -> str:
        """Return the disassembly of bytes at the probed address."""

        def name(address: int) -> str | None:
            return "detour" if address == self.detour else None

        insns = self.kernel.arch.disassembler.insns(code, self.start, name)
        return "; ".join(text for _, _, text in insns)

    def flush(self) -> None:
        """Run the optimizer at once, instead of after its delay."""
        assert self.kprobes.optimizer is not None
        self.kprobes.optimizer.flush()

    def rows(self) -> Iterator[_Row]:
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


def stages_picture(explained: Explanation) -> str:
    """Return, as SVG, the picture of the stages of a probe at the explained address.

    Raises: CliError (another kernel than kprobefs's own, or a place at which no jump is written).
    """
    kernel = explained.kernel
    if kernel.image is not None or kernel.is_dump:
        raise CliError(
            "--stages: only kprobefs's own kernel; leave --image and --vmcore out", ExitStatus.USAGE
        )
    if explained.verdict.outcome is not ProbeOutcome.OPTIMIZED:
        why = f"no jump is written there: {explained.reason or explained.verdict.outcome.value}"
        raise CliError(escape_for_terminal(f"--stages: {explained.title}: {why}"), ExitStatus.USAGE)
    config = MachineConfig(arch=kernel.arch, profile=kernel.profile.name)
    with Kernel(config) as running, running.lock:
        pictured = _Pictured(running, explained.address)
        rows = list(pictured.rows())
    after = _LEFT + pictured.size * _BYTE + 20
    width = after + round(_CHARACTER * max(len(row.note) for row in rows)) + 20
    height = _TOP + len(rows) * _ROW + 44
    title = f"{explained.title} on {kernel.arch}: {pictured.size} bytes of text at each stage of patching"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="14"',
        '  font-family="Helvetica, Arial, sans-serif">',
        f"  <title>{escape(title)}</title>",
        f'  <rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'  <text x="20" y="34" font-weight="bold">{escape(title)}</text>',
    ]
    for number, row in enumerate(rows):
        lines += _drawn(row, _TOP + number * _ROW, after)
    lines += _legend(height - 18)
    return "\n".join([*lines, "</svg>\n"])


def _drawn(row: _Row, top: int, after: int) -> Iterator[str]:
    """Yield the lines of SVG that draw a row.

    `top`: y coordinate of the row's upper edge. `after`: x coordinate of the note to the right of the bytes.
    Both are in pixels.
    """
    yield f'  <text x="20" y="{top + 20}">{escape(row.title)}</text>'
    for number, (byte, kind) in enumerate(zip(row.code, row.kinds, strict=True)):
        left = _LEFT + number * _BYTE
        box = f'x="{left}" y="{top}" width="{_BYTE}" height="30"'
        yield f'  <rect {box} fill="{_COLOURS[kind]}" stroke="#444"/>'
        place = f'x="{left + _BYTE // 2}" y="{top + 20}" text-anchor="middle"'
        yield f'  <text {place} font-family="monospace">{byte:02x}</text>'
    note = f'font-family="monospace" font-size="{_FONT}">{escape(row.note)}'
    yield f'  <text x="{after}" y="{top + 20}" {note}</text>'


def _legend(baseline: int) -> Iterator[str]:
    """Yield the lines of SVG that explain the colours. `baseline`: y coordinate of the text, in pixels."""
    for number, (kind, colour) in enumerate(_COLOURS.items()):
        left = 20 + 120 * number
        yield f'  <rect x="{left}" y="{baseline - 12}" width="14" height="14" fill="{colour}" stroke="#444"/>'
        yield f'  <text x="{left + 22}" y="{baseline}">{kind}</text>'
