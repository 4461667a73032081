"""The files by which a member of an encrypted group proves who it is."""

from __future__ import annotations


def pem_files(
    transport: str, certificate: str, private_key: str, authorities: str
) -> dict[str, str]:
    """The paths that a transport with certificates was given, by option.

    Raises:
        ValueError: One is missing.
    """
    given = {
        "certificate": certificate,
        "private_key": private_key,
        "authorities": authorities,
    }
    missing = [name for name, path in given.items() if not path]
    if missing:
        raise ValueError(
            f"{transport} needs certificate=, private_key= and authorities=, the paths "
            f"of PEM files; missing: {', '.join(missing)}"
        )
    return given
