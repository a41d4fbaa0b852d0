"""Entry point of `kprobefs` and `python -m kprobefs`. During imports, ^C ends the program silently."""

import gc
import signal
import sys

YOUNG_OBJECTS = 20_000
"""Number of new objects after which Python looks for garbage.

A command that starts a daemon creates 30,000 objects, none of which is garbage. With the default number,
Python would look for garbage a hundred times.
"""


STARTS = ("mount", "run", "trace", "tour")
"""Names of the commands that start a daemon; for them, a second process compiles modules.

These commands import ten times as many modules as other commands.
"""


def main() -> int:
    """Run the program, and return its exit status."""
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    # A SIGINT that the shell lets the program ignore stays ignored.
    is_interrupted = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # If the caller ignores SIGCHLD, the kernel would reap children that this process waits for.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if sys.argv[1:2] and sys.argv[1] in STARTS:
        from kprobefs.common import compile_ahead

        compile_ahead.begin()
    from kprobefs.cli.main import main as program

    try:
        if is_interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return program()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
