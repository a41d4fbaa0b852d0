"""The image's pure functions, compiled for the host from the same sources into a shared object."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from pathlib import Path

from emulated_kernel.image.build_images import SOURCE

SOURCES = (*(path for path in sorted(SOURCE.glob("lib/*.c")) if path.stem not in ("bug", "iov_iter")),)
MORE = (SOURCE / "kernel/time/time.c",)
FLAGS = (
    "-std=gnu11 -O1 -w -shared -fPIC -ffreestanding -fno-builtin -fno-strict-aliasing -fno-common -fwrapv "
    "-mcmodel=small -nostdinc -Iinclude -Iarch/x86/include -Wl,-Bsymbolic"
)
# What the sources expect of a kernel: memory, and the names of symbols.
SHIM = """
void *malloc(__SIZE_TYPE__), *calloc(__SIZE_TYPE__, __SIZE_TYPE__);
void free(void *);
void *__kmalloc(__SIZE_TYPE__ n, unsigned gfp) { return calloc(1, n); }
void kfree(const void *p) { free((void *)p); }
void *kmemdup(const void *from, __SIZE_TYPE__ n, unsigned gfp)
{
    char *to = malloc(n);
    for (__SIZE_TYPE__ i = 0; i < n; i++) to[i] = ((const char *)from)[i];
    return to;
}
int sprint_symbol(char *to, unsigned long address) { return *to = 0; }
int sprint_symbol_no_offset(char *to, unsigned long address) { return *to = 0; }
int sprint_backtrace(char *to, unsigned long address) { return *to = 0; }
"""


def why_not() -> str | None:
    """Return the reason why functions cannot be compiled here, or None if they can."""
    if platform.machine() != "x86_64":
        return "the headers of the sources are x86's"
    if not shutil.which("gcc"):
        return "no gcc"
    start = subprocess.run(["gcc", "-print-file-name=crti.o"], capture_output=True, text=True, check=True)
    return None if os.path.isabs(start.stdout) else "no C library to link with"


def build(directory: Path) -> ctypes.CDLL:
    """Compile and load the functions, with their own definitions of names that the C library has, too."""
    shim, output = directory / "shim.c", directory / "pure.so"
    shim.write_text(SHIM)
    files = [str(path.relative_to(SOURCE)) for path in (*SOURCES, *MORE)]
    subprocess.run(["gcc", *FLAGS.split(), "-o", str(output), str(shim), *files], cwd=SOURCE, check=True)
    return ctypes.CDLL(str(output))
