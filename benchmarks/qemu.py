"""Comparison of kprobefs with virtual machines: the same kernel, module and script, in turns.

The sides run Debian's kernel: QEMU without KVM (TCG), kprobefs's own kprobes over that kernel, and virtme-ng
where it can use KVM. `--sides` adds `kernel`: kprobefs with the kernel's own kprobes. All sides run
qemu_guest/script.sh in busybox, and load the module qemu_guest/kb.c, which is compiled once. `--module`
names a file that keeps the module for later runs with the same kernel.

The benchmark needs Debian, qemu-system-x86, busybox-static, gcc, make and cpio. apt fetches the packages of
the kernel and its headers. `--write` makes a report in docs/reports/, and puts its table into README.md. Run
it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import gzip
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from threading import Timer

from common import PROGRAM, Distribution, arguments, report

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
GUEST = HERE / "qemu_guest"
META = "linux-image-cloud-amd64"
"""Meta package of the kernel that apt fetches."""
QEMU = "qemu-system-x86_64"
TOOLS = {
    QEMU: "qemu-system-x86",
    "busybox": "busybox-static",
    "gcc": "gcc",
    "make": "make",
    "cpio": "cpio",
    "dpkg-deb": "dpkg",
    "apt-get": "apt",
}
"""Program that the benchmark needs -> Debian's package with that program."""
APPEND = "console=ttyS0 quiet nokaslr mitigations=off panic=-1"
MEMORY = "512"
"""Memory of a virtual machine in MiB."""
LIMIT = 1800
"""Maximum time of a side's run in seconds."""
TRIAL = 60
"""Maximum time in seconds for virtme-ng to run an empty command."""
FIRST_START = "first start, to the script"
START = "start, to the script"
FIRST_LINE = "start, to the first trace line"
NS, US, SECONDS = "ns", "us", "s"
MARKERS = "<!-- The table of benchmarks/qemu.py --write begins. -->", "<!-- The table ends. -->"
"""Lines of README.md before and after the table."""

Samples = dict[tuple[str, str], list[float]]
"""Name and unit of a row -> its samples."""

EXPLANATION = (
    "`python benchmarks/qemu.py` runs the same kernel, module and script on each side, in turns. A cell has",
    "the median, and the 10th and the 90th percentile. A hit is what an event adds to a call of an empty",
    "function while `tracing_on` is 0; a record is the same while it is 1. An emulated hit is on a jump,",
    "which kprobes emulate. This kernel boosts no steps, because it is preemptible. A start of kprobefs is",
    "from its snapshot, except the first start. The times of the script contain the time of its shell and",
    "of `cat`, which a virtual machine runs, too.",
    "",
)
"""Lines of a report that explain its table."""


class Skipped(Exception):
    """Exception with the reason why a side or the benchmark cannot run."""


@dataclass(frozen=True)
class Prepared:
    """The files that all sides use."""

    image: Path
    """Debian's package with the kernel."""
    vmlinuz: Path
    module: Path
    definitions: Path
    initrd: Path
    settings: dict[str, str]
    """Name -> value of the variables of script.sh, except those that differ between the sides."""
    guest: Path
    """Directory with the script, settings, module and definitions, for guests that use it as their root."""


@dataclass(frozen=True)
class Side:
    """One of the compared ways to run the kernel."""

    title: str
    command: Callable[[Prepared], Sequence[str]]
    environment: Callable[[Prepared], dict[str, str]] = lambda _prepared: {}
    has_snapshot: bool = False
    """Whether starts after the first one restore a snapshot and do not boot."""
    check: Callable[[Prepared], None] = lambda _prepared: None
    """Function that raises Skipped if the side cannot run."""
    samples: Samples = field(default_factory=lambda: defaultdict(list))


def _in_qemu(prepared: Prepared) -> list[str]:
    machine = ["-accel", "tcg", "-m", MEMORY, "-smp", "1", "-nodefaults", "-display", "none", "-no-reboot"]
    files = ["-kernel", str(prepared.vmlinuz), "-initrd", str(prepared.initrd), "-append", APPEND]
    return [QEMU, *machine, *files, "-serial", "stdio"]


