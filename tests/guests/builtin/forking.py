"""Fork and wait on command: `python forking.py COMMANDS ANSWERS`.

COMMANDS and ANSWERS are the descriptors of two pipes. Each byte of COMMANDS is a command. The answer to a
command is the pid of a child.
"""

from __future__ import annotations

import os
import sys


def obey(commands: int, answers: int) -> None:
    """Obey `f` (fork and wait), `k` (fork a child that lives on) and `w` (wait for the last such child)."""
    kept: list[tuple[int, int]] = []
    while command := os.read(commands, 1):
        if command == b"w":
            child, release = kept.pop()
            os.close(release)
        else:
            waits, release = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(release)
                os.read(waits, 1 if command == b"k" else 0)
                os._exit(0)
            os.close(waits)
            if command == b"k":
                kept.append((child, release))
            else:
                os.close(release)
        if command != b"k":
            os.waitpid(child, 0)
        os.write(answers, child.to_bytes(4, "little"))


if __name__ == "__main__":
    pipes = [int(number) for number in sys.argv[1:]]
    os.write(pipes[1], b"+")
    obey(*pipes)
