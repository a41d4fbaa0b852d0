"""Entry point of `kprobefs` and `python -m kprobefs`. During imports, ^C ends the program silently."""

import signal
import sys


def main() -> int:
    """Run the program, and return its exit status."""
    # A SIGINT that the shell lets the program ignore stays ignored.
    is_interrupted = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kprobefs.cli.main import main as program

    try:
        if is_interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return program()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
