"""`python -m kprobefs`, and what its command runs: an interrupt ends it in silence from here on."""

import signal
import sys


def main() -> int:
    """Run the program; returns its exit status."""
    # One that a shell has it ignore stays ignored.
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
