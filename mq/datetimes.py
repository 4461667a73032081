"""Dates and times on the wire."""

from __future__ import annotations

import datetime
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from mq import extensions as ext

if TYPE_CHECKING:
    from mq.packing import Handler, Packer
    from mq.unpacking import Unpacker


def _pack_datetime(packer: Packer, value: datetime.datetime, depth: int) -> Any:
    body = struct.pack(">H2B", value.year, value.month, value.day) + _packed_clock(
        value, value.utcoffset()
    )
    return packer.ext(ext.DATETIME, body)


def _pack_time(packer: Packer, value: datetime.time, depth: int) -> Any:
    offset = value.utcoffset()
    if offset is None and value.tzinfo is not None:
        return packer.without_format(
            value,
            f"the zone of time {value} has no fixed offset; send a datetime, or a time "
            "with a datetime.timezone",
        )
    return packer.ext(ext.TIME, _packed_clock(value, offset))


def _packed_clock(
    value: datetime.datetime | datetime.time, offset: datetime.timedelta | None
) -> bytes:
    body = struct.pack(
        ">4BI", value.hour, value.minute, value.second, value.fold, value.microsecond
    )
    if offset is None:
        return body
    return body + struct.pack(">q", offset // datetime.timedelta(microseconds=1))


def _pack_date(packer: Packer, value: datetime.date, depth: int) -> Any:
    body = struct.pack(">H2B", value.year, value.month, value.day)
    return packer.ext(ext.DATE, body)


def _pack_timedelta(packer: Packer, value: datetime.timedelta, depth: int) -> Any:
    body = struct.pack(">iII", value.days, value.seconds, value.microseconds)
    return packer.ext(ext.TIMEDELTA, body)


def _unpack_datetime(unpacker: Unpacker, body: memoryview) -> datetime.datetime:
    year, month, day = struct.unpack_from(">H2B", body)
    clock = _unpacked_clock(body[4:])
    return datetime.datetime.combine(datetime.date(year, month, day), clock)


def _unpack_date(unpacker: Unpacker, body: memoryview) -> datetime.date:
    return datetime.date(*struct.unpack(">H2B", body))


def _unpack_time(unpacker: Unpacker, body: memoryview) -> datetime.time:
    return _unpacked_clock(body)


def _unpacked_clock(body: memoryview) -> datetime.time:
    zone = None
    if body.nbytes > 8:
        (offset,) = struct.unpack(">q", body[8:])
        zone = datetime.timezone(datetime.timedelta(microseconds=offset))
    hour, minute, second, fold, microsecond = struct.unpack_from(">4BI", body)
    return datetime.time(hour, minute, second, microsecond, zone, fold=fold)


def _unpack_timedelta(unpacker: Unpacker, body: memoryview) -> datetime.timedelta:
    return datetime.timedelta(*struct.unpack(">iII", body))


HANDLERS: Final[dict[type, Handler]] = {
    datetime.datetime: _pack_datetime,
    datetime.date: _pack_date,
    datetime.time: _pack_time,
    datetime.timedelta: _pack_timedelta,
}
UNPACKERS: Final[dict[int, Callable[[Unpacker, memoryview], Any]]] = {
    ext.DATETIME: _unpack_datetime,
    ext.DATE: _unpack_date,
    ext.TIME: _unpack_time,
    ext.TIMEDELTA: _unpack_timedelta,
}
