"""How a member that was given addresses reaches whoever listens there."""

from __future__ import annotations

import functools
import time

from mq import addresses
from mq.errors import ConnectTimeout
from mq.mesh.dial import Dial
from mq.mesh.driver import Driver
from mq.settings import Settings


def dial_explicit(settings: Settings, driver: Driver, deadline: float) -> None:
    """Have a session with whoever listens at the addresses of `attach_to`.

    Raises:
        ValueError: One of them is no address of this backend.
        ConnectTimeout, ConnectRefused, AuthenticationFailed: Not at all of them.
    """
    mesh = driver.mesh
    dials = []
    for address in settings.attach_to:
        find = functools.partial(mesh.dialling.routes, [address], same_host=True)
        routes = driver.look(find)
        if not routes or addresses.is_any_port(address):
            raise ValueError(
                f"attach_to={address!r} is no address of backend {settings.backend!r}; "
                "give what describe()['addresses'] of another member says, over TCP "
                "with its port"
            )
        dial = Dial(routes, until=deadline + 1.0)
        dials.append(dial)
        driver.run(functools.partial(mesh.dialling.start, dial))

    def reached(dial: Dial) -> bool:
        session = mesh.sessions.get(dial.incarnation)
        return session is not None and session.introduced

    def settled() -> bool:
        return any(d.refusal for d in dials) or all(map(reached, dials))

    arrived = driver.wait_until(settled, max(0.0, deadline - time.monotonic()))
    with driver.lead.lock:
        for dial in dials:
            dial.raise_refusal()
        missing = "; ".join(
            f"{d.address} ({d.outcome()})" for d in dials if not reached(d)
        )
    if not arrived:
        raise ConnectTimeout(
            f"could not greet within {settings.connect_timeout:g} s: {missing}. Is a "
            "member of this group listening there? On a slow network raise "
            "connect_timeout"
        )
