"""Certificates for cells of transports that encrypt, made by the program `openssl`."""

from __future__ import annotations

import os
import subprocess
from typing import Any

PROGRAM = "openssl"
_NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"


def options(directory: str) -> dict[str, Any]:
    """Options of `tls` and `nng:tls` for a certificate in a directory, there or new.

    Raises:
        RuntimeError: openssl makes none.
    """
    certificate = os.path.join(directory, "certificate.pem")
    private_key = os.path.join(directory, "private.key")
    if not os.path.exists(certificate):
        _make(certificate, private_key)
    return {
        "certificate": certificate,
        "private_key": private_key,
        "authorities": certificate,  # signed by itself
    }


def _make(certificate: str, private_key: str) -> None:
    command = [PROGRAM, "req", "-x509", "-nodes", "-days", "2", "-newkey", "ec"]
    command += ["-pkeyopt", "ec_paramgen_curve:P-256", "-subj", "/CN=localhost"]
    command += ["-addext", _NAMES, "-keyout", private_key, "-out", certificate]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"openssl made no certificate: {done.stderr.strip()[-300:]}")
