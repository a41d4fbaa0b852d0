"""`kprobefs tour`: an interactive introduction to probing, step by step on a temporary mount."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from emulated_kernel.util.fast_dataclass import dataclass
from kprobefs.common import terminal
from kprobefs.common.errors import escape_for_terminal

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Step:
    """A step of the tour: a text about one idea, and the commands that demonstrate it."""

    title: str
    text: str
    commands: tuple[str, ...]


_OPTIMIZED = Step(
    "How it is probed",
    "Each probe has a directory that shows its mode, and why the mode is not a better one. A probe "
    "within a function is a breakpoint at first, which costs a trap. If it is safe, the optimizer replaces "
    "it by a jump a moment later. Here the optimizer is off at first, so that you see both.",
    (
        "echo 0 > kprobes/optimization",
        "echo 'p:inside ksys_read+5' >> kprobe_events",
        "echo 1 > tracing/events/kprobes/inside/enable",
        "cat kprobes/stats/kprobes/inside/{mode,bytes}",
        "echo 1 > kprobes/optimization; sleep 0.2",
        "for i in 1 2 3 4 5 6 7 8; do cat scratch/greeting > /dev/null; done",
        "cat kprobes/stats/kprobes/inside/{mode,bytes}",
    ),
)
_TRAPPED = Step(
    _OPTIMIZED.title,
    "Each probe has a directory that shows its mode, and why the mode is not a better one. A probe "
    "within a function is a breakpoint, which costs a trap. A jump would cost less, but Linux has no "
    "optimizer for this architecture.",
    (
        "echo 'p:inside ksys_read+8' >> kprobe_events",
        "echo 1 > tracing/events/kprobes/inside/enable",
        "for i in 1 2 3 4 5 6 7 8; do cat scratch/greeting > /dev/null; done",
        "cat kprobes/stats/kprobes/inside/{mode,reason,bytes,hits}",
    ),
)
"""Step that replaces the step about optimization where Linux 6.1 has no optimizer for the architecture."""

STEPS = (
    Step(
        "A kernel behind files",
        "This directory is a mount. Behind it, a small kernel runs in an emulator. It executes real machine "
        "code, and nobody else uses it, so nothing that you do here can harm the computer.",
        ("cd $KPROBEFS; ls", "cat machine/version"),
    ),
    Step(
        "A probe",
        "A kprobe is a place in that kernel's code and a list of values to record whenever the place is "
        "reached. This line names the place, the function vfs_read, and records its third argument: the "
        "number of bytes to read.",
        ("echo 'p:reads vfs_read count=$arg3' > kprobe_events", "cat kprobe_events"),
    ),
    Step(
        "Switched on",
        "Until now nothing has changed. Enabling the event patches the code: the bytes at the function's "
        "start, which did nothing, become a call.",
        (
            "echo 1 > tracing/events/kprobes/reads/enable",
            "cat kprobes/stats/kprobes/reads/bytes",
            "cat kprobes/list",
        ),
    ),
    Step(
        "A hit",
        "scratch/ is a file system inside that kernel. A process that reads a file there runs vfs_read "
        "and hits the probe. Each line shows the process, the CPU, the time and the recorded value.",
        (
            "echo hello > scratch/greeting",
            "echo > tracing/trace",
            "cat scratch/greeting",
            "grep reads: tracing/trace | head -n 3",
        ),
    ),
    Step(
        "Only what matters",
        "A filter is evaluated at each hit. A hit that it does not accept is not recorded.",
        (
            "echo 'count == 7' > tracing/events/kprobes/reads/filter",
            "echo > tracing/trace",
            "head -c 7 scratch/greeting > /dev/null",
            "dd if=scratch/greeting of=/dev/null bs=7 status=none",
            "grep reads: tracing/trace",
            "echo 0 > tracing/events/kprobes/reads/filter",
        ),
    ),
    Step(
        "What it returns",
        "A return probe is hit when the function returns, and $retval is the return value.",
        (
            "echo 'r:done vfs_read got=$retval' >> kprobe_events",
            "echo 1 > tracing/events/kprobes/done/enable",
            "echo > tracing/trace",
            "cat scratch/greeting",
            "grep done: tracing/trace | head -n 2",
        ),
    ),
    _OPTIMIZED,
    Step(
        "Mistakes",
        "A wrong definition fails with Linux's errno, and the error log marks the place of the error.",
        ("echo 'p:oops vfs_read %nosuch' >> kprobe_events || true", "tail -n 2 tracing/error_log"),
    ),
    Step(
        "Cleaning up",
        "When the events are disabled and deleted, the code is what it was before.",
        ("echo 0 > tracing/events/enable; echo > kprobe_events", "cat kprobes/list | wc -l"),
    ),
)
_LOOK = ("echo 'gcd 12 18' > machine/call", "cat kprobes/stats/kprobes/inside/{hits,bytes}")
"""Commands that call gcd once, and show the hits of its probe `inside` and the bytes at the probe."""
_STAGES = (
    Step(
        "Stops between the stages",
        "The optimizer replaces a probe's breakpoint by a jump in three stages. "
        "They are usually too short to be seen. "
        "The file kprobes/stages stops each change of a jump before each further stage, and the kernel goes "
        "on meanwhile. The optimizer is off at first.",
        ("cd $KPROBEFS; echo 0 > kprobes/optimization", "echo 1 > kprobes/stages; cat kprobes/stages"),
    ),
    Step(
        "Before",
        "The probe is in the function gcd. Until it is enabled, the text is the original one.",
        ("echo 'p:inside gcd+{offset}' > kprobe_events", *_LOOK),
    ),
    Step(
        "Armed",
        "The enabled probe is a breakpoint over its instruction. A call of gcd hits it.",
        ("echo 1 > tracing/events/kprobes/inside/enable", *_LOOK),
    ),
    Step(
        "First stage: breakpoint",
        "Each change of several bytes begins with the shortest breakpoint. A CPU that arrives now meets it, "
        "and never a mixture of old and new bytes. "
        "On x86 the armed probe has this breakpoint already, so this stage changes no byte.",
        ("echo 1 > kprobes/optimization; sleep 0.2", "cat kprobes/stages", *_LOOK),
    ),
    Step(
        "Second stage: tail",
        "No CPU can be within the bytes after the breakpoint now. They become the tail of the jump.",
        ("echo next > kprobes/stages", "cat kprobes/stages", *_LOOK),
    ),
    Step(
        "Third stage: jump",
        "The start of the jump replaces the breakpoint. While `stages` is 1, the detour calls the handler by "
        "a breakpoint of its own. Otherwise a hit needs no trap from now on.",
        ("echo next > kprobes/stages", "cat kprobes/stages", *_LOOK, "cat kprobes/list"),
    ),
    Step(
        "And back",
        "The way back begins with the breakpoint, too. It covers the start of the jump.",
        ("echo 0 > kprobes/optimization", "cat kprobes/stages", *_LOOK),
    ),
    Step(
        "The original tail",
        "The tail of the original instructions follows. The probe still takes its hits.",
        ("echo next > kprobes/stages", "cat kprobes/stages", *_LOOK),
    ),
    Step(
        "Cleaning up",
        "The last stage leaves the armed breakpoint. A disabled probe leaves the original text.",
        (
            "echo next > kprobes/stages; echo 0 > kprobes/stages",
            *_LOOK,
            "echo 0 > tracing/events/enable",
            "cat kprobes/stats/kprobes/inside/bytes",
            "echo > kprobe_events",
        ),
    ),
)
"""Steps of the tour `optimized`, which stops at each stage of patching.

