"""The command `mq`: bench, transports, rendezvous."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from mq.errors import MQError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status.

    Args:
        arguments: In place of those of the process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    out, err = _Patient(sys.stdout), _Patient(sys.stderr)
    with (
        contextlib.redirect_stdout(cast(TextIO, out)),
        contextlib.redirect_stderr(cast(TextIO, err)),
    ):
        status = _status(given)
        out.flush()
        if out.error is None or isinstance(out.error, BrokenPipeError):
            return status
        print(f"mq: standard output: {out.error}", file=sys.stderr)
        return 2  # not 1, which is what a comparison found


def _status(given: Sequence[str]) -> int:
    """The exit status, whatever a command ends by."""
    try:
        if given[:1] == ["bench"]:  # has its own parser, loaded only here
            return _bench(given[1:])
        options = _parser().parse_args(given)
        return int(options.run(options))
    except SystemExit as ended:  # of a parser: usage, help or version
        return int(ended.code or 0)
    except KeyboardInterrupt:
        return 130
    except (MQError, OSError, ValueError) as error:
        print(f"mq: {error}", file=sys.stderr)
        return 1


class _Patient:
    """A standard stream that takes everything, also once nobody reads it any more.

    `head` has then seen enough, but what is being measured is still reported, and what
    a comparison finds is still the exit status. What its encoding has no sign for is
    shown by escapes, as on standard error.

    Attributes:
        error: Why the rest was dropped, or None.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream or io.StringIO()  # a closed one is None
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or drop it."""
        encoding = self._stream.encoding or "utf-8"  # of a StringIO it is None
        shown = text.encode(encoding, "backslashreplace").decode(encoding)
        self._attempt(lambda: self._stream.write(shown))
        return len(text)

    def flush(self) -> None:
        """Flush, if that is of use."""
        self._attempt(self._stream.flush)

    def _attempt(self, call: Callable[[], object]) -> None:
        if self.error is not None:
            return
        try:
            call()
        except OSError as error:
            self.error = error
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())  # for what is left in its buffer
            os.close(null)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mq", description="A message queue for programs that exchange tensors."
    )
    parser.add_argument("--version", action=_Version, help="print the version")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    commands.add_parser("bench", help="measure transports; see mq bench --help")
    listing = commands.add_parser(
        "transports",
        help="every backend: usable or why not, reach, devices, guarantees",
    )
    listing.set_defaults(run=_transports)
    serving = commands.add_parser(
        "rendezvous", help="run the service that rendezvous=tcp://HOST:PORT needs"
    )
    serving.add_argument("address", type=_address, metavar="HOST:PORT")
    serving.add_argument(
        "--secret-file",
        type=Path,
        metavar="F",
        help="what every member must prove to know (default: MQ_SECRET, or the file "
        "named by MQ_SECRET_FILE); required unless HOST is loopback",
    )
    serving.set_defaults(run=_rendezvous)
    return parser


class _Version(argparse.Action):
    """Prints the version."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from mq import __version__

        print(f"mq {__version__}")
        parser.exit()


def _bench(arguments: Sequence[str]) -> int:
    from bench.command import main as bench

    return bench(arguments)


def _transports(_: argparse.Namespace) -> int:
    from mq import registry

    rows = [("transport", "usable", "reach", "devices", "guarantees")]
    for name in registry.names():
        reason = registry.check(name)
        try:
            can = registry.capabilities(name)
        except MQError:  # its library is missing: `reason` says so
            rows.append((name, "no", "-", "-", "-"))
        else:
            rows.append(
                (
                    name,
                    "no" if reason else "yes",
                    can.reach,
                    ",".join(sorted(can.devices)),
                    _guarantees(
                        can.separate_processes, can.survives_fork, can.encrypted
                    ),
                )
            )
        if reason:
            rows.append(("", f"  {' '.join(reason.split())}", "", "", ""))
    _print_aligned(rows)
    return 0


def _guarantees(processes: bool, fork: bool, encrypted: bool) -> str:
    found = ["lossless", "ordered"]
    found.append("between processes" if processes else "between threads only")
    found.append("connects after fork" if fork else "no fork")
    if encrypted:
        found.append("encrypted")
    return ", ".join(found)


def _print_aligned(rows: Sequence[tuple[str, ...]]) -> None:
    cells = [row for row in rows if row[0]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(rows[0]))]
    for row in rows:
        if row[0]:
            pairs = zip(row, widths, strict=True)
            print("  ".join(text.ljust(width) for text, width in pairs).rstrip())
        else:  # a reason, under the transport that it is about
            print(row[1])


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not HOST:PORT, such as 127.0.0.1:5555"
        )
    return host, int(port)


def _rendezvous(options: argparse.Namespace) -> int:
    from mq.rendezvous.tcp import serve
    from mq.settings import secret_from

    host, port = options.address
    file = options.secret_file
    secret, _ = secret_from(None if file is None else file.read_bytes().strip())
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    service = serve(host, port, secret)
    try:
        print(f"mq rendezvous: serving on {service.address}", flush=True)
        while not ended.wait(0.5):  # a bounded wait, so that signals are seen at once
            pass
    except KeyboardInterrupt:
        pass
    finally:
        service.close()
    return 0
