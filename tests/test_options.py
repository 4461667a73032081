"""Options of transports: what counts, and the words for what does not."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from mq import options, registry
from transports.torchrpc_cuda import TorchRpcCudaLink


def test_what_can_mean_one_thing_only_counts() -> None:
    """Text with commas, and numbers of NumPy's."""
    assert options.names("o", "uv, shm") == options.names("o", ["uv", "shm"])
    assert options.names("o", "uv") == ("uv",)
    assert options.names("o", ()) == ()
    assert options.whole("o", np.int64(3), 1, 3) == 3
    assert options.seconds("o", 2, 5) == 2.0
    assert options.seconds("o", np.int64(2), 5) == 2.0
    assert options.switch("o", False) is False


@pytest.mark.parametrize(
    ("backend", "option", "given", "kind", "words"),
    [
        ("torchrpc", "transports", 1, TypeError, "'a,b', not 1"),
        ("torchrpc", "transports", ["uv", 2], TypeError, "not ['uv', 2]"),
        ("torchrpc", "transports", "uv;shm", ValueError, "'uv;shm'"),
        ("torchrpc", "channels", None, TypeError, "not None"),
        ("torchrpc", "channels", "", ValueError, "''"),
        ("torchrpc", "threads", "2", TypeError, "a whole number, 1 to 64, not '2'"),
        ("torchrpc", "threads", True, TypeError, "a whole number, 1 to 64, not True"),
        ("torchrpc", "threads", 65, ValueError, "is 65, but must be 1 to 64"),
        ("torchrpc", "infiniband", "no", TypeError, "True or False, not 'no'"),
        ("torchrpc", "infiniband", 1, TypeError, "True or False, not 1"),
        ("torchrpc", "greeting_timeout", "5", TypeError, "is '5', not a number of s"),
        ("torchrpc", "greeting_timeout", float("nan"), ValueError, "is nan"),
        ("torchrpc", "greeting_timeout", 3601, ValueError, "at most 3600 s"),
        ("nng", "depth", "3", TypeError, "a whole number, 1 to 8192, not '3'"),
        ("nng", "depth", 1.5, TypeError, "a whole number, 1 to 8192, not 1.5"),
        ("nng", "depth", 0, ValueError, "is 0, but must be 1 to 8192"),
    ],
)
def test_what_is_no_value_of_an_option_is_named(
    backend: str, option: str, given: object, kind: type[Exception], words: str
) -> None:
    """The option, what was given, and what is wanted."""
    with pytest.raises(kind, match=rf"^{option}.*{re.escape(words)}"):
        registry.create(backend, {option: given})


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"max_gpu_peers": "64"}, TypeError, "max_gpu_peers is a whole number"),
        ({"map_name": 3}, TypeError, "map_name is a str, not 3"),
        ({"local_devices": 1.5}, TypeError, "local_devices is .* not 1.5"),
        ({"local_devices": "0;1"}, ValueError, "local_devices.*'0;1' is no GPU"),
        ({"local_devices": [0, "cpu"]}, ValueError, "local_devices.*'cpu' is no GPU"),
        ({"local_devices": True}, TypeError, "local_devices is .* not True"),
    ],
)
def test_options_for_gpus_are_named_too(
    given: dict[str, Any], kind: type[Exception], words: str
) -> None:
    """When the link is made, so before anything is opened."""
    with pytest.raises(kind, match=words):
        TorchRpcCudaLink(**given)