def _in_kprobefs(kprobes: str) -> Callable[[Prepared], list[str]]:
    script = str(GUEST / "script.sh")
    return lambda prepared: [
        *(*PROGRAM, "run", "--image", str(prepared.image), "--kprobes", kprobes),
        *("--", "busybox", "sh", script),
    ]


def _of_kprobefs(prepared: Prepared) -> dict[str, str]:
    return {
        **prepared.settings,
        "MODULE": str(prepared.module),
        "DEFINITIONS": str(prepared.definitions),
        "WORK": str(prepared.guest),
    }


def _in_virtme(prepared: Prepared) -> list[str]:
    init = f"busybox sh {prepared.guest}/init"
    options = ["--user", "root", "--cpus", "1", "--memory", f"{MEMORY}M", "--rodir", str(prepared.guest)]
    return ["vng", "--run", str(prepared.vmlinuz), *options, "--", init]


def _check_virtme(prepared: Prepared) -> None:
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        raise Skipped("no access to /dev/kvm")
    if shutil.which("vng") is None:
        raise Skipped("no vng; install virtme-ng")
    command = [*_in_virtme(prepared)[:-1], "echo works"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TRIAL,
            check=False,
            stdin=subprocess.DEVNULL,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise Skipped(f"its machine runs no command within {TRIAL} s") from None
    if "works" not in done.stdout:
        complaints = done.stderr.strip().splitlines()
        raise Skipped(complaints[-1] if complaints else f"vng ends with status {done.returncode}")


SIDES = {
    "qemu": Side("QEMU TCG", _in_qemu),
    "kprobefs": Side("kprobefs", _in_kprobefs("kprobefs"), _of_kprobefs, has_snapshot=True),
    "kernel": Side(
        "kprobefs with the kernel's kprobes", _in_kprobefs("kernel"), _of_kprobefs, has_snapshot=True
    ),
    "virtme-ng": Side("virtme-ng with KVM", _in_virtme, check=_check_virtme),
}
"""Name of a side -> the side. Ratios compare medians with the medians of the first selected side."""
DEFAULT_SIDES = ("qemu", "kprobefs", "virtme-ng")


def run(side: Side, prepared: Prepared, environment: dict[str, str]) -> tuple[float, float]:
    """Run the script once on a side, and add its rows to the side's samples.

    Return the seconds until the script is ready, and until it shows the first line of a trace. Raises:
    SystemExit (the script did not reach its end, or a check in it failed).
    """
    start = time.perf_counter()
    reached: dict[str, float] = {}
    shown: list[str] = []
    with subprocess.Popen(
        side.command(prepared),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | side.environment(prepared) | environment,
    ) as process:
        assert process.stdout is not None
        limit = Timer(LIMIT, process.terminate)
        limit.daemon = True
        limit.start()
        for line in map(str.strip, process.stdout):
            now = time.perf_counter() - start
            shown.append(line)
            if found := re.fullmatch(r"ROW (-?\d+) (\w+) (.+)", line):
                value, unit, name = found.groups()
                divisor = 1e6 if unit == US else 1
                side.samples[name, SECONDS if unit == US else unit].append(int(value) / divisor)
            elif line == "READY" or "reads: (vfs_read" in line:
                reached.setdefault(line if line == "READY" else "line", now)
            elif line == "DONE":
                reached["DONE"] = now
            elif line.startswith("FAILED"):
                raise SystemExit(f"{side.title}: {line}")
        limit.cancel()
    if len(reached) != 3:
        last = "\n".join(shown[-20:])
        raise SystemExit(f"{side.title}: the script did not reach its end; the last lines:\n{last}")
    return reached["READY"], reached["line"]


def round_of(side: Side, prepared: Prepared, *, first: bool = True) -> None:
    """Run the script once on one side. If `first` is set, also measure the side's first start."""
    ready, line = run(side, prepared, {})
    side.samples[START, SECONDS].append(ready)
    side.samples[FIRST_LINE, SECONDS].append(line)
    if first:
        side.samples[FIRST_START, SECONDS].append(first_start(side, prepared) if side.has_snapshot else ready)


def first_start(side: Side, prepared: Prepared) -> float:
    """Start a side with an empty cache, and return the seconds to its first command."""
    with tempfile.TemporaryDirectory(prefix="kprobefs-bench-") as made:
        # Replace the last words, which run the script.
        command = [*side.command(prepared)[:-3], "echo", "READY"]
        start = time.perf_counter()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**os.environ, "XDG_CACHE_HOME": made}
        ) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            took = time.perf_counter() - start
    if line != b"READY\n":
        raise SystemExit(f"{side.title}: its first start ends with status {process.returncode}")
    return took


