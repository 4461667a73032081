"""TorchRL's inference server over mq: actors and server in any processes, on any hosts.

In the server's process::

    transport = MqTransport(queue, serves=True)
    with InferenceServer(policy, transport, max_batch_size=64):
        ...

In each actor's process, with a queue of the same group::

    client = MqTransport(queue).client()
    action = client(tensordict)

The queue belongs to the transport: all that it receives is taken for requests or
answers. A request goes to the one server of the group and its answer to the actor that
asked; tensors travel as tensors, whatever the backend.

An actor that does not read its answers holds the others up once, for `timeout`: what it
has no room for is dropped, and it is told so as soon as it has room again.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import deque
from typing import Any
from weakref import WeakValueDictionary

from tensordict import TensorDict, TensorDictBase
from torchrl.modules.inference_server import InferenceTransport

import mq
from mq.log import Log

logger = Log(__name__)

REQUESTS = "torchrl.requests"
SERVING = "torchrl.serving"
"""The server subscribes to this, too, until it is shut down; nothing is published."""
EVERY = -1
"""In place of a request's number: all to which their actor has no answer yet."""
_LOOK = 0.5  # seconds between two looks whether the server is there, or shall end
_LONGEST = 10_000  # characters that an actor is told of an error


class InferenceFailed(RuntimeError):
    """There is no result for this request; the text says why."""


def replies(name: str) -> str:
    """The topic on which a member gets its answers."""
    return f"torchrl.replies.{name}"


