"""torchrpc:cuda, as far as it can be shown without a GPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from msgspec import structs
from torchrpc_links import rpc_conn

import mq
from mq.errors import TransportUnavailable
from mq.mesh.poller import Poller
from mq.testing.link_world import PATIENCE, Member, World
from transports import _torchrpc_agent as rpc_agent
from transports import _torchrpc_calls as calls
from transports import _torchrpc_devices as devices
from transports import _torchrpc_shared as shared
from transports._torchrpc_options import Options
from transports._torchrpc_sharing import Sharing
from transports.torchrpc import TorchRpcLink
from transports.torchrpc_cuda import TorchRpcCudaLink


def test_cuda_without_cuda_says_so_and_what_to_do() -> None:
    """A typed error, at once, with the remedy."""
    if torch.cuda.is_available():
        pytest.skip("this host has a CUDA device")
    with pytest.raises(TransportUnavailable, match=r"CUDA.* use torchrpc:cpu"):
        mq.connect("cuda", group="none")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device_map": "1_2_0"}, "1_2_0: no GPU 2"),
        ({"device_map": {"1": {1: 0}}, "local_devices": [0]}, "1_1_0: GPU 1"),
        ({"local_devices": ["cuda:5"]}, "names GPU 5"),
    ],
)
def test_a_map_is_checked_against_the_gpus_here(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str
) -> None:
    """At connect, before anything is opened; the entry is named."""
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    poller = Poller()
    with pytest.raises(ValueError, match=words):
        TorchRpcCudaLink(**options).open(poller, [], None)
    poller.close()


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that believes that it has two GPUs; no tensor is ever on one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(rpc_agent, "gpus", lambda indices: [])
    monkeypatch.setattr(rpc_agent.Agent, "_test_gpus", lambda agent: None)
    monkeypatch.setattr("transports.torchrpc_cuda.Sharing", lambda *arguments: None)
    channels = ("cma", "basic", "cuda_basic")
    monkeypatch.setattr(rpc_agent, "channels_here", lambda names: channels)
    options = rpc_agent.rpc.TensorPipeRpcBackendOptions

    def without_cuda(*args: Any, **kwargs: Any) -> Any:
        return options(*args, **{**kwargs, "_channels": ["cma", "basic"]})

    monkeypatch.setattr(rpc_agent.rpc, "TensorPipeRpcBackendOptions", without_cuda)


@pytest.mark.usefixtures("two_gpus")
def test_a_process_forked_from_one_that_used_cuda_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the remedy; that TensorPipe does not start would lead astray."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(mq.ForkedProcess, match=r"CUDA was used .* 'spawn'"):
        mq.connect("cuda", group="forked", name="a")
    # Without a GPU there is nothing that does not survive.
    mq.connect("cuda", group="forked", name="a", local_devices=[]).close()


@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_counted_once_cuda_has_been_initialised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, torch asks NVML, which counts others than CUDA where MIG is in use."""
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: asked.append("init"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 if asked else 8)
    with World(TorchRpcCudaLink, 1) as world:
        link = world.members[0].link
        assert isinstance(link, TorchRpcCudaLink)
        assert link.describe()["local devices"] == "cuda:0"
        assert link.agent.options.devices == (0,)


