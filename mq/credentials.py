"""The files by which a member of an encrypted group proves who it is."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import ssl
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NoReturn

from mq.log import Log
from mq.openssl import undivided

logger = Log(__name__)

LAST_PART: Final = 0.1
"""Of the time that a certificate is valid: whoever connects then is told of its end."""

_OUT_OF_DATE: Final = (9, 10)  # not yet valid, expired: codes of OpenSSL
_MOST_CHARACTERS: Final = 255  # of a name, in TLS
_REMEDIES: Final = {
    10: "; it needs a new one",
    18: "; authorities= must hold the certificate that signed it",
    19: "; authorities= must hold the certificate that signed it",
    20: "; authorities= must hold the certificate that signed it",
    62: "; server_name= says which name it has, where that is not its host",
    64: "; server_name= says which name it has, where that is not its host",
}


def pem_files(
    transport: str, certificate: object, private_key: object, authorities: object
) -> dict[str, str]:
    """The paths that a transport with certificates was given, by option.

    Raises:
        TypeError: One is no path.
        ValueError: One is missing.
    """
    given = {
        "certificate": _path("certificate", certificate),
        "private_key": _path("private_key", private_key),
        "authorities": _path("authorities", authorities),
    }
    missing = [name for name, path in given.items() if not path]
    if missing:
        raise ValueError(
            f"{transport} needs certificate=, private_key= and authorities=, the paths "
            f"of PEM files; missing: {', '.join(missing)}"
        )
    return given


def _path(option: str, given: object) -> str:
    """What `open` takes for a path only: it reads and closes descriptors, too."""
    if given is None:
        return ""
    try:
        return os.fsdecode(given)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{option} is the path of a PEM file, not {given!r}") from None


def asked_name(server_name: object) -> str:
    """The option of that name, as certificates and TLS have it; empty: not given.

    Raises:
        TypeError: It is no text.
        ValueError: No certificate can have such a name.
    """
    wanted = "the name in peers' certificates, such as 'worker.example.org'"
    if server_name is None:
        return ""
    if not isinstance(server_name, str):
        raise TypeError(f"server_name is {wanted}, or None, not {server_name!r}")
    try:
        encoded = server_name.encode("idna").decode()
    except UnicodeError as error:
        raise ValueError(
            f"server_name is {wanted}, not {server_name!r}: {error}"
        ) from error
    # The dot that ends a name in the DNS is in no certificate.
    name = encoded.removesuffix(".")
    if len(name) > _MOST_CHARACTERS or "\0" in name or name.startswith("."):
        raise ValueError(f"server_name is {wanted}, not {server_name!r}")
    return name


def contexts(
    transport: str,
    paths: Mapping[str, str],
    oldest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2,
) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """How the end that listens, and the one that dials, prove who they are.

    Args:
        transport: For the errors.
        paths: As from `pem_files`.
        oldest: Version of TLS to accept.

    Raises:
        OSError: A file cannot be read, or is not what it must be; says which.
    """
    _check_texts(transport, paths)
    with undivided():
        server = _context(ssl.PROTOCOL_TLS_SERVER, transport, paths, oldest)
        # Sessions are resumed by the mesh, not by TLS: no tickets of 1.3, nor of 1.2.
        server.num_tickets = 0
        server.options |= ssl.OP_NO_TICKET
        return server, _context(ssl.PROTOCOL_TLS_CLIENT, transport, paths, oldest)


def check_dates(transport: str, paths: Mapping[str, str]) -> None:
    """See that peers can accept this member's own certificate, and for how long.

    Its name and its signer are for the files of peers to judge.

    Raises:
        OSError: None could accept it now.
    """
    server, client = contexts(transport, paths)
    client.check_hostname = False  # OpenSSL looks at names before it looks at dates
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    with undivided():
        ends = (
            client.wrap_bio(back, there),
            server.wrap_bio(there, back, server_side=True),
        )
        for end in (*ends, *ends):
            path = paths["certificate"]
            try:
                code, text = _step(end)
            except ssl.SSLError as error:
                raise OSError(
                    f"{transport}: certificate {path!r}: OpenSSL makes no connection "
                    f"with it ({explain(error)}); its key must be one that TLS has: "
                    "RSA, of the curve P-256, P-384 or P-521, or with `tls` Ed25519"
                ) from error
            if code in _OUT_OF_DATE:
                raise OSError(f"{transport}: certificate {path!r}: {text}")
            if code:
                return
    with contextlib.suppress(ValueError):  # before TLS 1.3 that takes another step
        _tell_of_end(transport, paths["certificate"], ends[0].getpeercert() or {})


def _tell_of_end(transport: str, path: str, certificate: Mapping[str, object]) -> None:
    begin, end = (
        ssl.cert_time_to_seconds(str(certificate[which]))
        for which in ("notBefore", "notAfter")
    )
    left = end - time.time()
    if left < LAST_PART * (end - begin):
        logger.warning(
            "%s: certificate %r expires in %s, at %s: from then on nobody joins this "
            "member, nor resumes a session; renew it, and connect again before that",
            transport,
            path,
            datetime.timedelta(seconds=round(left)),
            certificate["notAfter"],
        )


def explain(error: ssl.SSLError) -> str:
    """What went wrong, in words, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        remedy = _REMEDIES.get(error.verify_code, "")
        words = error.verify_message.rstrip(".")
        return f"the peer's certificate is refused: {words}{remedy}"
    reason = error.reason or ""
    words = reason.replace("_", " ").lower()
    # The latter where the two are of different kinds, such as RSA and EC.
    if reason in ("KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED"):
        return "the key is not that of the certificate"
    if "ALERT" in reason:
        return (
            "the peer refuses this member's certificate or version of TLS: "
            + words.partition("alert ")[2]
        )
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return "the peer does not speak TLS"
    return words or str(error)