`{offset}` stands for the probe's offset in gcd.
"""
CHAPTERS = ("probes", "optimized")
"""Names of the tours. The first one is the default."""
_STAGED = {"riscv64": 0x22, "riscv64i": 0x24}
"""Architecture -> offset in gcd of the probe that the tour optimizes, if it differs from that of x86."""
OPTIMIZING_PROFILE = "riscv-optprobes-2023"
"""Profile with an optimizer for the architectures on which Linux has none."""

END = "That was the tour. kprobefs mount DIR creates a mount that stays; man kprobefs has the details."
_COLUMNS = 80
"""Maximum number of columns of a tour's text, and of all output in a pipe."""
PROMPT = "Enter continues, q ends the tour "


def steps(arch: str, chapter: str = CHAPTERS[0]) -> tuple[Step, ...]:
    """Return the steps of the tour `chapter`, one of CHAPTERS, for an architecture."""
    if chapter == "optimized":
        offset = hex(_STAGED.get(arch, 5))
        return tuple(
            Step(step.title, step.text, tuple(it.replace("{offset}", offset) for it in step.commands))
            for step in _STAGES
        )
    return tuple(_TRAPPED if step is _OPTIMIZED and arch.startswith("riscv") else step for step in STEPS)


def profile(arch: str, chapter: str) -> str | None:
    """Return the profile that the tour `chapter` needs, or None for the default."""
    return OPTIMIZING_PROFILE if chapter == "optimized" and arch.startswith("riscv") else None


