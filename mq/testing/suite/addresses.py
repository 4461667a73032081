"""Members that meet by explicit addresses: `listen=` and `attach_to=`."""

from __future__ import annotations

from mq.testing.cases import case
from mq.testing.harness import Group
from mq.testing.waiting import PEER_TIMEOUT, STEP


@case("Membership")
def whoever_listens_at_an_address_later_is_met_again(group: Group) -> None:
    """Who was given it in `attach_to` looks there for as long as its queue lives."""
    hub, leaf = group.unconnected("hub"), group.unconnected("leaf")
    options = {"secret": "conformance", "peer_timeout": PEER_TIMEOUT}
    address, _ = group.listening(hub, **options)
    group.connecting(leaf, attach_to=(address,), **options).result()
    leaf.subscribe("t")
    for life in range(2):
        hub.call("wait_for_subscribers", "t", 1, timeout=STEP)
        hub.publish("t", life)
        message = leaf.recv()
        assert (message.payload, message.sequence) == (life, 0), message
        if not life:
            hub.call("close")
            group.connecting(hub, listen=(address,), **options).result()
    assert [m.name for m in leaf.call("members")] == ["hub", "leaf"]
