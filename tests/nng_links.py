"""What makes the links of NNG, with certificates of ours for TLS."""

from __future__ import annotations

import functools

from tls_files import tls_options

from transports.nng import NngLink
from transports.nng_tls import NngTlsLink

ipc = functools.partial(NngLink, wires=("ipc",))
tcp = functools.partial(NngLink, wires=("tcp",))
tls = functools.partial(NngTlsLink, **tls_options())
