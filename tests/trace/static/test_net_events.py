"""Static events of packets, sockets and connections: formats of a real Linux 6.1, and records that agree with
what the guest did.
"""

from __future__ import annotations

import errno
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.format_file import in_short
from tests.trace.static.conftest import Enable, find, records

RECORDED = Path(__file__).with_name("net_events-6.1.txt")
GROUPS = ("net", "skb", "sock", "tcp", "udp")
STREAM, DGRAM = 1, 2
DONTWAIT = 0x40
PORT = 7
_STATE = {name: f"TCP_{name}" for name in ("CLOSE", "LISTEN", "SYN_RECV", "ESTABLISHED")}


class Sockets:
    """System calls on sockets that the guest's init task makes."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.task = kernel, kernel.guest.processes.init

    def call(self, name: str, *args: int) -> int:
        return self.kernel.guest.syscalls.call(self.task, name, *args)

    def at(self, name: str, fd: int, port: int) -> int:
        """Call bind(2) or connect(2) with the address 127.0.0.1 and a port."""
        with self.kernel.guest.buffers.borrowed() as buffer:
            address = struct.pack("<H", 2) + struct.pack(">HI", port, 0x7F00_0001) + bytes(8)
            self.kernel.machine.memory.write(buffer, address)
            return self.call(name, fd, buffer, 16)

    def send(self, fd: int, size: int) -> int:
        with self.kernel.guest.buffers.borrowed() as buffer:
            return self.call("sendto", fd, buffer, size, DONTWAIT, 0, 0)

    def pair(self) -> tuple[int, int]:
        """Make a connection to PORT, and return the descriptors of both ends."""
        listener, client = (self.call("socket", 2, STREAM, 0) for _ in range(2))
        self.at("bind", listener, PORT)
        self.call("listen", listener, 5)
        self.at("connect", client, PORT)
        return client, self.call("accept", listener, 0, 0)


@pytest.fixture
def net(kernel: Kernel, enable: Enable) -> Sockets:
    """Enable all events of GROUPS, and return the sockets of the kernel."""
    for group in GROUPS:
        for name in kernel.tracing.kprobe_events.registry.in_group(group):
            enable(f"{group}/{name}")
    return Sockets(kernel)


def told(kernel: Kernel) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the event and the fields of each record."""
    for line in records(kernel):
        event, _, text = line.split(" ", 1)[1].partition(": ")
        yield event, dict(re.findall(r"(\w+)[=:] ?(\S+)", text))


def of(kernel: Kernel, event: str) -> list[dict[str, str]]:
    return [fields for name, fields in told(kernel) if name == event]


def test_formats_are_a_real_kernels(kernel: Kernel) -> None:
    recorded = [part.splitlines() for part in RECORDED.read_text().split("\n\n")[1:]]
    ours = {
        f"{group}/{name}"
        for group in GROUPS
        for name in kernel.tracing.kprobe_events.registry.in_group(group)
    }
    assert ours == {path for path, *_ in recorded}
    for path, *lines in recorded:
        assert in_short(find(kernel, path).format_text())[2:] == lines, path


@pytest.mark.parametrize("arch", ["i386", "riscv64"])
def test_other_architectures_have_them_too(arch: str) -> None:
    with Kernel(MachineConfig(arch=arch)) as kernel:
        for path in ("tcp/tcp_destroy_sock", "net/net_dev_queue"):
            kernel.trace_arrays.top.events.set_enabled(find(kernel, path), True)
        kernel.call("load_tcp", 1)
        events = [name for name, _ in told(kernel)]
        assert events.count("tcp_destroy_sock") == 3
        assert of(kernel, "net_dev_queue")[0]["dev"] == "lo"


@pytest.mark.parametrize("load", ["load_tcp", "load_udp", "load_ping"])
def test_a_packet_goes_out_comes_in_and_ends(net: Sockets, load: str) -> None:
    assert net.kernel.call(load, 2) >= 0
    way = ["net_dev_queue", "net_dev_start_xmit", "netif_rx", "net_dev_xmit", "netif_receive_skb"]
    under_way: dict[str, list[str]] = {}
    lengths: dict[str, str] = {}
    ended = 0
    for event, fields in told(net.kernel):
        address = fields.get("skbaddr", "")
        if event == way[0]:
            assert address not in under_way
            under_way[address], lengths[address] = [event], fields["len"]
        elif event in way:
            under_way[address].append(event)
            assert fields["dev"] == "lo"
            assert fields["len"] == lengths[address]
        elif event in ("consume_skb", "kfree_skb") and address in under_way:
            assert under_way.pop(address) == way
            ended += 1
    assert under_way == {}
    assert ended >= 2