def _check_texts(transport: str, paths: Mapping[str, str]) -> None:
    """Say which file is not what it must be, which OpenSSL does not."""
    for option, path in paths.items():
        try:
            if stat.S_ISFIFO(os.stat(path).st_mode):  # each is read more than once
                raise OSError(errno.ESPIPE, "it is a pipe")
            text = Path(path).read_bytes()
        except OSError as error:
            raise OSError(
                error.errno,
                f"{transport}: {option} {path!r} cannot be read: {error.strerror}",
            ) from error
        what, word = "certificate", b"CERTIFICATE-----"
        if option == "private_key":
            what, word = "key", b"PRIVATE KEY-----"
        if word not in text:
            raise OSError(f"{transport}: {option} {path!r} holds no {what} in PEM form")


def _context(
    protocol: int, transport: str, paths: Mapping[str, str], oldest: ssl.TLSVersion
) -> ssl.SSLContext:
    certificate, private_key, authorities = paths.values()

    def no_password() -> NoReturn:  # without this OpenSSL would ask at the terminal
        raise OSError(
            f"{transport}: private_key {private_key!r} is locked by a password: "
            f"`openssl pkey -in {private_key}` writes it without one, for a file that "
            "only its owner can read",
        )

    context = ssl.SSLContext(protocol)
    context.minimum_version = oldest
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(certificate, private_key, no_password)
        context.load_verify_locations(authorities)
    except ssl.SSLError as error:
        raise OSError(
            f"{transport}: OpenSSL does not accept certificate and private_key "
            f"{certificate!r}, {private_key!r} with authorities {authorities!r}: "
            f"{explain(error)}",
        ) from error
    return context


def _step(end: ssl.SSLObject) -> tuple[int, str]:
    """A step of a handshake; OpenSSL's code and words where a certificate is bad.

    Raises:
        ssl.SSLError: The two ends do not fit.
    """
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        pass
    except ssl.SSLCertVerificationError as error:
        return error.verify_code, error.verify_message
    return 0, ""