class MqTransport(InferenceTransport):  # type: ignore[misc]
    """One end: of the server, or of an actor.

    Args:
        queue: A member of the group, used for nothing else.
        serves: Whether this is the server's end.
        timeout: Seconds to wait for the server to be there and to take a request; at
            the server's end, for an actor to take an answer. A server that was shut
            down is not there, also while its queue is open.
    """

    _clients_require_registration = False

    def __init__(
        self, queue: mq.MQ, *, serves: bool = False, timeout: float = 30.0
    ) -> None:
        mq.add_safe_types(TensorDict)
        self._queue = queue
        self._serves = serves
        self._timeout = timeout
        self._pending: deque[mq.Message] = deque()
        # Not from 0: an answer to who had this name before is none of ours.
        self._numbers = itertools.count(secrets.randbits(62))
        # Weak: nobody takes the answer to a request of which the caller let go.
        self._open: WeakValueDictionary[int, Answer] = WeakValueDictionary()
        self._dropped: dict[str, list[int]] = {}  # by actor: not to be answered
        self._look_at = time.monotonic() + _LOOK  # whether the server is there
        self._receives = False  # whether some thread does
        self._changed = threading.Condition()
        self._has_waited: bool | None = None  # since it last drained; None: never
        self._ended = False
        topics = (REQUESTS, SERVING) if serves else (replies(queue.name),)
        for topic in topics:
            queue.subscribe(topic, timeout=timeout)

    # -- the actor's end ----------

    def submit(self, td: TensorDictBase) -> Answer:
        """Send a request.

        Raises:
            mq.MembersTimeout, mq.PublishTimeout: The server is not there, or is behind.
            RuntimeError: This is the server's end, or there are several servers.
        """
        if self._serves:
            raise RuntimeError("this is the server's end; actors have their own queue")
        answer = Answer(self, next(self._numbers), self._server())
        self._open[answer.number] = answer
        request = {"number": answer.number, "input": td.to_tensordict()}
        self._queue.publish(REQUESTS, request, timeout=self._timeout)
        return answer

    def _server(self) -> str:
        """The incarnation of the group's server, which is waited for."""
        self._queue.wait_for_subscribers(SERVING, 1, timeout=self._timeout)
        servers = self._queue.subscribers(REQUESTS)
        if len(servers) > 1:
            raise RuntimeError(f"a group has one inference server, not {servers}")
        members = self._queue.members()
        return next((one.incarnation for one in members if one.name in servers), "")

    def settled(self, answer: Answer, timeout: float | None) -> bool:
        """Whether a request has its answer, or will never have one, in time.

        One thread at a time receives, for all that wait: one that has to wait for that
        would get its answer, or its time-out, only when the other has its own.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while answer.payload is None:
                left = _LOOK if deadline is None else deadline - time.monotonic()
                receives = not self._receives
                if receives and self._take_turn(max(0.0, left)):
                    continue
                if left <= 0.0:
                    break
                if not receives:
                    self._changed.wait(min(left, _LOOK))
            return answer.payload is not None

    def _take_turn(self, timeout: float) -> bool:
        """Receive for all threads, in so many seconds; whether an answer came."""
        gone = self._gone()
        # What a server said last may be there after it has gone.
        left = 0.0 if gone else max(0.0, self._look_at - time.monotonic())
        payload: dict[str, Any] = {"numbers": []}
        self._receives = True
        try:
            self._changed.release()
            payload = self._queue.recv(min(timeout, left)).payload
        except mq.RecvTimeout:
            text = f"{self._queue!r}: the inference server is gone"
            payload = {"numbers": gone, "gone": text}
            return False
        except (mq.MessagesLost, mq.CodecError) as error:
            # Whose answers these were is not known; nobody shall wait for ever.
            payload = {"numbers": [EVERY], "error": str(error)}
        finally:
            try:
                # First: the next to receive would take what is answered for unanswered.
                self._settle(payload["numbers"], payload)
            finally:  # what was received may be no answer; others wait for theirs
                self._receives = False
                self._changed.acquire()
                self._changed.notify_all()
        return True

    def _gone(self) -> list[int]:
        """Requests whose server is gone, as far as it is time to look.

        Another one in its place, which may have its name, knows nothing of them.
        """
        if time.monotonic() < self._look_at:
            return []
        servers = self._queue.subscribers(SERVING)
        members = self._queue.members()
        present = {one.incarnation for one in members if one.name in servers}
        gone = [one.number for one in self._waiting() if one.server not in present]
        if not gone:
            self._look_at = time.monotonic() + _LOOK
        return gone

    def _waiting(self) -> list[Answer]:
        references = self._open.valuerefs()
        return [one for ref in references if (one := ref()) is not None]

    def _settle(self, numbers: list[int], payload: dict[str, Any]) -> None:
        if EVERY in numbers:
            numbers = [one.number for one in self._waiting()]
        for number in numbers:
            answer = self._open.pop(number, None)
            if answer is not None:
                answer.payload = payload

    # -- the server's end ----------

    def wait_for_work(self, timeout: float) -> None:
        """Wait for a request, at most so many seconds.

        Never long: the server's thread looks between two calls whether it was shut
        down, and who shut it down would give up on it and close the queue under it.
        """
        if self._ended:
            self._queue.subscribe(SERVING, timeout=self._timeout)
            self._ended = False
        self._has_waited = True
        if not self._pending:
            self._receive(min(timeout, _LOOK))

    def _receive(self, timeout: float) -> bool:
        """Whether another request came in so many seconds."""
        try:
            message = self._queue.recv(timeout)
        except mq.RecvTimeout:
            return False
        except (mq.MessagesLost, mq.CodecError) as error:
            # One actor's trouble, of which its own end knows nothing; others go on.
            logger.warning("%r: %s", self._queue, error)
            self._dropped.setdefault(error.sender, []).append(EVERY)
            return True
        if _is_request(message):
            self._pending.append(message)
        else:
            text = "%r: dropped what %r published on %r, which is no request"
            logger.warning(text, self._queue, message.sender, message.topic)
        return True

    def drain(
        self, max_items: int
    ) -> tuple[list[TensorDictBase], list[tuple[str, int]]]:
        """Requests that are there, with whom they are from."""
        self._tell_of_dropped()
        while len(self._pending) < max_items and self._receive(0):
            pass
        count = min(max_items, len(self._pending))
        taken = [self._pending.popleft() for _ in range(count)]
        # TorchRL does not tell that it shuts the server down. But it waits before each
        # time that it drains, and then drains without that until there is nothing.
        if self._has_waited is False and not taken:
            self._queue.unsubscribe(SERVING)
            self._ended = True
        if self._has_waited:
            self._has_waited = False
        inputs = [message.payload["input"] for message in taken]
        return inputs, [(one.sender, one.payload["number"]) for one in taken]

    def resolve(self, callback: tuple[str, int], result: TensorDictBase) -> None:
        """Answer a request; an actor that is gone or behind is not waited for."""
        try:
            self._reply(callback, {"result": result.to_tensordict()})
        except (mq.CodecError, mq.MessageTooLarge) as error:
            # Raised, it would be the answer to every request of the batch.
            self.resolve_exception(callback, error)

    def resolve_exception(self, callback: tuple[str, int], exc: BaseException) -> None:
        """Answer a request by an error, which the actor raises as `InferenceFailed`."""
        text = f"{type(exc).__name__}: {exc}"[:_LONGEST]
        # What cannot be sent, as a file's odd name, would end the server.
        sendable = text.encode("utf-8", "backslashreplace").decode()
        self._reply(callback, {"error": sendable})

    def _reply(self, callback: tuple[str, int], answer: dict[str, Any]) -> None:
        sender, number = callback
        dropped = self._dropped.get(sender)
        timeout = self._timeout if dropped is None else 0
        try:
            self._publish(sender, [number], answer, timeout)
        except mq.PublishTimeout as error:
            if dropped is None:
                logger.warning("%s; its answers are dropped until it reads", error)
            self._dropped.setdefault(sender, []).append(number)

    def _tell_of_dropped(self) -> None:
        """Let those who have room again know which answers they will not get."""
        for sender, numbers in list(self._dropped.items()):
            text = "the answer was dropped: this actor had not read those before it"
            if EVERY in numbers:
                text = (
                    "requests did not reach the server, whose log says why: ask again"
                )
            try:
                self._publish(sender, numbers, {"error": text}, 0)
            except mq.PublishTimeout:
                continue
            del self._dropped[sender]

    def _publish(
        self, actor: str, numbers: list[int], answer: dict[str, Any], timeout: float
    ) -> None:
        payload = {"numbers": numbers, **answer}
        self._queue.publish(replies(actor), payload, timeout=timeout)


def _is_request(message: mq.Message) -> bool:
    """Whether it is as `submit` sends it; what is not would end the server's thread."""
    payload = message.payload
    return (
        message.topic == REQUESTS
        and type(payload) is dict
        and type(payload.get("number")) is int
        and isinstance(payload.get("input"), TensorDictBase)
    )


class Answer:
    """The answer to come, as a future has it.

    Args:
        server: The incarnation of the server that is asked.

    Attributes:
        payload: What came, or why nothing will; None before.
    """

    def __init__(self, transport: MqTransport, number: int, server: str) -> None:
        self._transport = transport
        self.number = number
        self.server = server
        self.payload: dict[str, Any] | None = None

    def done(self) -> bool:
        """Whether `result` will return, or raise why it never will, at once."""
        return self._transport.settled(self, 0)

    def result(self, timeout: float | None = None) -> TensorDictBase:
        """The server's output.

        Raises:
            TimeoutError: It has not come in time; ask again later.
            InferenceFailed: The model raised, or request or answer were lost.
            mq.PeerLost: The server is gone.
        """
        if not self._transport.settled(self, timeout) or self.payload is None:
            number = self.number
            raise TimeoutError(f"no answer to request {number} in {timeout:g} s")
        if "gone" in self.payload:
            raise mq.PeerLost(self.payload["gone"])
        if "error" in self.payload:
            raise InferenceFailed(self.payload["error"])
        return self.payload["result"]
