"""What torchrpc does with a torch that is not as expected, or busy with its own RPC."""

from __future__ import annotations

import functools
import os
import re
import tempfile
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from fresh_python import output_of
from torchrpc_links import context, dial, rpc_conn

from mq import registry
from mq.errors import TransportUnavailable
from mq.mesh.poller import Poller
from mq.testing.link_world import PATIENCE, World
from mq.transport import What
from transports import _torchrpc_agent as rpc_agent
from transports import _torchrpc_calls as calls
from transports import _torchrpc_shared as shared
from transports.torchrpc import TorchRpcLink


def test_a_torch_without_rpc_is_named_with_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on builds without it: `TransportUnavailable` with the remedy."""
    monkeypatch.setattr(rpc_agent, "rpc", None)
    with pytest.raises(TransportUnavailable, match=re.escape(torch.__version__)):
        registry.load("torchrpc:cpu")


WITHOUT_RPC = """
import sys
import torch
del torch._C._rpc_init
sys.modules["torch._C._distributed_rpc"] = None
import mq
try:
    mq.connect("torchrpc", group="none")
except mq.TransportUnavailable as error:
    print(error)
"""


def test_a_build_without_rpc_is_refused_with_the_remedy() -> None:
    """As torch for macOS is, or would be once PyTorch has removed it."""
    said = output_of(WITHOUT_RPC)
    assert "was built without torch.distributed.rpc" in said
    assert "use another transport" in said


def test_a_torch_without_the_private_interface_is_named_with_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is missing is in the text."""
    monkeypatch.delattr(rpc_agent.private.TensorPipeAgent, "_update_group_membership")
    with pytest.raises(TransportUnavailable, match="_update_group_membership"):
        registry.load("torchrpc:cpu")


@pytest.mark.parametrize("step", ["TensorPipeAgent", "WorkerInfo"])
def test_an_agent_that_does_not_start_is_an_error_and_can_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Another signature is what another version of torch may well have."""
    monkeypatch.setattr(shared, "_tested", set())

    def changed(only: object) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(rpc_agent.private, step, changed)
        poller = Poller()
        with pytest.raises(TransportUnavailable, match=re.escape(torch.__version__)):
            TorchRpcLink().open(poller, [], None)
        poller.close()
    with World(TorchRpcLink) as world:
        world.connect()


def test_a_wrong_answer_to_the_self_test_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An agent that starts, and does not work, is not used."""
    monkeypatch.setattr(shared, "_tested", set())
    monkeypatch.setattr(rpc_agent, "echo", calls.hold)
    monkeypatch.setattr(calls, "ANSWER_SECONDS", 0.2)
    poller = Poller()
    with pytest.raises(TransportUnavailable, match="does not start"):
        TorchRpcLink().open(poller, [], None)
    poller.close()


def test_a_default_device_of_the_application_is_not_that_of_the_self_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is in force in the thread that connects, where that is not the main one."""
    monkeypatch.setattr(shared, "_tested", set())
    with torch.device("meta"), World(TorchRpcLink) as world:
        dialled, accepted = world.connect()
        world.send(dialled, b"head", bytes(300_000))
        world.arrive(world.members[1].received.setdefault(accepted, []), 1)


def test_infiniband_is_used_only_where_there_is_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else TensorPipe goes on with TCP; what makes fork safe is set before it looks."""
    if os.path.isdir("/sys/class/infiniband"):
        pytest.skip("this host has InfiniBand")
    for name in ("IBV_FORK_SAFE", "RDMAV_FORK_SAFE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with World(functools.partial(TorchRpcLink, infiniband=True)) as world:
        dialled, accepted = world.connect()
        world.send(dialled, b"head", bytes(1_000_000))
        world.until(lambda: accepted in world.members[1].received, "a message by TCP")
        assert rpc_conn(dialled)._link.agent.url.startswith("uv://")
        assert os.environ["IBV_FORK_SAFE"] == os.environ["RDMAV_FORK_SAFE"] == "1"


def _application_main(rank: int, file: str, pipe: Connection) -> None:
    """A worker of an application's own RPC group, with a link on top."""
    import warnings

    from torch.distributed import rpc

    os.environ["TP_SOCKET_IFNAME"] = "lo"
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{file}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        init: Any = rpc.init_rpc
        init(f"app{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    with World(TorchRpcLink, 1) as world:
        (member,) = world.members
        if rank == 0:
            pipe.send(member.addresses[0])
            world.until(lambda: bool(member.conns(What.ACCEPTED)), "ACCEPTED")
            (conn,) = member.conns(What.ACCEPTED)
        else:
            conn = dial(world, pipe.recv())
        for number in range(200):
            world.send(conn, b"%d" % number, bytes(200_000 if number % 50 == 0 else 1))
        received = member.received.setdefault(conn, [])
        world.arrive(received, 200)
        assert [head for head, _ in received] == [b"%d" % n for n in range(200)]
        # No call waits for a batch the other way: a graceful shutdown would, too.
        world.until(lambda: not rpc_conn(conn).unanswered, "all answers")
        pipe.send("done")
        # The other end may still wait for what this one has not sent.
        world.nap = 0.05
        world.until(pipe.poll, "the word to close")
    assert rpc._is_current_rpc_agent_set()  # type: ignore[attr-defined]
    rpc.shutdown()  # gracefully: nothing of ours is pending
    pipe.send("left")


def test_an_agent_of_the_application_is_used_within_its_group() -> None:
    """Its sixteen threads do not change the order, nor do we hang its shutdown."""
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes = [], []
        for rank in (0, 1):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_application_main,
                args=(rank, f"{directory}/rpc", theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            assert pipes[0].poll(PATIENCE)
            pipes[1].send(pipes[0].recv())
            for expected in ("done", "left"):
                for pipe in pipes:
                    assert pipe.poll(PATIENCE), f"not {expected} in time"
                    assert pipe.recv() == expected
                for pipe in pipes:
                    if expected == "done":
                        pipe.send("close")
        finally:
            for process, pipe in zip(processes, pipes, strict=True):
                process.join(5)
                process.kill()
                process.join(PATIENCE)
                process.close()
                pipe.close()


SHUT_DOWN = """
import os
import warnings
os.environ["TP_SOCKET_IFNAME"] = "lo"
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
warnings.simplefilter("ignore")
import mq
from torch.distributed import rpc

rpc.init_rpc("app", rank=0, world_size=1)
options = {"group": "shut down", "peer_timeout": None}
met = mq.connect("torchrpc", name="met", **options)
other = mq.connect("torchrpc", name="other", **options)
alone = mq.connect("torchrpc", group="alone", listen="torchrpc://127.0.0.1:0")
met.subscribe("t", timeout=60)
other.wait_for_subscribers("t", 1, timeout=60)
rpc.shutdown(graceful=False)
other.publish("t", 1)
for queue in (met, other, alone):
    for call in (lambda: queue.recv(timeout=60), lambda: queue.publish("t", 0)):
        try:
            call()
        except mq.Closed as error:
            print(error)
    queue.close(linger=None)
"""


def test_a_queue_over_an_agent_that_the_application_ended_says_so() -> None:
    """There is no other one for it; calls, and `close`, would wait for ever."""
    said = output_of(SHUT_DOWN).splitlines()
    reason = "is closed: the application has shut down its RPC agent, used here"
    assert [line.endswith(reason) for line in said] == [True] * 6