# Preparation


def check_tools(sides: Sequence[str]) -> None:
    """Check that the machine is x86_64, and has all programs that the sides need. Raises: Skipped."""
    if platform.machine() != "x86_64":
        raise Skipped("the module is for x86_64")
    needed = TOOLS if "qemu" in sides else {name: TOOLS[name] for name in TOOLS if name != QEMU}
    missing = [package for program, package in needed.items() if shutil.which(program) is None]
    if missing:
        raise Skipped(f"missing programs; apt install {' '.join(missing)}")


def fetch(work: Path, *packages: str) -> list[Path]:
    """Fetch packages with apt into the directory `work`, and return their files. Raises: Skipped."""
    before = set(work.glob("*.deb"))
    command = ["apt-get", "download", "-qq", *packages]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Skipped(f"apt-get download {' '.join(packages)}: {done.stderr.strip()}")
    return sorted(set(work.glob("*.deb")) - before)


def depends(package: str) -> list[str]:
    """Return the names of the packages that a package depends on, in apt's order."""
    done = subprocess.run(["apt-cache", "depends", package], capture_output=True, text=True, check=False)
    return re.findall(r"^ +Depends: (\S+)$", done.stdout, re.MULTILINE)


def unpack(files: Sequence[Path], place: Path) -> Path:
    """Unpack packages into a directory, and return it."""
    for file in files:
        subprocess.run(["dpkg-deb", "-x", file, place], check=True)
    return place