def test_a_sockets_states_follow_one_another(net: Sockets) -> None:
    assert net.kernel.call("load_tcp", 3) >= 0
    state: dict[tuple[str, str], str] = {}
    destroyed = 0
    for event, fields in told(net.kernel):
        ends = fields.get("sport", ""), fields.get("dport", "")
        if event == "inet_sock_set_state":
            begins = _STATE["LISTEN"] if fields["newstate"] == _STATE["SYN_RECV"] else _STATE["CLOSE"]
            assert fields["oldstate"] == state.get(ends, begins) != fields["newstate"]
            state[ends] = fields["newstate"]
            assert (fields["saddr"], fields["saddrv6"]) == ("127.0.0.1", "::ffff:127.0.0.1")
        elif event == "tcp_destroy_sock":
            assert ends[0] != "0"
            assert state.pop(ends) == _STATE["CLOSE"]
            destroyed += 1
    # The seven sockets are both ends of each connection, and the listener.
    assert (destroyed, state) == (7, {})
    cookies = [fields["sock_cookie"] for fields in of(net.kernel, "tcp_destroy_sock")]
    assert len(set(cookies)) == len(cookies)


def test_nobody_listens(net: Sockets) -> None:
    with pytest.raises(KernelError) as refused:
        net.at("connect", net.call("socket", 2, STREAM, 0), PORT)
    assert refused.value.errno == errno.ECONNREFUSED
    (reset,) = of(net.kernel, "tcp_receive_reset")
    (reported,) = of(net.kernel, "inet_sk_error_report")
    assert reset["dport"] == reported["dport"] == str(PORT)
    assert (reported["error"], reported["protocol"]) == (str(errno.ECONNREFUSED), "IPPROTO_TCP")
    assert of(net.kernel, "kfree_skb")[0]["reason"] == "NO_SOCKET"
    assert of(net.kernel, "tcp_send_reset") == []


def test_who_leaves_data_unread_resets(net: Sockets) -> None:
    client, server = net.pair()
    net.send(client, 10)
    net.call("close", server)
    ((sent,), (received,)) = of(net.kernel, "tcp_send_reset"), of(net.kernel, "tcp_receive_reset")
    assert (sent["sport"], sent["state"]) == (str(PORT), _STATE["ESTABLISHED"])
    assert (received["sport"], received["dport"]) == (sent["dport"], sent["sport"])


def test_what_no_queue_takes(net: Sockets) -> None:
    reader, writer = (net.call("socket", 2, DGRAM, 0) for _ in range(2))
    net.at("bind", reader, PORT)
    net.at("connect", writer, PORT)
    sent = 0
    while not of(net.kernel, "udp_fail_queue_rcv_skb"):
        sent += 1
        assert net.send(writer, 8000) == 8000
        assert sent < 100
    (failed,) = of(net.kernel, "udp_fail_queue_rcv_skb")
    assert failed == {"rc": str(-errno.ENOMEM), "port": str(PORT)}
    (full,) = of(net.kernel, "sock_rcvqueue_full")
    assert int(full["rmem_alloc"]) + int(full["truesize"]) > int(full["sk_rcvbuf"])
    assert [fields["reason"] for fields in of(net.kernel, "kfree_skb")] == ["SOCKET_RCVBUFF"]
    assert len(of(net.kernel, "net_dev_xmit")) == sent


def test_what_is_lost_is_sent_again(net: Sockets) -> None:
    """A TCP packet that is lost is sent again. A low MTU makes the first packet too long for the device."""
    client, _ = net.pair()
    kernel, memory = net.kernel, net.kernel.machine.memory
    device = kernel.image.kallsyms.lookup_name("loopback_dev")
    assert device is not None
    mtu = device + 20
    was = memory.read(mtu, 4)
    memory.write(mtu, struct.pack("<I", 100))
    net.send(client, 1000)
    memory.write(mtu, was)
    kernel.call("msleep", 1000)
    (again,) = of(kernel, "tcp_retransmit_skb")
    assert (again["dport"], again["state"]) == (str(PORT), _STATE["ESTABLISHED"])
    assert [fields["reason"] for fields in of(kernel, "kfree_skb")] == ["NOT_SPECIFIED"]
