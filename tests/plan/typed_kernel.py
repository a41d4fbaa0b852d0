"""A made kernel with BTF, whose functions have parameters of many types."""

from __future__ import annotations

from pathlib import Path

from tests.image.linux import made

CALL_FENTRY = b"\xe8\0\0\0\0"
BODY = bytes.fromhex("53 4889fb 4889d8 31f6 5b")  # push %rbx; mov %rdi,%rbx; mov %rbx,%rax; xor; pop


def kernel_with_types(tmp_path: Path, body: bytes = BODY, *, is_later: bool = False) -> str:
    """Write a made kernel with BTF and return its path.

    The kernel's function int f(int number, unsigned long size, struct pair *pair) consists of `body`.
    `is_later`: in this version, the members of struct pair and two parameters of g() have changed places. The
    result of narrowed() and the member of its parameter are int, and not long.
    """
    source = made.Kernel()
    at = source.function("f", CALL_FENTRY + body + b"\xc3")
    source.function("a_function_whose_name_is_too_long_for_an_event_of_its_own_name_1", BODY + b"\xc3")
    source.function("g", CALL_FENTRY + BODY + b"\xc3")
    source.function("split.isra.0", CALL_FENTRY + BODY + b"\xc3")
    for name in ("whole", "whole.part.0", "whole.constprop.1.isra.0", "whole.cold", "wholesale.part.0"):
        source.function(name, CALL_FENTRY + BODY + b"\xc3")
    source.function("connect", CALL_FENTRY + BODY + b"\xc3")
    source.function("narrowed", CALL_FENTRY + BODY + b"\xc3")
    for _ in range(2):
        source.function("twice", CALL_FENTRY + BODY + b"\xc3")
    sites = [address for address, letter, _ in source.symbols if letter == "T" and address >= at]
    btf = made.Btf()
    number = btf.add(1, "int", 4, (1 << 24 | 32).to_bytes(4, "little"))
    size = btf.add(1, "unsigned long", 8, (64).to_bytes(4, "little"))
    port = btf.add(8, "__be16", btf.add(1, "unsigned short", 2, (16).to_bytes(4, "little")))
    place = 8 * is_later
    members = ("first", number, place), ("port", port, place + 6), ("second", size, 8 - place)
    pair = btf.structure("pair", 16, *sorted(members, key=lambda member: member[2]))
    pointer = btf.add(2, "", pair)
    proto = btf.prototype(number, ("number", number), ("size", size), ("pair", pointer))
    btf.add(12, "f", proto)
    add_nodes(btf, number, size, pair, is_later=is_later)
    data = btf.array(btf.add(1, "unsigned char", 1, (8).to_bytes(4, "little")), 14)
    address = btf.structure("sockaddr", 16, ("sa_family", port, 0), ("sa_data", data, 2))
    btf.add(12, "connect", btf.prototype(number, ("address", btf.add(2, "", address))))
    btf.add(12, "whole", btf.prototype(0))
    btf.add(12, "many", btf.prototype(number, ("number", number), ("", 0)))
    stub = btf.prototype(0, ("__data", pointer), ("number", number), ("size", size))
    btf.add(12, "__probestub_event", stub)
    long = btf.add(1, "long int", 8, (1 << 24 | 64).to_bytes(4, "little"))
    narrowed = btf.structure("narrowed", 8, ("count", number if is_later else long, 0))
    to_narrowed = btf.add(2, "", narrowed)
    btf.add(12, "narrowed", btf.prototype(number if is_later else long, ("narrowed", to_narrowed)))
    source.table("mcount_loc", b"".join(site.to_bytes(8, "little") for site in sites))
    source.table("BTF", btf.data())
    file = tmp_path / "vmlinuz"
    file.write_bytes(made.vmlinuz(source.elf(), "xz"))
    return str(file)


def add_nodes(btf: made.Btf, number: int, size: int, pair: int, *, is_later: bool) -> None:
    """Add struct node *g(struct node *node, loff_t length, char **names, void *any, unsigned long word).

    `number`, `size`, `pair`: ids of the types int, unsigned long and struct pair. `is_later`: as for
    kernel_with_types().
    """
    letter = btf.add(1, "char", 1, (1 << 24 | 8).to_bytes(4, "little"))
    text = btf.add(2, "", letter)
    longer = btf.add(1, "long long int", 8, (1 << 24 | 64).to_bytes(4, "little"))
    length = btf.add(8, "loff_t", longer)
    bits = btf.fields("bits", 4, ("low", number, 0, 3), ("high", number, 3, 9), ("rest", number, 16, 16))
    anything = btf.add(2, "", 0)
    to_pair = btf.add(2, "", pair)
    tail = btf.array(letter, 0)
    label = btf.array(letter, 8)
    to_node = btf.add(2, "", label + 3)
    either = btf.structure("", 8, ("one", to_pair, 0), ("two", to_node, 0), union=True)
    node = btf.structure(
        "node", 72,
        ("id", number, 0), ("bits", bits, 4), ("pair", to_pair, 8), ("next", to_node, 16), ("word", size, 24),
        ("length", length, 32), ("text", text, 40), ("label", label, 48), ("any", anything, 56),
        ("either", either, 64), ("tail", tail, 72),
    )  # fmt: skip
    names = btf.add(2, "", text)
    btf.structure("part", 24, ("pair", pair, 0), ("more", number, 16), ("last", number, 20))
    words = [("node", to_node), ("length", length), ("names", names), ("any", anything), ("word", size)]
    if is_later:
        words[1:3] = reversed(words[1:3])
    btf.add(12, "g", btf.prototype(to_node, *words))
    assert node == label + 3
