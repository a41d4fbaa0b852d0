"""Sockets of the guest kernel over the loopback device, from a system call to tcp_v4_rcv and back."""

from __future__ import annotations

import errno
import os
import random
import struct
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe

from .guest import USER_BUFFER, USER_SIZE, Guest
from .test_guest_files import CLOSE, READ, WRITE, Files
from .test_guest_pipes import POLLHUP, POLLIN, POLLOUT, poll

SOCKET, CONNECT, ACCEPT, SENDTO, RECVFROM, SHUTDOWN, BIND, LISTEN = 41, 42, 43, 44, 45, 48, 49, 50
GETSOCKNAME, GETPEERNAME, ACCEPT4 = 51, 52, 288
AF_INET, STREAM, DGRAM, ICMP, UDP = 2, 1, 2, 1, 17
NONBLOCK = os.O_NONBLOCK
LOOPBACK = 0x7F00_0001
ANSWER = USER_BUFFER + USER_SIZE // 4


def address(port: int, host: int = LOOPBACK) -> bytes:
    return struct.pack("<H", AF_INET) + struct.pack(">HI", port, host) + bytes(8)


class Net(Files):
    """System calls on sockets by one task."""

    def socket(self, kind: int = STREAM, protocol: int = 0) -> int:
        fd = self.call(SOCKET, AF_INET, kind, protocol)
        assert fd >= 0, fd
        return fd

    def bind(self, fd: int, port: int = 0, host: int = LOOPBACK) -> int:
        return self.call(BIND, fd, address(port, host), 16)

    def connect(self, fd: int, port: int, host: int = LOOPBACK) -> int:
        return self.call(CONNECT, fd, address(port, host), 16)

    def name(self, fd: int, number: int = GETSOCKNAME) -> tuple[int, int]:
        """Return the host address and the port of a socket, or with number GETPEERNAME those of its peer."""
        self.guest.write(ANSWER, struct.pack("<i", 16))
        assert self.call(number, fd, ANSWER + 16, ANSWER) == 0
        port, host = struct.unpack(">HI", self.guest.read(ANSWER + 18, 6))
        return host, port

    def listener(self, backlog: int = 5, flags: int = 0) -> tuple[int, int]:
        """Return a listening socket and its port."""
        fd = self.socket(STREAM | flags)
        assert self.bind(fd) == 0
        assert self.call(LISTEN, fd, backlog) == 0
        return fd, self.name(fd)[1]

    def pair(self) -> tuple[int, int]:
        """Return both ends of a new connection."""
        listener, port = self.listener()
        client = self.socket()
        assert self.connect(client, port) == 0
        server = self.call(ACCEPT, listener, 0, 0)
        assert server >= 0
        assert self.call(CLOSE, listener) == 0
        return client, server

    def send(self, fd: int, data: bytes, flags: int = 0, to: bytes = b"") -> int:
        destination: tuple[int | bytes, ...] = (to, 16) if to else (0, 0)
        return self.call(SENDTO, fd, data, len(data), flags, *destination)

    def receive(self, fd: int, size: int = 65536, flags: int = 0) -> bytes | int:
        count = self.call(RECVFROM, fd, USER_BUFFER, size, flags, 0, 0)
        return self.guest.read(USER_BUFFER, count) if count >= 0 else count


@pytest.fixture
def net(guest: Guest, task: int) -> Net:
    return Net(guest, task)


def test_a_stream_to_and_fro(net: Net) -> None:
    client, server = net.pair()
    assert net.name(client, GETPEERNAME) == net.name(server)
    assert net.name(server, GETPEERNAME) == net.name(client)
    rng, sent, got = random.Random(1), b"", b""
    for _ in range(40):
        data = rng.randbytes(rng.choice([1, 100, 5000, 20_000, 40_000]))
        assert net.send(client, data) == len(data)
        sent += data
        while len(sent) - len(got) > 30_000:
            piece = net.receive(server, rng.choice([10, 3000, 50_000]))
            assert isinstance(piece, bytes)
            got += piece
    assert net.call(WRITE, server, b"answer", 6) == 6
    assert net.call(READ, client, USER_BUFFER, 100) == 6
    assert net.call(CLOSE, client) == 0
    while piece := net.receive(server):
        assert isinstance(piece, bytes)
        got += piece
    assert got == sent


def test_the_end_of_a_stream(net: Net) -> None:
    client, server = net.pair()
    assert net.call(SHUTDOWN, client, 1) == 0
    assert net.receive(server) == b""
    assert net.send(client, b"x") == -errno.EPIPE
    assert net.send(server, b"last words") == 10
    assert net.receive(client) == b"last words"
    assert net.call(CLOSE, server) == 0
    assert net.receive(client) == b""
    client, server = net.pair()
    net.send(client, b"not read")
    net.call(CLOSE, server)
    assert net.receive(client) == -errno.ECONNRESET
    assert net.send(client, b"x") == -errno.EPIPE


