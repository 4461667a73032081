"""torchrpc:cuda with real GPUs: what tensors on the CPU cannot stand in for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mq
from mq import tensors
from mq.testing.link_world import PATIENCE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DTYPES = [dtype for dtype in tensors._BY_DTYPE if dtype is not torch.complex32]
"""Those that can be sent; torch warns of whatever is done with the one left out."""


def bits(tensor: torch.Tensor) -> list[int]:
    values: list[int] = tensor.contiguous().view(torch.uint8).tolist()
    return values


def test_queues_of_one_process_exchange_tensors_on_a_gpu() -> None:
    """Of every dtype, on another stream, retained too; nothing stays on the CPU."""
    raw = torch.randint(0, 2, (64,), dtype=torch.uint8, device="cuda:0")
    sent = {str(dtype): raw.view(dtype) for dtype in DTYPES}
    sent["every second"] = raw[::2]
    sent["from the middle"] = raw.float()[5:9].requires_grad_()
    sent["none"] = raw[:0].double()
    torch.cuda.synchronize()
    with (
        mq.connect("cuda", group="one gpu", name="a") as a,
        mq.connect("cuda", group="one gpu", name="b") as b,
    ):
        a.publish("t", {"sent": sent, "one": raw[3]}, retain=True, timeout=PATIENCE)
        b.subscribe("t")
        with torch.cuda.stream(torch.cuda.Stream()):
            payload = b.recv(timeout=PATIENCE).payload
            found = payload["sent"]
            assert {str(t.device) for t in found.values()} == {"cuda:0"}
            assert int(payload["one"]) == int(raw[3])
            for name, tensor in sent.items():
                assert found[name].dtype == tensor.dtype
                assert bits(found[name]) == bits(tensor.detach())
        connection = a.describe()["peers"]["b"]["connection"]
        assert connection["tensors"].startswith("cuda:0 to cuda:0")


def test_what_is_still_to_be_computed_is_published_as_it_will_be() -> None:
    """Only streams wait for it; what is written afterwards does not count."""
    size = 80_000_000  # three pieces
    x = torch.zeros(size, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    computing, reading = torch.cuda.Stream(), torch.cuda.Stream()
    with (
        mq.connect("cuda", group="late values", name="a") as a,
        mq.connect("cuda", group="late values", name="b") as b,
    ):
        b.subscribe("t")
        for cycles in (1, 1_000_000_000):  # the first time kernels and memory are got
            with torch.cuda.stream(computing):
                torch.cuda._sleep(cycles)
                x.fill_(7)
                a.publish("t", {"x": x, "n": cycles}, timeout=PATIENCE)
                assert cycles == 1 or not computing.query()
                x.fill_(9)
            with torch.cuda.stream(reading):
                payload = b.recv(timeout=PATIENCE).payload
                assert payload["n"] == cycles
                assert int(payload["x"].sum(dtype=torch.int64)) == 7 * size


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_a_map_leads_from_each_gpu_to_its_own() -> None:
    """In one message with host memory, whichever GPU is the current one."""
    sent = {
        "x": torch.arange(1000, device="cuda:0"),
        "y": torch.arange(20_000_000, device="cuda:1"),
        "z": torch.arange(5),
    }
    options: dict[str, Any] = {"group": "gpus", "device_map": {"b": {0: 1, 1: 0}}}
    with (
        mq.connect("cuda", name="a", **options) as a,
        mq.connect("cuda", name="b", **options) as b,
        torch.cuda.device(1),
    ):
        b.subscribe("t")
        a.publish("t", sent, timeout=PATIENCE)
        found = b.recv(timeout=PATIENCE).payload
    assert [str(t.device) for t in found.values()] == ["cuda:1", "cuda:0", "cpu"]
    assert all(torch.equal(found[key].cpu(), sent[key].cpu()) for key in sent)
