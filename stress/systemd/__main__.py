"""Boot the package under systemd in a virtual machine and check its units: python -m stress.systemd.

It needs root, debootstrap, and QEMU for x86_64; no KVM. One run takes 10 to 20 minutes and 4 GB.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = {"bookworm": "Debian 12", "trixie": "Debian 13", "noble": "Ubuntu 24.04"}
SIZE = "4G"
"""Size of the disk. Its file is sparse."""
LAST = "# mounts of kprobefs before the shutdown"
"""Start of the last line of the checks' output before the shutdown."""
LIMIT = 1800
"""Maximum time of a run of the virtual machine in seconds."""
APPEND = "root=/dev/vda rw console=ttyS0 panic=-1 mitigations=off random.trust_cpu=on no_timer_check quiet"
"""Command line of the kernel. On a busy host, the check of the timer would end in a panic, so it is off."""


def make_disk(suite: str, work: Path) -> Path:
    """Make a disk with a new root, and in the same directory its kernel and initial file system.

    `suite`: the distribution's suite. `work`: the directory. Return the path of the disk.
    """
    root = work / "root"
    root.mkdir()
    made = [str(ROOT / "scripts/fresh-root"), suite, "--", "sh", "stress/systemd/make_root.sh"]
    with subprocess.Popen(made, stdout=subprocess.PIPE) as making:
        subprocess.run(["tar", "-x", "-p", "-C", root], stdin=making.stdout, check=True)
    if making.returncode:
        sys.exit(f"{suite}: no root")
    for name, pattern in (("kernel", "vmlinuz-*"), ("initrd", "initrd.img-*")):
        [found] = (root / "boot").glob(pattern)
        found.rename(work / name)
    disk = work / "disk"
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", root, disk, SIZE], check=True)
    return disk


def run(disk: Path) -> tuple[str, str]:
    """Run the virtual machine until it powers off; return the output of the checks and of the console."""
    console = disk.with_name("console")
    machine = ["-accel", "tcg,thread=multi", "-cpu", "max", "-m", "3072", "-smp", "2"]
    options = ["-nographic", "-no-reboot", "-nodefaults", "-serial", f"file:{console}"]
    files = [str(disk.with_name(name)) for name in ("kernel", "initrd")]
    kernel = ["-kernel", files[0], "-initrd", files[1], "-append", APPEND]
    drive = f"file={disk},if=virtio,format=raw,cache=unsafe"
    command = ["qemu-system-x86_64", *machine, *options, *kernel, "-drive", drive]
    subprocess.run(command, timeout=LIMIT, check=True)
    shown = ["debugfs", "-R", "cat /result", str(disk)]
    result = subprocess.run(shown, capture_output=True, text=True, check=True)
    return result.stdout, console.read_text(errors="replace")


def at_shutdown(disk: Path, console: str) -> list[str]:
    """Return the results of the checks during the shutdown, from the disk and the console's output."""
    left = re.search(r"SHUTDOWN: mounts of kprobefs that are left: (\d+)", console)
    header = subprocess.run(["dumpe2fs", "-h", disk], capture_output=True, text=True, check=True).stdout
    is_clean = bool(re.search(r"^Filesystem state: +clean$", header, re.M)) and "needs_recovery" not in header
    found = {
        "shutdown leaves no mount": left is not None and left[1] == "0",
        "shutdown unmounts the root": is_clean,
        "shutdown waits for nobody": left is not None and "A stop job is running" not in console,
    }
    return [f"{'ok' if done else 'FAILED'} {what}" for what, done in found.items()]


def main() -> int:
    """Run the checks of one distribution, and return 0 if all passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=DISTRIBUTIONS, nargs="?", default="bookworm")
    parser.add_argument("--work", type=Path, help="keep root, disk and console in this new directory")
    given = parser.parse_args()
    with TemporaryDirectory(dir="/var/tmp") as temporary:
        work = Path(temporary) if given.work is None else given.work
        work.mkdir(exist_ok=True)
        disk = make_disk(given.suite, work)
        result, console = run(disk)
        lines = [*result.splitlines(), *at_shutdown(disk, console)]
        if LAST not in result:
            lines.append("FAILED the checks did not reach their end; see the console")
    print("\n".join(lines))
    failed = [line for line in lines if line.startswith("FAILED ")]
    passed = [line for line in lines if line.startswith("ok ")]
    print(f"{DISTRIBUTIONS[given.suite]}: {len(passed)} passed, {len(failed)} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
