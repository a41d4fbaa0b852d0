"""The recorded writes to kprobe_events, replayed: errno, error_log and the remaining events are as
recorded.
"""

from __future__ import annotations

import errno
import json
import re
from collections import Counter
from typing import Any

import pytest

from tests.trace.events.kernel import Function, Kernel, errno_of, make_kernel
from tests.trace.events.plain_event import PlainEvent
from tests.trace.events.recorded import oracle_path

_ADDRESS = re.compile(r" 0x[0-9a-f]{16}(?= |$)", re.MULTILINE)
_TIME = re.compile(r"^\[ *\d+\.\d+\]", re.MULTILINE)
_REFUSED = ("asm_exc_", "do_int3", "get_kprobe", "kprobe_int3_handler")


def _load() -> list[dict[str, Any]]:
    with oracle_path("errors-6.1.jsonl").open() as lines:
        records = [json.loads(line) for line in lines]
    return [record for record in records if _is_ours(record)]


def _is_ours(record: dict[str, Any]) -> bool:
    """Return True if a record is a write of a kprobe event, to kprobe_events or dynamic_events. Synthetic
    events and event probes are not tested here.
    """
    if record["file"] == "tracing/dynamic_events":
        return str(record["bytes"])[0] not in "se"
    return str(record["file"]) == "tracing/kprobe_events"


def _functions(records: list[dict[str, Any]]) -> list[Function]:
    """Return functions with which a stand-in kernel can give the recorded answers.

    Some of their names are ambiguous, some are notrace, and the engine refuses some.
    """
    table: dict[str, Function] = {
        "name_show#": Function("name_show", 0xFFFFFFFF81300000),
        "t_start#": Function("t_start", 0xFFFFFFFF81310000),
        "linux_banner": Function("linux_banner", 0xFFFFFFFF82001000, fentry=False),
    }
    for record in records:
        place = re.match(r"[pr]\w*:?\S* (?:(\w+):)?([A-Za-z_]\w*)", record["bytes"])
        if not place or place[1] == "nomod" or place[2] in table or _is_unknown(record):
            continue
        name = place[2]
        module = "virtio_blk" if name.startswith("virtblk") else None
        if place[1] == module or not place[1]:
            notrace = any("notrace" in message for message in record["kmsg"])
            refused = errno.EINVAL if name.startswith(_REFUSED) else 0
            address = 0xFFFFFFFF81400000 + 0x1000 * len(table)
            table[name] = Function(name, address, module=module, fentry=not notrace, refused=refused)
    return list(table.values())


def _is_unknown(record: dict[str, Any]) -> bool:
    """Return True if the kernel did not know the probed symbol. An unknown symbol of an argument, which gives
    the same error, does not count.
    """
    return record["errno"] == "ENOENT" and "@" not in record["bytes"].partition(" ")[2].lstrip("@*")


def _write(kernel: Kernel, file: str, text: str) -> str:
    """Write `text` to `file`. Return the name of the errno, or 0 as text if the write succeeds."""
    data = text.encode("latin-1")
    if file == "tracing/dynamic_events":
        return errno_of(lambda: kernel.dynamic_events.write(data)) or "0"
    return errno_of(lambda: kernel.events.write(data)) or "0"


def _set_up(kernel: Kernel, step: str | list[str]) -> None:
    if isinstance(step, str):
        assert _write(kernel, "tracing/kprobe_events", step) == "0"
        return
    enable = re.fullmatch(r"tracing/events/(\w+)/(\w+)/enable", step[0])
    assert enable is not None
    assert step[1] == "1"
    event = kernel.events.find(enable[1], enable[2])
    assert event is not None
    event.enable(kernel.recorder)


def _replay(record: dict[str, Any], functions: list[Function]) -> list[str]:
    """Replay a recorded write, and return the differences from the record."""
    kernel = make_kernel(functions, modules=["virtio_blk"])
    for group, name in (("sched", "sched_switch"), ("ftrace", "print")):
        kernel.events.registry.add(PlainEvent(group, name))
    for step in record["setup"]:
        _set_up(kernel, step)
    kernel.events.error_log.clear()
    kernel.messages.clear()
    got = {
        "errno": _write(kernel, record["file"], record["bytes"]),
        "error_log": _TIME.sub("[]", "".join(kernel.events.error_log.records())),
        "kprobe_events": _ADDRESS.sub(" ADDRESS", "".join(kernel.events.records())),
        "kmsg": kernel.messages,
    }
    expected = {
        "errno": str(record["errno"]),
        "error_log": _TIME.sub("[]", record["error_log"]),
        "kprobe_events": _ADDRESS.sub(" ADDRESS", record["kprobe_events"]),
        "kmsg": [message for message in record["kmsg"] if "directory" not in message],
    }
    return [f"{key}: {got[key]!r}, recorded {expected[key]!r}" for key in got if got[key] != expected[key]]


def test_recorded_writes(capsys: pytest.CaptureFixture[str]) -> None:
    records = _load()
    functions = _functions(records)
    differing = {record["id"]: found for record in records if (found := _replay(record, functions))}
    agreeing = Counter(record["file"] for record in records if record["id"] not in differing)
    total = Counter(record["file"] for record in records)
    with capsys.disabled():
        for file, count in total.items():
            print(f"\n{file}: {agreeing[file]} of {count} recorded writes agree", end="")
    by_id = {record["id"]: record for record in records}
    report = [f"{key} {by_id[key]['bytes'][:80]!r}: {'; '.join(found)}" for key, found in differing.items()]
    assert not report, "\n".join(report)
