"""torchrpc:cuda, as far as it can be shown without a GPU, and what needs one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from link_world import PATIENCE, Member, World

import mq
from mq import registry
from mq.errors import TransportUnavailable
from mq.mesh.poller import Poller
from transports import _torchrpc_calls as calls
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
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    poller = Poller()
    with pytest.raises(ValueError, match=words):
        TorchRpcCudaLink(**options).open(poller, [], None)
    poller.close()


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as device maps know; nothing is moved by them yet."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_a_map_is_resolved_with_what_the_peer_reports(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By the default, or by the map; `describe` and the log say what it comes to."""
    with (
        caplog.at_level("INFO"),
        mq.connect(
            "cuda",
            group="maps",
            name="a",
            map_name="1",
            device_map="2_0_1,7_0_0",
            local_devices=["cuda:0"],
        ) as a,
        mq.connect("cuda", group="maps", name="b", map_name="2") as b,
    ):
        described = a.describe(), b.describe()
        peers = described[0]["peers"]["b"], described[1]["peers"]["a"]
    assert [peer["connection"]["device map"] for peer in peers] == [
        "2_0_1",
        "1_0_0,1_1_1",
    ]
    assert described[0]["engine"]["local devices"] == "cuda:0"
    assert described[0]["engine"]["device map waits for"] == "7_0_0"
    assert described[1]["engine"]["local devices"] == "cuda:0,cuda:1"
    assert "device map waits for" not in described[1]["engine"]
    for words in ("local devices cuda:0", "device map 2_0_1", "device map 1_0_0"):
        assert words in caplog.text


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


def test_a_map_to_a_gpu_that_the_peer_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before TensorPipe would abort both processes; the entry is named."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    made = iter([{"map_name": "a", "device_map": "b_0_7"}, {"map_name": "b"}])
    with World(lambda: TorchRpcCudaLink(**next(made))) as world:
        conn = world.members[0].link.dial(world.members[1].addresses[0])
        world.lost(0, conn)
        assert "b_0_7: member 'b' has no GPU 7" in world.members[0].events[0].reason


@pytest.mark.gpu
def test_tensors_on_a_gpu_arrive_on_the_gpu_asked_for() -> None:
    """Staged through host memory, on the device that `subscribe` names."""
    reason = registry.check("torchrpc:cuda")
    if reason is not None:
        pytest.skip(reason)
    with (
        mq.connect("cuda", group="gpu", name="a") as a,
        mq.connect("cuda", group="gpu", name="b") as b,
    ):
        b.subscribe("t", device="cuda:0")
        a.publish("t", torch.arange(1000, device="cuda:0"), timeout=PATIENCE)
        got = b.recv(timeout=PATIENCE).payload
        assert (str(got.device), int(got.sum())) == ("cuda:0", 499_500)


def test_a_member_that_closes_in_the_world_leaves_no_receiver() -> None:
    """What the process-wide table of connections holds goes with each of them."""
    before = set(calls.receivers)
    with World(TorchRpcLink) as world:
        world.connect()
        extra = Member(TorchRpcLink, world.poller)
        extra.link.dial(world.members[0].addresses[0])
        extra.link.close()
    assert set(calls.receivers) == before
