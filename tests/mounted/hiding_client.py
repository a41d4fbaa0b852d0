"""A client whose memory does not answer: python hiding_client.py SLOW. Commands come from standard input.

    open PATH    open a file; between the call and its reply, replace the page with the path
    exec NAME    take a name, and replace the page with the path of this program

SLOW is a file whose reads wait. The client replaces a page by mapping SLOW over it. The last variable of the
environment must be a page or longer: it separates the path of this program from memory that is still in use.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading

PAGE = mmap.PAGESIZE
_AT_EXECFN = 31
_PR_SET_NAME = 15
_FIXED = 0x10
_PRIVATE = 2
_ANONYMOUS = 0x20

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.open.argtypes = [ctypes.c_void_p, ctypes.c_int]
libc.getauxval.restype = ctypes.c_ulong


def hide(address: int, slow: int) -> None:
    """Map the file with the descriptor `slow` over the page at `address`."""
    found = libc.mmap(address, PAGE, mmap.PROT_READ, _PRIVATE | _FIXED, slow, 0)
    assert found == address, os.strerror(ctypes.get_errno())


def open_hidden(path: str, slow: int) -> str:
    """Open `path` in a thread, and print "waiting". When a line arrives, hide the page that has the path.

    Return the result of open(2).
    """
    page = libc.mmap(None, PAGE, mmap.PROT_READ | mmap.PROT_WRITE, _PRIVATE | _ANONYMOUS, -1, 0)
    ctypes.memmove(page, os.fsencode(path) + b"\0", len(path) + 1)
    result: list[str] = []

    def call() -> None:
        found = libc.open(page, os.O_RDONLY)
        result.append(os.strerror(ctypes.get_errno()) if found < 0 else "opened")

    thread = threading.Thread(target=call)
    thread.start()
    print("waiting", flush=True)
    sys.stdin.readline()
    hide(page, slow)
    print("hidden", flush=True)
    thread.join()
    return result[0]


def main() -> None:
    slow = os.open(sys.argv[1], os.O_RDONLY)
    print("ready", flush=True)
    while line := sys.stdin.readline():
        command, argument = line.split()
        if command == "open":
            print(open_hidden(argument, slow), flush=True)
        else:
            libc.prctl(_PR_SET_NAME, argument.encode())
            # The stack ends at this page. Nothing in it is needed any more; see the module's docstring.
            hide(libc.getauxval(_AT_EXECFN) // PAGE * PAGE, slow)
            print("hidden", flush=True)


if __name__ == "__main__":
    main()