@pytest.mark.usefixtures("two_gpus")
def test_cuda_that_cannot_be_initialised_is_not_usable_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A typed error with the reason, and another queue may be tried."""

    def fails() -> None:
        raise RuntimeError("CUDA error: the driver is too old\nmore of it")

    monkeypatch.setattr(torch.cuda, "init", fails)
    with pytest.raises(TransportUnavailable, match=r"too old; use torchrpc:cpu$"):
        mq.connect("cuda", group="old", name="a")
    mq.connect("torchrpc:cpu", group="old", name="a").close()


@pytest.mark.usefixtures("two_gpus")
def test_a_map_is_resolved_with_what_the_peer_reports(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By the default, or by the map; `describe` and the log say what it comes to."""
    wanted = "2_0_1,7_0_0"  # one for all queues of a process, as its agent is
    with (
        caplog.at_level("INFO"),
        mq.connect(
            "cuda",
            group="maps",
            name="a",
            map_name="1",
            device_map=wanted,
        ) as a,
        mq.connect(
            "cuda", group="maps", name="b", map_name="2", device_map=wanted
        ) as b,
    ):
        described = a.describe(), b.describe()
        peers = described[0]["peers"]["b"], described[1]["peers"]["a"]
    assert [peer["connection"]["device map"] for peer in peers] == [
        "2_0_1",
        "1_0_0,1_1_1",
    ]
    assert peers[0]["connection"]["tensors"] == "cuda:0 to cuda:1"
    assert described[0]["engine"]["device map waits for"] == "7_0_0"
    assert described[1]["engine"]["local devices"] == "cuda:0,cuda:1"
    for words in ("local devices cuda:0", "device map 2_0_1", "device map 1_0_0"):
        assert words in caplog.text


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("rank", "key", "expected"),
    [
        ("", "b", "b_0_1"),
        ("3", "b", "b_0_1"),  # the name counts first
        ("3", "3", "3_0_1"),
        ("", "other", "b_0_0,b_1_1"),
    ],
)
def test_a_map_knows_members_by_their_names_and_then_by_their_ranks(
    monkeypatch: pytest.MonkeyPatch, rank: str, key: str, expected: str
) -> None:
    """By the names of `connect`; what `describe` shows can be read as a map again."""
    monkeypatch.delenv("MQ_NAME", raising=False)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    wanted = {key: {0: 1}}
    with (
        mq.connect("cuda", group="names", name="b", device_map=wanted) as b,
        mq.connect("cuda", group="names", name="a", device_map=wanted) as a,
    ):
        described = a.describe()["peers"]["b"]["connection"]["device map"]
        assert described == expected
        assert devices.parse(described)
        waits = b.describe()["engine"].get("device map waits for")
        assert waits == ("other_0_1" if key == "other" else None)


@pytest.mark.usefixtures("two_gpus")
def test_the_map_of_a_nameless_peer_can_be_read() -> None:
    """A link that no queue has opened says no name."""
    with World(TorchRpcCudaLink) as world:
        conn, _ = world.connect()
        pairs = {"peer": {0: 0, 1: 1}}
        assert devices.parse(conn.describe()["device map"]) == pairs


@pytest.mark.usefixtures("two_gpus")
def test_a_map_cannot_name_a_rank_beyond_the_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the launcher says how many there are; other peers may always come later."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="4_0_1: no member is '4': WORLD_SIZE is 4"):
        mq.connect("cuda", group="maps", name="a", device_map="3_0_0,4_0_1")
    link = TorchRpcCudaLink(device_map="4_0_1", map_name="learner")
    poller = Poller()
    assert link.open(poller, [], None)  # these names are no ranks
    link.close()
    poller.close()


@pytest.mark.usefixtures("two_gpus")
def test_a_map_to_a_gpu_that_the_peer_lacks_is_refused() -> None:
    """Before TensorPipe would abort both processes; the entry is named."""
    names = iter("ab")
    with World(
        lambda: TorchRpcCudaLink(map_name=next(names), device_map="b_0_7")
    ) as world:
        conn = world.members[0].link.dial(world.members[1].addresses[0])
        world.lost(0, conn)
        assert "b_0_7: member 'b' has no GPU 7" in world.members[0].events[0].reason


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("met_by", ["rendezvous", "address"])
@pytest.mark.parametrize("wrong", ["b_0_7", "a_0_7"])
def test_connect_refuses_a_map_that_does_not_fit_a_peer(
    wrong: str, met_by: str
) -> None:
    """At once, whichever end finds out: waiting would change nothing."""
    listen = None if met_by == "rendezvous" else "torchrpc://127.0.0.1:0"
    options: dict[str, Any] = {
        "group": "misfits",
        "device_map": wrong,
        "secret": "a secret",
        "connect_timeout": PATIENCE,
    }
    with mq.connect("cuda", name="b", listen=listen, **options) as b:
        attach_to = b.describe()["addresses"] if listen else ()
        with pytest.raises(mq.ConnectRefused) as caught:
            mq.connect("cuda", name="a", attach_to=attach_to, **options)
        name = wrong[0]
        assert f"device map {wrong}: member {name!r} has no GPU 7" in str(caught.value)
        assert "do not fit" in str(caught.value)


