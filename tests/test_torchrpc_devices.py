"""Device maps: what is written, what is refused, and by which words."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transports import _torchrpc_devices as devices

names = st.text("abc_019-", min_size=1, max_size=8)
indices = st.integers(0, 7)
# Each GPU to one GPU, and each of the peer's from one only.
pairs = st.dictionaries(indices, indices, max_size=8).map(
    lambda d: {a: b for b, a in {b: a for a, b in d.items()}.items()}
)
maps = st.dictionaries(names, pairs.filter(bool), max_size=4)


@given(maps)
def test_a_map_survives_its_text(given_map: devices.DeviceMap) -> None:
    """What is described can be read again, whatever the peers are called."""
    assert devices.parse(devices.describe(given_map)) == given_map
    assert devices.parse(given_map) == given_map


@given(st.text(max_size=20))
def test_any_text_is_a_map_or_a_value_error(text: str) -> None:
    """Nothing else comes of it, and an entry that is refused is named."""
    try:
        found = devices.parse(text)
    except ValueError as error:
        assert "device map" in str(error)  # noqa: PT017
    else:
        assert all(pairs for pairs in found.values())


@given(maps, names, st.integers(0, 8), st.integers(0, 8))
def test_a_resolved_map_names_only_gpus_that_exist(
    wanted: devices.DeviceMap, peer: str, count: int, remote: int
) -> None:
    """After both checks every GPU of a map exists, and none is used twice."""
    local = devices.local_devices(None, count)
    try:
        devices.check_local(wanted, local, count)
        found = devices.resolve(wanted, peer, local, remote)
    except ValueError as error:
        assert re.search(r"device map [^ ]+_\d_\d: ", str(error))  # noqa: PT017
        return
    assert all(a < count and b < remote for a, b in found.items())
    assert len(set(found.values())) == len(found)
    if peer not in wanted:
        assert found == {index: index for index in range(min(count, remote))}


def test_devices_are_written_in_any_of_the_usual_ways() -> None:
    """Numbers, text and torch devices mean the same."""
    given_map = {1: {"cuda:0": torch.device("cuda", 1), 2: "3"}}
    assert devices.parse(given_map) == {"1": {0: 1, 2: 3}}
    assert devices.parse("1_0_1, 2_0_2,0_0_0") == {
        "1": {0: 1},
        "2": {0: 2},
        "0": {0: 0},
    }
    assert devices.parse("node_a_0_1") == {"node_a": {0: 1}}
    assert devices.parse(None) == devices.parse("") == {}
    for several in (["cuda:1", 0], "1,0", " cuda:1, 0", (torch.device("cuda", 1), "0")):
        assert devices.local_devices(devices.chosen(several), 2) == (1, 0)
    for one in (1, "1", "cuda:1", [1], torch.device("cuda", 1)):
        assert devices.chosen(one) == (1,)
    assert devices.chosen("") == devices.chosen([]) == ()
    assert devices.chosen(None) is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("1_0", "'1_0'"),
        ("1_0_x", "'1_0_x'"),
        ("_0_1", "'_0_1'"),
        ("1_0_1,,2_0_1", "''"),
        ("1_0_1,1_0_2", "1_0_2: 1_0_1 is there already"),
        ("1_0_1,1_2_1", "1_2_1: 1_0_1 is there already"),
        ({"1": {0: 1, 2: 1}}, "1_2_1: 1_0_1 is there already"),
        ({"1": {"cpu": 1}}, "'cpu' is no GPU"),
        ({"1": {True: 1}}, "True is no GPU"),
        ({"": {0: 1}}, "without a name"),
    ],
)
def test_a_malformed_map_is_a_value_error_that_names_the_entry(
    wrong: object, words: str
) -> None:
    """The entry that is wrong is in the text as it was written."""
    with pytest.raises(ValueError, match=re.escape(words)):
        devices.parse(wrong)


@pytest.mark.parametrize("wrong", [7, ["1_0_1"], {"1": 0}])
def test_what_is_no_map_at_all_is_a_type_error(wrong: object) -> None:
    """The text says what a map looks like."""
    with pytest.raises(TypeError, match="device_map"):
        devices.parse(wrong)


@pytest.mark.parametrize("key", [None, b"a", ("a",), True, 1.0])
def test_a_map_by_what_is_no_name_is_a_type_error(key: object) -> None:
    """No member goes by its text, and the entry would wait for ever."""
    with pytest.raises(TypeError, match=re.escape(f"names a peer {key!r}")):
        devices.parse({key: {0: 0}})


@pytest.mark.parametrize("given", [b"01", bytearray(b"0"), memoryview(b"01")])
def test_bytes_are_no_list_of_gpus(given: object) -> None:
    """Their numbers are those of characters."""
    with pytest.raises(TypeError, match="local_devices is GPUs"):
        devices.chosen(given)


def test_gpus_that_do_not_exist_are_named() -> None:
    """Here, at a peer, or among `local_devices`."""
    wanted = devices.parse("1_2_0,2_0_5")
    with pytest.raises(ValueError, match=r"1_2_0: no GPU 2: there are 2, 0 to 1"):
        devices.check_local(wanted, (0, 1), 2)
    with pytest.raises(ValueError, match=r"1_2_0: GPU 2 is not among .*\[0, 1\]"):
        devices.check_local(wanted, (0, 1), 3)
    with pytest.raises(ValueError, match=r"2_0_5: member '2' has no GPU 5: there is"):
        devices.resolve(wanted, "2", (0, 1), 1)
    with pytest.raises(ValueError, match=r"local_devices names GPU 1"):
        devices.local_devices([0, 1], 1)
    with pytest.raises(ValueError, match=r"no CUDA device"):
        devices.local_devices([0], 0)
    with pytest.raises(ValueError, match="twice"):
        devices.local_devices(devices.chosen([0, "cuda:0"]), 1)
