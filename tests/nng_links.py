"""What makes the links of NNG, with certificates of ours for TLS."""

from __future__ import annotations

import functools

import pytest
from tls_files import tls_options

from transports._nng_pair import engine
from transports.nng import NngLink
from transports.nng_tls import NngTlsLink

ipc = functools.partial(NngLink, wires=("ipc",))
tcp = functools.partial(NngLink, wires=("tcp",))
tls = functools.partial(NngTlsLink, **tls_options())


@pytest.fixture(scope="module", autouse=True)
def nng_runs() -> None:
    """Its engine stays once it was used, which is no leak of the first test."""
    engine.use()