@pytest.mark.usefixtures("two_gpus")
def test_connect_warns_of_members_that_a_map_waits_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A misspelt name is a member that never comes; one that is there is no news."""
    options: dict[str, Any] = {"group": "late", "device_map": "a_0_0,b_0_1,c_1_0"}
    with caplog.at_level("WARNING"), mq.connect("cuda", name="a", **options):
        (first,) = caplog.messages
        caplog.clear()
        with mq.connect("cuda", name="b", **options):
            (second,) = caplog.messages
    assert first.endswith("b_0_1,c_1_0 names members that are not there yet: 'b', 'c'")
    assert second.endswith("c_1_0 names members that are not there yet: 'c'")


@pytest.mark.usefixtures("two_gpus")
def test_a_connection_says_where_tensors_arrive() -> None:
    """By the map, or index by index; `describe` shows it."""
    make = functools.partial(TorchRpcCudaLink, device_map="b_0_1", map_name="b")
    with World(make) as world:
        conn, accepted = world.connect()
        assert conn.devices == accepted.devices == {"cuda:0": "cuda:1"}
        assert conn.describe()["device map"] == "b_0_1"
        assert conn.describe()["tensors"] == "cuda:0 to cuda:1"
        assert world.members[0].link.devices == {"cuda:0", "cuda:1"}
        world.send(conn, b"head", bytes(300_000))
        world.arrive(world.members[1].received.setdefault(accepted, []), 1)
    make = functools.partial(TorchRpcCudaLink, local_devices=[1])
    with World(make) as world:
        conn, _ = world.connect()
        assert conn.devices == {"cuda:1": "cuda:1"}


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    "options",
    [
        {"channels": ("cma", "basic")},
        {"local_devices": []},
        {"device_map": {"b": {}}, "map_name": "b"},
    ],
)
def test_without_a_channel_a_gpu_or_a_map_tensors_are_staged(
    options: dict[str, Any],
) -> None:
    """TensorPipe would abort, or the map says so; it is said in `describe`."""
    with World(functools.partial(TorchRpcCudaLink, **options)) as world:
        conn, _ = world.connect()
        assert not conn.devices
        assert conn.describe()["tensors"] == "staged through host memory"
        link = world.members[0].link
        assert "device map waits for" not in link.describe()
        assert bool(link.devices) == ("device_map" in options)
        # Else the self-test would send tensors on GPUs, and TensorPipe abort.
        assert isinstance(link, TorchRpcCudaLink)
        assert bool(link.agent.options.devices) == bool(link.devices)


@pytest.mark.usefixtures("two_gpus")
def test_without_a_channel_tensors_arrive_on_gpus_by_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where no memory of a GPU is shared; TensorPipe learns of no GPU then."""
    monkeypatch.setattr(
        "transports.torchrpc_cuda.Sharing",
        lambda names, nbytes, memory: Sharing(names, 0, memory),
    )
    with World(functools.partial(TorchRpcCudaLink, channels="cma,basic")) as world:
        conn, accepted = world.connect()
        assert conn.devices == accepted.devices
        assert conn.devices == {"cuda:0": "cuda:0", "cuda:1": "cuda:1"}
        assert conn.describe()["by"] == "host memory"
        assert rpc_conn(conn)._agent.options.devices == ()
        peer = rpc_conn(conn)._peer
        assert peer is not None
        assert not peer.mapped


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("channels", [None, "cma,basic,cuda_ipc,cuda_basic"])
def test_without_a_gpu_no_channel_for_gpus_is_loaded(channels: str | None) -> None:
    """It would touch CUDA, which a child of a process that uses it must not."""
    options = {} if channels is None else {"channels": channels}
    make = functools.partial(TorchRpcCudaLink, local_devices=[], **options)
    with World(make, 1) as world:
        link = world.members[0].link
        assert isinstance(link, TorchRpcCudaLink)
        assert link.agent.options.channels == ("cma", "basic")
        assert link.describe()["channels"] == "cma,basic"


IPC = ("cma", "basic", "cuda_ipc", "cuda_basic")


