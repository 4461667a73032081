"""Blips and Bad input: real connections cut, stalled and corrupted."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
from functools import partial
from pathlib import Path

import mq
from mq.mesh import wire
from mq.testing import programs, strangers
from mq.testing.cases import case
from mq.testing.harness import Group, expect
from mq.testing.member import Member
from mq.testing.proxy import Proxy
from mq.testing.waiting import PEER_TIMEOUT, STEP, wait_until

MIB = 1 << 20
_taken: list[int] = []  # the soft limit, and descriptors
SIZES = [10, 3 * MIB, 100_000, 0] * 15


def _stream_is_whole(group: Group) -> None:
    """Where no connection exists that could break: the stream alone."""
    a, b = group.members("a", "b")
    b.subscribe("t")
    running = a.begin(programs.publish_patterns, "t", SIZES)
    got = b.run(programs.receive, len(SIZES))
    assert [m.digest for m in got] == running.result()
    assert a.run(programs.peer_stats, "b")["resent_frames"] == 0


@case("Blips", needs="separate_processes", otherwise=_stream_is_whole)
def blip_is_resumed(group: Group) -> None:
    """Connections cut again and again, in either direction: nothing lost or doubled."""
    listener, dialler, proxy = group.proxied("listener", "dialler")
    if proxy is None:
        return _stream_between(listener, dialler)
    for sender, receiver in ((listener, dialler), (dialler, listener)):
        receiver.subscribe("t", depth=8)
        running = sender.begin(programs.publish_patterns, "t", SIZES)
        got = []
        for _ in range(4):
            got += receiver.run(programs.receive, len(SIZES) // 5)
            assert proxy.cut() >= 1, "the members found a way around the proxy"
        got += receiver.run(programs.receive, len(SIZES) - len(got))
        assert [m.digest for m in got] == running.result()
        assert [m.sequence for m in got] == list(range(len(SIZES)))
        receiver.call("unsubscribe", "t")
    assert listener.run(programs.peer_stats, "dialler")["connections"] > 2
    return None


def _stream_between(a: Member, b: Member) -> None:
    b.subscribe("t")
    running = a.begin(programs.publish_patterns, "t", SIZES)
    got = b.run(programs.receive, len(SIZES))
    assert [m.digest for m in got] == running.result()


@case("Blips", needs="separate_processes", otherwise=_stream_is_whole)
def stall_of_the_network_is_resumed(group: Group) -> None:
    """Nothing passes for less than `peer_timeout`; nothing is lost or doubled."""
    a, b, proxy = group.proxied("a", "b")
    if proxy is None:
        return _stream_between(a, b)
    b.subscribe("t", depth=4)
    running = a.begin(programs.publish_patterns, "t", SIZES)
    got = b.run(programs.receive, 10)
    proxy.stall()
    got += b.run(_receive_what_comes, 0.3)
    proxy.resume()
    assert len(got) < len(SIZES), "the members found a way around the proxy"
    got += b.run(programs.receive, len(SIZES) - len(got))
    assert [m.digest for m in got] == running.result()
    return None


@case("Death", needs="separate_processes", otherwise=_stream_is_whole)
def slow_wire_does_not_pass_for_silence(group: Group) -> None:
    """A message that takes longer than `peer_timeout` arrives, at the first try."""
    listener, dialler, proxy = group.proxied("a", "b", peer_timeout=PEER_TIMEOUT)
    if proxy is None or proxy.within_host:  # such wires are not slow
        return _stream_between(listener, dialler)
    proxy.slow(4 * MIB)
    sizes = [11 * MIB, 10]
    for sender, receiver in ((listener, dialler), (dialler, listener)):
        receiver.subscribe("t")
        running = sender.begin(programs.publish_patterns, "t", sizes)
        got = receiver.run(programs.receive, len(sizes))
        assert [m.digest for m in got] == running.result()
        receiver.call("unsubscribe", "t")
    assert listener.run(programs.peer_stats, dialler.name)["connections"] == 1
    return None


def _receive_what_comes(queue: mq.MQ, silence: float) -> list[programs.Received]:
    found: list[programs.Received] = []
    try:
        while True:
            found += programs.receive(queue, 1, silence)
    except mq.RecvTimeout:
        return found


@case("Blips", needs="separate_processes", otherwise=_stream_is_whole)
def stop_shorter_than_peer_timeout_loses_nothing(group: Group) -> None:
    """Publisher or subscriber stopped and continued: only time has passed."""
    a, b = group.members("a", "b")
    b.subscribe("t", depth=8)
    running = a.begin(programs.publish_range, "t", 0, 300)
    got = b.run(programs.receive, 50)
    b.stop()
    assert not running.done(0.3)
    b.cont()
    got += b.run(programs.receive, 50)
    a.stop()
    reading = b.begin(programs.receive, 200)
    assert not reading.done(0.3)
    a.cont()
    got += reading.result()
    running.result()
    assert [m.sequence for m in got] == list(range(300))


@case("Blips", needs="separate_processes", otherwise=_stream_is_whole)
def stall_beyond_peer_timeout_raises_messages_lost(group: Group) -> None:
    """Forgotten and back: told once how many are missing, and the queue goes on."""
    a, b = group.members("a", "b", peer_timeout=PEER_TIMEOUT)
    for topic in ("t", "u"):
        b.subscribe(topic, depth=10)
    a.publish("t", "read before")
    assert b.recv().payload == "read before"
    b.stop()
    waiting = [
        a.begin(programs.publish_range, "t", 0, 60),
        a.begin(programs.publish_range, "u", 0, 40),
    ]
    for future in waiting:
        future.result()
    b.cont()
    a.call("wait_for_subscribers", "t", 1, timeout=STEP)
    a.publish("t", "end")
    found = b.run(programs.receive_or_errors, "end")
    losses = [item for item in found if item[0] == "lost"]
    assert len(losses) == 1, f"told of the loss {len(losses)} times: {losses}"
    ((_, sender, topics, count),) = losses
    assert sender == "a"
    assert set(topics) <= {"t", "u"}
    read = [item for item in found if item[0] != "lost"]
    assert count == 100 + 1 - len(read), f"{count} reported, {len(read)} of 101 read"
    for topic in ("t", "u"):
        numbers = [m.sequence for m in read if m.topic == topic]
        assert numbers == sorted(set(numbers))
    assert b.run(programs.topic_stats, "t")["lost"] > 0
    _can_exchange(a, b)


@case("Blips", needs="separate_processes", otherwise=_stream_is_whole)
def partition_beyond_peer_timeout_starts_a_new_session(group: Group) -> None:
    """Both sides forget each other, then meet again; the loss is reported."""
    a, b, proxy = group.proxied("a", "b", peer_timeout=PEER_TIMEOUT)
    if proxy is None:
        return _stream_between(a, b)
    b.subscribe("t", depth=10)
    a.publish("t", "first")
    assert b.recv().payload == "first"
    proxy.stall()
    running = a.begin(programs.publish_range, "t", 0, 50)
    running.result()
    wait_until(lambda: all(_counts("forgotten", a, b)), "both to forget the other")
    proxy.resume()
    a.call("wait_for_subscribers", "t", 1, timeout=STEP)
    a.publish("t", "end")
    found = b.run(programs.receive_or_errors, "end")
    losses = [item[3] for item in found if item[0] == "lost"]
    assert losses == [50 - (len(found) - 2)], f"50 published, then: {found}"
    _can_exchange(a, b)
    return None


@case("Retain", needs="separate_processes", otherwise=_stream_is_whole)
def retained_message_cut_off_comes_in_the_next_session(group: Group) -> None:
    """It was promised when its connection stalled, and had not arrived."""
    a, b, proxy = group.proxied("a", "b", peer_timeout=PEER_TIMEOUT)
    if proxy is None:
        return _stream_between(a, b)
    a.publish("t", bytes(24 << 20), retain=True)
    proxy.slow(4 << 20)
    b.subscribe("t", history=mq.keep_last(1))
    proxy.stall()
    wait_until(lambda: all(_counts("forgotten", a, b)), "both to forget the other")
    proxy.slow(1e12)
    proxy.resume()
    (got,) = b.run(programs.receive, 1)
    assert (got.topic, got.sequence) == ("t", 0)
    return None


def _counts(counter: str, *members: Member) -> list[int]:
    return [member.call("stats")["mesh"][counter] for member in members]


def _can_exchange(a: Member, b: Member) -> None:
    for member in (a, b):
        member.subscribe("exchange")
    for sender, receiver in ((a, b), (b, a)):
        sender.publish("exchange", sender.name)
        while (message := receiver.recv()).topic != "exchange":
            pass
        assert message.payload == sender.name


def _listening(member: Member) -> list[str]:
    addresses: list[str] = member.call("describe")["addresses"]
    return addresses


def _sockets_to(address: str) -> list[socket.socket]:
    _, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if port.isdecimal() and host:
        return [socket.create_connection((host.strip("[]"), int(port)), STEP)]
    if not Path(rest).is_socket():  # a name of another kind
        return []
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(STEP)
    sock.connect(rest)
    return [sock]


def _send_garbage(address: str, piece: bytes) -> None:
    for sock in _sockets_to(address):
        with sock:
            try:
                sock.sendall(piece)
            except OSError:  # the listener has heard enough
                pass


@case("Bad input")
def garbage_at_a_listening_address_disturbs_nobody(group: Group) -> None:
    """Random bytes from strangers: nothing ends, an exchange goes on meanwhile."""
    a, b = group.members("a", "b")
    addresses = _listening(a) + _listening(b)
    assert addresses
    b.subscribe("t", depth=20)
    running = a.begin(programs.publish_range, "t", 0, 300)
    reading = b.begin(programs.receive, 300)
    chance = random.Random(7)
    for number in range(60):
        piece = chance.randbytes(1 << (number % 15))
        _send_garbage(addresses[number % len(addresses)], piece)
    running.result()
    assert [m.digest for m in reading.result()] == list(range(300))
    _can_exchange(a, b)


def _wrong_proof_is_local(group: Group) -> None:
    """Where members are threads there is nobody to keep out; secrets still differ."""
    a = group.member("a", secret="the right one")
    b = group.unconnected("b")
    with expect(mq.AuthenticationFailed):
        group.connecting(b, secret="a wrong one", connect_timeout=3.0).result()
    wait_until(lambda: any(_counts("unauthenticated", a)), "the member to count it")


@case("Bad input", needs="separate_processes", otherwise=_wrong_proof_is_local)
def wrong_secret_is_refused(group: Group) -> None:
    """By an error that says so; the member that was asked goes on and counts it.

    Each end asks for a proof, whoever dialled: of a stranger that does not ask itself.
    """
    a, b = group.members("a", "b", secret="the right one")
    stranger = group.unconnected("stranger")
    options = group.options()
    knocking = stranger.ask(strangers.knock, group.backend, options, _listening(a))
    assert knocking.result() == [wire.CHALLENGE, wire.REFUSED]
    assert _counts("unauthenticated", a) == [1]
    with expect(mq.AuthenticationFailed):
        group.connecting(stranger, secret="a wrong one", connect_timeout=3.0).result()
    # That of one of the two may end it before it hears of the other.
    wait_until(lambda: sum(_counts("unauthenticated", a, b)) > 1, "one to count it")
    # Another stranger in b's process, and the one before knows the secret now.
    door = b.ask(strangers.open_door, group.backend, options).result()
    answering = b.ask(strangers.answer)
    known = {"secret": "the right one", "attach_to": (door,), "connect_timeout": 3.0}
    with expect(mq.AuthenticationFailed):
        group.connecting(stranger, **known).result()
    assert answering.result() == [wire.HELLO, wire.REFUSED], "it greeted a stranger"
    _can_exchange(a, b)
    assert {m.name for m in a.call("members")} == {"a", "b"}


@case("Bad input", needs="separate_processes", otherwise=_stream_is_whole)
def corrupted_connection_never_ends_a_member(group: Group) -> None:
    """Flipped bits: connections break, sessions may end, members go on and meet again.

    What was under way may be wrong, since no link promises to mend what TCP did not
    notice; so what counts afterwards is a topic that nobody spoke of before.
    """
    a, b, proxy = group.proxied("a", "b", peer_timeout=PEER_TIMEOUT)
    if proxy is None:
        return _stream_between(a, b)
    b.subscribe("t", history=mq.keep_last(20))
    for turn in range(3):
        proxy.corrupt(2)
        wait_until(partial(_corrupted, proxy, a, turn), "the proxy to pass something")
    topics = (f"after {number}" for number in itertools.count())
    wait_until(lambda: _arrives(a, b, next(topics)), "messages to arrive again")
    return None


def _corrupted(proxy: Proxy, a: Member, turn: int) -> bool:
    a.publish("t", turn)
    return proxy.corrupted()


def _arrives(a: Member, b: Member, topic: str) -> bool:
    try:
        b.subscribe(topic, timeout=1.0)
        a.publish(topic, "end", timeout=1.0)
        while b.recv(timeout=1.0)[:2] != (topic, "end"):
            pass
    except mq.MQError:
        return False
    return True


def _lower_limit(worker: object, descriptors: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))


@case("edge: Scale")
def connect_says_when_too_few_descriptors_are_allowed(group: Group) -> None:
    """A low ``ulimit -n`` is an error at `connect` that names it, and no other harm."""
    poor = group.process("poor")
    open_now = len(poor.fds())
    poor.ask(_lower_limit, open_now + 3).result()
    with expect(mq.TransportUnavailable, "RLIMIT_NOFILE"):
        group.connecting(poor).result()
    a, b = group.members("a", "b")
    _can_exchange(a, b)
    poor.kill()


def _take_descriptors(worker: object) -> None:
    """Leave none in this process."""
    import resource

    most = max(map(int, os.listdir("/proc/self/fd")))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, most + 1), hard))
    _taken.append(soft)
    with contextlib.suppress(OSError):
        while True:
            _taken.append(os.open("/dev/null", os.O_RDONLY))


def _give_descriptors_back(worker: object) -> None:
    import resource

    soft, *descriptors = _taken
    _taken.clear()
    for descriptor in descriptors:
        os.close(descriptor)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _one_process(group: Group) -> None:
    """Where members share a process they share its descriptors, too: nobody comes."""
    a, b = group.members("a", "b")
    _can_exchange(a, b)


@case("edge: Scale", needs="separate_processes", otherwise=_one_process)
def a_member_without_descriptors_goes_on(group: Group) -> None:
    """Whoever comes then is not let in, or late; nobody ends, and nothing is lost."""
    poor, rich = group.members("poor", "rich")
    poor.ask(_take_descriptors).result()
    late = group.process("late")
    joining = group.connecting(late, connect_timeout=1.0)
    try:
        joining.result()
        joined = True
    except mq.MQError:
        joined = False
    _can_exchange(poor, rich)
    poor.ask(_give_descriptors_back).result()
    if not joined:
        group.connecting(late).result()
    _can_exchange(late, poor)