def test_nobody_listens(net: Net) -> None:
    client = net.socket()
    assert net.connect(client, 5) == -errno.ECONNREFUSED
    _, port = net.listener()
    assert net.connect(client, port) == 0
    assert net.connect(client, port) == -errno.EISCONN
    assert net.connect(net.socket(), port, host=0x0808_0808) == -errno.ENETUNREACH


def test_addresses(net: Net) -> None:
    first, second = net.socket(), net.socket()
    assert net.bind(first, 4000) == 0
    assert net.bind(first, 4001) == -errno.EINVAL
    assert net.bind(second, 4000) == -errno.EADDRINUSE
    assert net.bind(second, 4000, host=LOOPBACK + 1) == 0
    assert net.bind(net.socket(), 4002, host=0x0808_0808) == -errno.EADDRNOTAVAIL
    assert net.bind(net.socket(DGRAM), 4000) == 0
    assert net.name(first) == (LOOPBACK, 4000)
    assert net.call(CLOSE, first) == 0
    assert net.bind(net.socket(), 4000) == 0
    assert net.call(BIND, 99, address(1), 16) == -errno.EBADF
    assert net.call(BIND, net.open("/dev/null"), address(1), 16) == -errno.ENOTSOCK
    assert net.call(BIND, net.socket(), address(1), 4) == -errno.EINVAL
    assert net.call(SOCKET, 10, STREAM, 0) == -errno.EAFNOSUPPORT
    assert net.call(SOCKET, AF_INET, STREAM, UDP) == -errno.EPROTONOSUPPORT


def test_connections_wait_in_order_up_to_the_backlog(net: Net) -> None:
    """As in Linux, one connection more than the backlog can wait.

    A later connection is made when there is room.
    """
    listener, port = net.listener(backlog=1, flags=NONBLOCK)
    clients = [net.socket() for _ in range(3)]
    assert [net.connect(client, port) for client in clients[:2]] == [0, 0]
    late = Net(net.guest, net.guest.adopt(2000, "late"))
    net.guest.start_syscall(late.task, CONNECT, clients[2], address(port), 16)
    net.guest.to_idle()
    ends = [net.call(ACCEPT, listener, 0, 0) for _ in range(2)]
    for client, end in zip(clients, ends, strict=False):
        assert net.name(client) == net.name(end, GETPEERNAME)
    assert net.call(ACCEPT, listener, 0, 0) == -errno.EAGAIN
    net.guest.idle_until(lambda: net.call(ACCEPT, listener, 0, 0) >= 0, ticks=200)
    assert net.name(clients[2], GETPEERNAME) == (LOOPBACK, port)


def test_nothing_there_yet(net: Net) -> None:
    client, server = net.pair()
    assert net.receive(server, flags=0x40) == -errno.EAGAIN
    listener = net.socket(STREAM | NONBLOCK)
    assert net.bind(listener) == net.call(LISTEN, listener, 1) == 0
    assert net.call(ACCEPT, listener, 0, 0) == -errno.EAGAIN
    assert poll(net, (server, POLLIN), (client, POLLOUT), (listener, POLLIN)) == [0, POLLOUT, 0]
    net.send(client, b"x")
    assert poll(net, (server, POLLIN)) == [POLLIN]
    net.call(CLOSE, client)
    assert net.receive(server) == b"x"
    assert poll(net, (server, POLLIN)) == [POLLIN]
    net.call(SHUTDOWN, server, 1)
    assert poll(net, (server, POLLIN))[0] & POLLHUP


def test_a_reader_sleeps_until_something_comes(net: Net) -> None:
    client, server = net.pair()
    reader = net.guest.adopt(2000, "reader")
    net.guest.start_syscall(reader, READ, server, USER_BUFFER, 10)
    net.guest.to_idle()
    assert net.send(client, b"hello") == 5
    assert net.guest.read(USER_BUFFER, 5) == b"hello"


