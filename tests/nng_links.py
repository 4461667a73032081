"""What makes the links of NNG, with certificates of ours for TLS."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from transports.nng import NngLink
from transports.nng_tls import NngTlsLink

CERTIFICATES = Path(__file__).with_name("certificates")


def tls_options(member: str = "member", authority: str = "authority") -> dict[str, Any]:
    """Options of `nng:tls`; valid for a hundred years on localhost."""
    return {
        "certificate": str(CERTIFICATES / f"{member}.pem"),
        "private_key": str(CERTIFICATES / f"{member}.key"),
        "authorities": str(CERTIFICATES / f"{authority}.pem"),
    }


ipc = functools.partial(NngLink, wires=("ipc",))
tcp = functools.partial(NngLink, wires=("tcp",))
tls = functools.partial(NngTlsLink, **tls_options())