def tour(directory: str, walk: Sequence[Step]) -> None:
    """Run the steps `walk` on a mount; on a terminal, wait for a key after each step."""
    console = terminal.console()
    interactive = terminal.is_interactive(sys.stdout) and sys.stdin.isatty()
    with _Shell(directory) as shell, terminal.keyboard() if interactive else nullcontext():
        for number, step in enumerate(walk, 1):
            _show_head(console, f"{number}/{len(walk)}", step)
            for command in step.commands:
                for line in typed(command, console.width if interactive else None):
                    console.print(line, style="bold")
                for line in shell.run(command):
                    text = escape_for_terminal(line)
                    console.print(terminal.wrap(text, sys.stdout, "        ", "    ", _COLUMNS))
            if interactive and number < len(walk) and not _goes_on(console):
                return
    console.print()
    console.print(terminal.wrap(END, sys.stdout, columns=_COLUMNS))


def typed(command: str, width: int | None) -> Iterator[str]:
    """Yield a prompt and a command, broken between words into lines that a shell accepts as one command.

    `width`: maximum length of a line, which only a longer word exceeds; None: yield one line.
    """
    line = "$"
    for word in re.findall(r"(?:'[^']*'|\S)+", command):
        if width is not None and line.strip() != "$" and len(f"{line} {word} \\") > width:
            yield f"{line} \\"
            line = "   "
        line += f" {word}"
    yield line


def _show_head(console: Console, place: str, step: Step) -> None:
    from textwrap import wrap

    console.print(f"\n{place}  {step.title}", style="bold cyan")
    for line in wrap(step.text, min(console.width, _COLUMNS)):
        console.print(line)
    console.print()


def _goes_on(console: Console) -> bool:
    console.print(PROMPT, style="dim", end="")
    while (pressed := terminal.key(3600)) not in ("\n", " ", "q", "escape"):
        continue
    console.print()
    return pressed in ("\n", " ")


class _Shell:
    """A shell that keeps its working directory from one command to the next."""

    def __init__(self, directory: str) -> None:
        self._process = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],
            env={**os.environ, "KPROBEFS": directory, "LC_ALL": "C.UTF-8"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="surrogateescape",
        )
        self._end = f"end of {self._process.pid}"

    def __enter__(self) -> _Shell:
        return self

    def __exit__(self, *_exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def run(self, command: str) -> Iterator[str]:
        """Run a command and yield the lines of its output."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\necho; echo '{self._end}'\n")
        self._process.stdin.flush()
        before: str | None = None
        for line in self._process.stdout:
            if line.rstrip("\n") == self._end:
                # If the output ended with a newline, the empty line before comes from the `echo` above.
                if before:
                    yield before
                return
            if before is not None:
                yield before
            before = line.rstrip("\n")