def test_a_writer_sleeps_while_nobody_reads(net: Net) -> None:
    client, server = net.pair()
    data = random.Random(2).randbytes(USER_SIZE // 2 - 4096)
    writer = net.guest.adopt(2000, "writer")
    net.guest.start_syscall(writer, WRITE, client, data, len(data))
    net.guest.to_idle()
    got = b""
    while len(got) < len(data):
        piece = net.receive(server, 10_000)
        assert isinstance(piece, bytes)
        got += piece
        net.guest.to_idle()
    assert got == data


def test_what_is_lost_is_sent_again(net: Net) -> None:
    """TCP sends lost packets again. Packets are lost while they are longer than the device's
    maximum (mtu).
    """
    client, server = net.pair()
    guest = net.guest
    mtu = guest.symbol("loopback_dev") + 20
    assert guest.u32(mtu) == 16436
    guest.write(mtu, struct.pack("<I", 100))
    assert net.send(client, b"a" * 1000) == 1000
    assert net.receive(server, flags=0x40) == -errno.EAGAIN
    guest.write(mtu, struct.pack("<I", 16436))
    guest.idle_until(lambda: net.receive(server, flags=0x40) == b"a" * 1000, ticks=200)


def test_datagrams(net: Net) -> None:
    one, two = net.socket(DGRAM), net.socket(DGRAM)
    assert net.bind(two) == 0
    host, port = net.name(two)
    assert net.send(one, b"first", to=address(port, host)) == 5
    assert net.send(one, b"", to=address(port, host)) == 0
    assert net.send(one, b"third", to=address(port, host)) == 5
    net.guest.write(ANSWER, struct.pack("<i", 16))
    assert net.call(RECVFROM, two, USER_BUFFER, 3, 0, ANSWER + 16, ANSWER) == 3
    assert net.guest.read(USER_BUFFER, 3) == b"fir"
    assert struct.unpack(">HI", net.guest.read(ANSWER + 18, 6)) == (net.name(one)[1], LOOPBACK)
    assert [net.receive(two), net.receive(two)] == [b"", b"third"]
    assert net.receive(two, flags=0x40) == -errno.EAGAIN
    assert net.send(one, b"x") == -errno.EDESTADDRREQ
    assert net.send(one, bytes(20_000), to=address(port)) == -errno.EMSGSIZE
    assert net.call(LISTEN, one, 1) == -errno.EOPNOTSUPP


def test_a_datagram_to_nobody_is_answered(net: Net) -> None:
    one = net.socket(DGRAM)
    assert net.connect(one, 7) == 0
    assert net.send(one, b"x") == 1
    assert net.receive(one) == -errno.ECONNREFUSED


def test_only_the_peer_of_a_connected_socket_is_heard(net: Net) -> None:
    one, two, three = (net.socket(DGRAM) for _ in range(3))
    assert [net.bind(fd) for fd in (one, two, three)] == [0, 0, 0]
    assert net.connect(one, net.name(two)[1]) == 0
    assert net.send(three, b"no", to=address(net.name(one)[1])) == 2
    assert net.send(two, b"yes", to=address(net.name(one)[1])) == 3
    assert net.receive(one) == b"yes"


def test_echoes(net: Net) -> None:
    ping = net.socket(DGRAM, ICMP)
    request = struct.pack(">BBHHH", 8, 0, 0, 0, 7) + b"payload"
    assert net.send(ping, request, to=address(0)) == len(request)
    reply = net.receive(ping)
    assert isinstance(reply, bytes)
    assert (reply[0], reply[6:]) == (0, request[6:])
    assert net.send(ping, b"\0" * 8, to=address(0)) == -errno.EINVAL


def test_sockets_leave_nothing_behind(net: Net) -> None:
    def use() -> None:
        client, server = net.pair()
        net.send(client, bytes(30_000))
        net.receive(server, 1000)
        net.call(CLOSE, server)
        net.call(CLOSE, client)
        client, server = net.pair()
        net.call(CLOSE, client)
        net.call(CLOSE, server)
        listener, port = net.listener()
        waiting = net.socket()
        net.connect(waiting, port)
        net.call(CLOSE, listener)
        net.call(CLOSE, waiting)

    for _ in range(5):
        use()
    before = net.guest.free_pages
    for _ in range(30):
        use()
    assert net.guest.free_pages == before


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as booted:
        yield booted


def test_a_probe_on_the_way(kernel: Kernel) -> None:
    """All functions on the way of a packet are probed, and each one is hit by every packet of a
    connection.
    """
    seen: list[str] = []
    names = ["ip_queue_xmit", "ip_output", "dev_hard_start_xmit", "netif_rx", "ip_rcv", "tcp_v4_rcv"]
    probes = [
        Kprobe(symbol_name=name, pre_handler=lambda _kprobe, _regs, name=name: seen.append(name))
        for name in [*names, "tcp_rcv_established", "tcp_sendmsg", "tcp_recvmsg", "inet_csk_accept"]
    ]
    for probe in probes:
        kernel.register_kprobe(probe)
    kernel.call("load_tcp", 1)
    for probe in probes:
        kernel.unregister_kprobe(probe)
    counts = {name: seen.count(name) for name in dict.fromkeys(seen)}
    # The first packet is the client's SYN. All packets pass all of these functions.
    assert [name for name in seen if name in names][:6] == names
    assert len({counts[name] for name in names}) == 1
    assert counts["tcp_v4_rcv"] >= 9
    assert counts["inet_csk_accept"] == 1


def test_names_that_are_not_unique(kernel: Kernel) -> None:
    assert kernel.image.kallsyms.count_name("name_show") == 2
