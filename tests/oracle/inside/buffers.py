"""Random changes of buffer sizes, and the comparison of the records that remain."""

from __future__ import annotations

import os
import random
import re

from emulated_kernel.vfs.mount import Mount
from tests.oracle.inside.mount_files import CLIENT, read, write
from tests.oracle.inside.tally import Tally

BUFFER_WRITES = (
    ("buffer_subbuf_size_kb", ("0", "1", "4", "5", "8", "16", "33", "512", "513", "-1", "x")),
    ("buffer_size_kb", ("0", "1", "9", "20", "100", "1408")),
    ("per_cpu/cpu0/buffer_size_kb", ("1", "50", "1408")),
    ("trace_marker", ("one", "two", "three")),
    ("trace_marker", ("m" * 3000, "n" * 4050)),
    ("snapshot", ("0", "1", "2")),
    ("trace", ("",)),
)
"""Files of a trace array, and texts that are written to them; an empty text only truncates."""
BUFFER_FILES = (
    "buffer_subbuf_size_kb",
    "buffer_size_kb",
    "per_cpu/cpu0/buffer_size_kb",
    "buffer_total_size_kb",
    "events/header_page",
)


def compare_buffers(linux: Mount, ours: Mount, count: int, seed: int) -> Tally:
    """Compare the sizes of buffers and of their pages, and the records that remain, after random writes to
    both kernels.
    """
    rng = random.Random(seed)
    tally = Tally()
    tops = ("/tracing", "/tracing/instances/sized")
    for mount in (linux, ours):
        mount.mkdir(CLIENT, tops[1], 0o755)
    for _ in range(count):
        top = rng.choice(tops)
        name, values = rng.choice(BUFFER_WRITES)
        value = rng.choice(values)
        asked = f"{top}/{name} {value}"
        answers = [buffer_answer(mount, top, name, value) for mount in (linux, ours)]
        tally.add(asked, *answers, is_refused=bool(answers[0][0]))
    for mount in (linux, ours):
        mount.rmdir(CLIENT, tops[1])
        write(mount, "/tracing/snapshot", "0")
        write(mount, "/tracing/buffer_subbuf_size_kb", "4")
        write(mount, "/tracing/buffer_size_kb", "1408")
    return tally


def buffer_answer(mount: Mount, top: str, name: str, value: str) -> tuple[str, ...]:
    """Write `value` to a file of the trace array in the directory `top`.

    Return the errno, and the texts that the write may have changed. An empty value only truncates the file.
    """
    outcome = write(mount, f"{top}/{name}", value, 0 if value else os.O_TRUNC)
    texts = [read(mount, f"{top}/{file}") for file in BUFFER_FILES]
    for file in ("trace", "snapshot"):
        lines = read(mount, f"{top}/{file}").splitlines()
        texts += [line.partition("mark_write: ")[2][:20] for line in lines if not line.startswith("#")]
    stats = read(mount, f"{top}/per_cpu/cpu0/stats").splitlines()
    if name == "buffer_subbuf_size_kb" and not outcome:
        # Linux still counts the removed records.
        write(mount, f"{top}/trace", "", os.O_TRUNC)
        write(mount, f"{top}/snapshot", "2")
        stats = []
    # The bytes depend on the time between records, which may need a record of their own.
    return outcome, *(line for line in stats if not re.search(r" ts:|^bytes:", line)), *texts
