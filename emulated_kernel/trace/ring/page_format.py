"""The texts of events/header_page and header_event, which describe pages of trace_pipe_raw to programs."""

from __future__ import annotations

from emulated_kernel.trace.ring.buffer_page import (
    MAX_TYPE_LEN,
    PADDING,
    PAGE_HEADER_SIZE,
    TIME_EXTEND,
    TIME_STAMP,
    capacity,
)

_STAMP_SIZE = 8
_COMMIT_SIZE = PAGE_HEADER_SIZE - _STAMP_SIZE


def _field(declaration: str, offset: int, size: int, signed: bool) -> str:
    return f"\tfield: {declaration};\toffset:{offset};\tsize:{size};\tsigned:{signed:d};\n"


def header_page_text(order: int = 0, overwrite: str = "int", *, signed_char: bool = True) -> str:
    """Return the text of header_page for sub-buffers of 4096 << order bytes.

    `overwrite`: C type of the field `overwrite` in the text. `signed_char`: whether char is a signed type.

    Mirrors: kernel/trace/ring_buffer.c:ring_buffer_print_page_header (v6.1).
    """
    return (
        _field("u64 timestamp", 0, _STAMP_SIZE, False)
        + _field("local_t commit", _STAMP_SIZE, _COMMIT_SIZE, True)
        + _field(f"{overwrite} overwrite", _STAMP_SIZE, 1, overwrite == "int" or signed_char)
        + _field("char data", PAGE_HEADER_SIZE, capacity(order), signed_char)
    )


def header_event_text() -> str:
    """Return the text of header_event.

    Mirrors: kernel/trace/ring_buffer.c:ring_buffer_print_entry_header (v6.1).
    """
    return (
        "# compressed entry header\n"
        "\ttype_len    :    5 bits\n"
        "\ttime_delta  :   27 bits\n"
        "\tarray       :   32 bits\n"
        "\n"
        f"\tpadding     : type == {PADDING}\n"
        f"\ttime_extend : type == {TIME_EXTEND}\n"
        f"\ttime_stamp : type == {TIME_STAMP}\n"
        f"\tdata max type_len  == {MAX_TYPE_LEN}\n"
    )