@pytest.mark.usefixtures("two_gpus")
def test_only_the_first_agent_of_a_process_has_cuda_ipc(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Peers know its memory by the id of the process, and would read that for ever."""
    monkeypatch.setattr(rpc_agent, "channels_here", lambda names: IPC)
    monkeypatch.setattr(shared, "_had_ipc", False)
    make = functools.partial(TorchRpcCudaLink, map_name="a")
    with World(make) as world:  # of two queues
        for member in world.members:
            assert member.link.describe()["channels"] == ",".join(IPC)
            assert "channels left out" not in member.link.describe()
        dialled, _ = world.connect()
        assert dialled.describe()["channels"] == ",".join(IPC)
    assert "cuda_ipc" not in caplog.text
    with World(make) as world:
        for member in world.members:
            described = member.link.describe()
            assert described["channels"] == "cma,basic,cuda_basic"
            assert described["channels left out"].startswith("cuda_ipc: ")
        assert caplog.text.count("cuda_ipc") == 1
        dialled, accepted = world.connect()
        for conn in (dialled, accepted):
            assert conn.describe()["channels"] == "cma,basic,cuda_basic"
    # Nobody has met an agent that had none.
    monkeypatch.setattr(shared, "_had_ipc", False)
    without = ("cma", "basic", "cuda_basic")
    for channels in (without, IPC):
        with World(functools.partial(make, channels=channels), 1) as world:
            assert world.members[0].link.describe()["channels"] == ",".join(channels)


@pytest.mark.usefixtures("two_gpus")
def test_peers_beyond_the_names_are_staged_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A name is free again once its peer is gone."""
    options = Options(maps=((((0, 0),), 2),))
    agent = shared.acquire(options)
    try:
        pairs = ((0, 0),)
        peers = [agent.peer(f"{n}", agent.url, "", pairs) for n in range(3)]
        assert [peer.mapped for peer in peers] == [True, True, False]
        assert "raise max_gpu_peers" in caplog.text
        peers[0].fail("it is gone")
        again = agent.peer("3", agent.url, "", pairs)
        assert again.mapped
        assert again.worker.name == peers[0].worker.name
        assert again.worker.id != peers[0].worker.id
        asked = [b"still", torch.arange(3)]
        answer = again.ask(rpc_agent.echo, (asked,), with_tensors=True)
        assert answer[1].tolist() == [0, 1, 2]
        peers[1].listeners["a connection"] = lambda reason: None
        peers[1].fail("it is gone, but somebody may be calling it")
        assert not agent.peer("4", agent.url, "", pairs).mapped
    finally:
        shared.release(agent)


@pytest.mark.usefixtures("two_gpus")
def test_a_peer_that_breaks_and_comes_again_takes_one_name_only() -> None:
    """Else a bad wire to one peer would use up the names of all."""
    pairs = ((0, 0),)
    agent = shared.acquire(Options(maps=((pairs, 4),)))
    try:
        for _ in range(5):
            agent.peer("again and again", agent.url, "", pairs).fail("it broke")
        others = [agent.peer(f"{n}", agent.url, "", pairs) for n in range(4)]
        assert all(peer.mapped for peer in others)
        assert len({peer.worker.name for peer in others}) == 4
    finally:
        shared.release(agent)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("of_peer", "expected"),
    [
        ({}, ((0, 0), (1, 1))),
        ({"gpus": (1,)}, ((0, 0), (1, 1))),
        ({"gpus": ()}, ()),
        ({"channels": ("cma", "basic")}, ()),
    ],
)
def test_a_peer_to_whom_nothing_on_a_gpu_can_go_takes_no_name(
    of_peer: dict[str, Any], expected: tuple[tuple[int, int], ...]
) -> None:
    """There are `max_gpu_peers` of them, for those to whom something can."""
    with World(TorchRpcCudaLink) as world:
        conn = rpc_conn(world.connect()[0])
        link = world.members[0].link
        assert isinstance(link, TorchRpcCudaLink)
        assert link.pairs(structs.replace(link._greeting(conn), **of_peer)) == expected


def test_channels_that_torch_lacks_are_left_out() -> None:
    """The CPU build has none for GPUs; what it has stays in order."""
    found = rpc_agent.channels_here(("cuda_basic", "basic", "cma", "no_such"))
    assert [name for name in found if not name.startswith("cuda")] == ["basic", "cma"]


@pytest.mark.parametrize("number", [-1, 5000])
def test_the_number_of_gpu_peers_is_bounded(number: int) -> None:
    """Every call pays for each."""
    with pytest.raises(ValueError, match="max_gpu_peers"):
        TorchRpcCudaLink(max_gpu_peers=number)


def test_a_member_that_closes_in_the_world_leaves_no_receiver() -> None:
    """What the process-wide table of connections holds goes with each of them."""
    before = set(calls.receivers)
    with World(TorchRpcLink) as world:
        world.connect()
        extra = Member(TorchRpcLink, world.poller)
        extra.link.dial(world.members[0].addresses[0])
        extra.link.close()
    assert set(calls.receivers) == before