def compile_module(work: Path, release: str) -> Path:
    """Compile qemu_guest/kb.c for Debian's kernel of the version `release`, and return the module's file.

    The kernel's header packages are fetched into the directory `work`. Raises: Skipped.
    """
    headers = f"linux-headers-{release}"
    needed = [name for name in depends(headers) if name.startswith(("linux-headers-", "linux-kbuild-"))]
    if not needed:
        raise Skipped(f"apt knows no {headers}; run apt-get update")
    root = unpack(fetch(work, headers, *needed), work / "headers")
    tree = root / "usr/src" / headers
    makefile = tree / "Makefile"
    makefile.write_text(makefile.read_text().replace("/usr/src/", f"{root}/usr/src/"))
    source = work / "module"
    source.mkdir()
    shutil.copy(GUEST / "kb.c", source)
    (source / "Makefile").write_text("obj-m := kb.o\n")
    command = ["make", "-s", "-C", str(tree), f"M={source}", "modules"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Skipped(f"the module does not compile: {done.stderr.strip()}")
    return source / "kb.ko"


def functions(image: Path, count: int) -> list[str]:
    """Boot the kernel, and return `count` names of functions that can be probed and are unique."""
    files = "tracing/available_filter_functions", "kprobes/blacklist", "machine/kallsyms"
    text = f'cd "$KPROBEFS" && for file in {" ".join(files)}; do cat $file; echo; done'
    command = [*PROGRAM, "run", "--image", str(image), "--", "sh", "-c", text]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    traced, refused, symbols = (part.splitlines() for part in done.stdout.split("\n\n")[:3])
    excluded = {line.split("\t")[-1] for line in refused}
    counts = Counter(line.split()[2] for line in symbols)
    # Linux also refuses a symbol such as name.part.0 if it refuses the symbol without the suffix.
    plain = (name for name in traced if name.isidentifier())
    found = [name for name in plain if counts[name] == 1 and name not in excluded]
    if len(found) < count:
        raise SystemExit(f"{image}: only {len(found)} functions for {count} events")
    return found[:count]


def archive(directory: Path) -> bytes:
    """Return a compressed archive with the files of a directory, for the kernel to unpack."""
    names = "\n".join(str(path.relative_to(directory)) for path in sorted(directory.rglob("*")))
    command = ["cpio", "-o", "-H", "newc", "--quiet"]
    done = subprocess.run(command, cwd=directory, input=names.encode(), capture_output=True, check=True)
    return gzip.compress(done.stdout, 1)


def prepare(options: argparse.Namespace, work: Path) -> Prepared:
    """Fetch the packages, and make the files of all sides in the directory `work`. Raises: Skipped."""
    check_tools(options.sides)
    if options.image is None:
        image = next((name for name in depends(META) if name.startswith("linux-image-")), None)
        if image is None:
            raise Skipped(f"apt knows no {META}; run apt-get update")
        (options.image,) = fetch(work, image)
    tree = unpack([options.image], work / "image")
    [vmlinuz] = tree.glob("boot/vmlinuz-*")
    module = options.module or work / "kb.ko"
    if not module.exists():
        compiled = compile_module(work, vmlinuz.name.removeprefix("vmlinuz-"))
        # Another run with the same file sees either the whole module or none.
        new = module.with_name(f"{module.name}.{os.getpid()}")
        shutil.copy(compiled, new)
        new.replace(module)
    guest = work / "guest"
    guest.mkdir()
    count = max(options.events, default=0)
    lines = [f"p:many/e{number} {name}\n" for number, name in enumerate(functions(options.image, count))]
    (guest / "definitions.all").write_text("".join(lines))
    for file in (GUEST / "init", GUEST / "script.sh"):
        shutil.copy(file, guest)
    shutil.copy(module, guest / "kb.ko")
    (guest / "init").chmod(0o755)
    settings = {
        "COUNTS": " ".join(map(str, options.events)),
        "CALLS": str(options.calls),
        "TURNS": str(options.turns),
    }
    inside = work / "initrd"
    shutil.copytree(guest, inside)
    (inside / "bin").mkdir()
    busybox = shutil.which("busybox")
    assert busybox is not None
    shutil.copy(busybox, inside / "bin")
    for place, seen_as in ((inside, Path("/")), (guest, guest)):
        paths = {"MODULE": seen_as / "kb.ko", "DEFINITIONS": seen_as / "definitions.all", "WORK": "/tmp"}
        text = "".join(f"export {name}='{value}'\n" for name, value in (settings | paths).items())
        (place / "settings").write_text(text)
    initrd = work / "initrd.gz"
    initrd.write_bytes(archive(inside))
    return Prepared(
        options.image.resolve(), vmlinuz, guest / "kb.ko", guest / "definitions.all", initrd, settings, guest
    )


# Reports


def rows(sides: Sequence[Side]) -> list[tuple[str, str]]:
    """Return names and units of the rows, the starts first."""
    starts = [(name, SECONDS) for name in (FIRST_START, START, FIRST_LINE)]
    found = sides[0].samples
    return [row for row in starts if row in found] + [row for row in found if row not in starts]


def table(sides: Sequence[Side], *, has_spread: bool) -> Iterator[str]:
    """Yield the lines of a Markdown table of medians, with ratios of the first side's medians to the others.

    `has_spread`: whether the table shows the spread of samples.
    """
    first, *others = sides
    ratios = [f"{first.title} / {other.title}" for other in others]
    head = ["", *(side.title for side in sides), *ratios]
    yield f"| {' | '.join(head)} |"
    yield f"| --- |{' ---: |' * (len(head) - 1)}"
    for name, unit in rows(sides):
        found = [Distribution(name, unit, tuple(side.samples[name, unit])) for side in sides]
        cells = [_cell(figure, has_spread=has_spread) for figure in found]
        shares = [
            "-" if figure.is_noise or found[0].is_noise else _ratio(found[0].median / figure.median)
            for figure in found[1:]
        ]
        yield f"| {' | '.join([name, *cells, *shares])} |"


def _cell(figure: Distribution, *, has_spread: bool) -> str:
    if figure.is_noise:
        return "noise"
    median, low, high = (_number(value, figure.unit) for value in (figure.median, *_ends(figure)))
    return f"{median} {figure.unit}" + (f" ({low} to {high})" if has_spread else "")


def _ratio(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _ends(figure: Distribution) -> tuple[float, float]:
    return figure.quantile(1), figure.quantile(9)


def _number(value: float, unit: str) -> str:
    return f"{value:.0f}" if unit == NS or value >= 100 else f"{value:.3g}"


def heading(options: argparse.Namespace, skipped: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a report above its table: date, commit, machine, versions and skipped sides."""
    commit = _output("git", "-C", str(ROOT), "describe", "--always", "--dirty").replace("-dirty", ", changed")
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    qemu = _output(QEMU, "--version").partition("\n")[0] if shutil.which(QEMU) else "No QEMU"
    yield f"# Beside QEMU, {date.today()}"
    yield ""
    yield f"Commit {commit}. Machine: {os.cpu_count()} cores of {cpu[1] if cpu else 'an unknown CPU'}, Linux"
    yield f"{platform.release()}, Python {platform.python_version()}. {qemu}. Kernel: {options.image.name}."
    yield ""
    yield from EXPLANATION
    yield f"Rounds: {options.rounds}; {options.host.line()}."
    for reason in skipped:
        yield f"Skipped: {reason}."
    yield ""


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def write(options: argparse.Namespace, sides: Sequence[Side], skipped: Sequence[str]) -> None:
    """Write the report, and put the table of medians into README.md."""
    name = f"{date.today()}-qemu.md"
    lines = [*heading(options, skipped), *table(sides, has_spread=True)]
    (options.pages / "docs/reports" / name).write_text("\n".join(lines) + "\n")
    readme = options.pages / "README.md"
    before, _, rest = readme.read_text().partition(MARKERS[0])
    _, marker, after = rest.partition(MARKERS[1])
    if not marker:
        raise SystemExit(f"{readme}: the lines {MARKERS} are missing")
    report = f"[the report](docs/reports/{name})"
    text = (
        f"Debian's kernel under kprobefs and under QEMU without KVM, with the same script; {report} has the\n"
    )
    text += "commit, the machine and the spread:\n\n"
    text += "\n".join(table(sides, has_spread=False))
    readme.write_text(f"{before}{MARKERS[0]}\n{text}\n{MARKERS[1]}{after}")


def able(names: Sequence[str], prepared: Prepared) -> tuple[list[Side], list[str]]:
    """Return the sides of `names` that can run, and the reasons why the other sides cannot."""
    sides = []
    skipped = []
    for name in names:
        try:
            SIDES[name].check(prepared)
        except Skipped as reason:
            skipped.append(f"{SIDES[name].title}: {reason}")
            print(f"skipped {SIDES[name].title}: {reason}", file=sys.stderr)
        else:
            sides.append(SIDES[name])
    return sides, skipped


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = arguments(__doc__)
    made.add_argument("--image", type=Path, help=f"Debian package with a kernel (default: {META} of apt)")
    made.add_argument("--module", type=Path, help="compiled module; if the file is missing, compile it there")
    made.add_argument("--rounds", type=int, default=5, help="runs of the script on each side (default: 5)")
    made.add_argument("--turns", type=int, default=3, help="measurements of a hit in a run (default: 3)")
    made.add_argument("--calls", type=int, default=200, help="thousands of calls in a measurement of a hit")
    made.add_argument("--events", type=int, nargs="*", default=[1_000, 10_000], metavar="N")
    made.add_argument("--sides", nargs="+", choices=SIDES, default=DEFAULT_SIDES)
    made.add_argument("--no-first-start", action="store_true", help="do not boot without a snapshot")
    made.add_argument("--write", action="store_true", help="make a report, and fill in README.md")
    made.add_argument("--pages", type=Path, default=ROOT, help="directory with README.md and docs/")
    return made


def main() -> None:
    """Run the benchmark, and print its figures; with `--write`, make a report."""
    options = parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="kprobefs-bench-", dir="/var/tmp") as made:
        try:
            prepared = prepare(options, Path(made))
        except Skipped as reason:
            print(f"skipped: {reason}", file=sys.stderr)
            report([], options)
            return
        sides, skipped = able(options.sides, prepared)
        for _ in range(options.rounds):
            for side in sides:
                round_of(side, prepared, first=not options.no_first_start)
    if options.write:
        write(options, sides, skipped)
    figures = [
        Distribution(f"{name}, {side.title}", unit, tuple(side.samples[name, unit]))
        for name, unit in rows(sides)
        for side in sides
    ]
    if options.json:
        report(figures, options)
    else:
        print(*table(sides, has_spread=True), options.host.line(), sep="\n")


if __name__ == "__main__":
    main()
