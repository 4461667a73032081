"""One message queue for PyTorch programs over interchangeable transports.

>>> import mq
>>> queue = mq.connect("inproc", group="demo", name="learner")
>>> queue.close()

`connect` and what it returns, `MQ`, are all that an application needs. Importing this
package loads neither torch, NumPy nor an engine.
"""

from mq.errors import (
    AuthenticationFailed,
    Closed,
    CodecError,
    ConnectRefused,
    ConnectTimeout,
    FlushTimeout,
    ForkedProcess,
    MembersTimeout,
    MessagesLost,
    MessageTooLarge,
    MQError,
    PeerLost,
    PublishTimeout,
    RecvTimeout,
    SubscribeTimeout,
    TransportUnavailable,
    UnknownTransport,
    UntrustedPayload,
)
from mq.members import Member
from mq.message import CLEAR, KEEP_ALL, History, Message, keep_last
from mq.queue import MQ, connect
from mq.registry import register
from mq.safe_types import add_safe_types
from mq.transport import Capabilities

__version__ = "0.1.0"

__all__ = [
    "connect",
    "MQ",
    "Message",
    "Member",
    "KEEP_ALL",
    "keep_last",
    "History",
    "CLEAR",
    "add_safe_types",
    "register",
    "Capabilities",
    "MQError",
    "AuthenticationFailed",
    "Closed",
    "CodecError",
    "ConnectRefused",
    "ConnectTimeout",
    "FlushTimeout",
    "ForkedProcess",
    "MembersTimeout",
    "MessageTooLarge",
    "MessagesLost",
    "PeerLost",
    "PublishTimeout",
    "RecvTimeout",
    "SubscribeTimeout",
    "TransportUnavailable",
    "UnknownTransport",
    "UntrustedPayload",
    "__version__",
]
