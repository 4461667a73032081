"""Certificates of ours, for every link that encrypts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CERTIFICATES = Path(__file__).with_name("certificates")


def tls_options(member: str = "member", authority: str = "authority") -> dict[str, Any]:
    """Options of `tls` and `nng:tls`; valid for a hundred years on localhost."""
    return {
        "certificate": str(CERTIFICATES / f"{member}.pem"),
        "private_key": str(CERTIFICATES / f"{member}.key"),
        "authorities": str(CERTIFICATES / f"{authority}.pem"),
    }
