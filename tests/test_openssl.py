"""Forks wait until no thread of the library's is in OpenSSL."""

from __future__ import annotations

import ctypes
import os
import ssl
import threading

import pytest

from mq import openssl
from mq.testing.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
PATIENCE = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, no fork goes on in spite of it all."""
    monkeypatch.setattr(openssl, "PATIENCE_SECONDS", PATIENCE)


def _fork() -> int:
    """Fork a child that uses OpenSSL; how it ended."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with openssl.undivided():
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class _Forking(threading.Thread):
    """Forks once."""

    status: int | None = None

    def run(self) -> None:
        self.status = _fork()


def test_a_fork_waits_for_what_another_thread_does_with_openssl() -> None:
    """The child would wait for a lock that nobody has there."""
    forking = _Forking()
    with openssl.undivided():
        forking.start()
        forking.join(0.2)
        assert forking.is_alive()
    forking.join(PATIENCE)
    assert forking.status == 0


_libc = ctypes.CDLL(None)
_libc.pthread_setspecific.argtypes = [ctypes.c_uint, ctypes.c_void_p]


def test_a_fork_waits_until_threads_that_used_openssl_have_ended() -> None:
    """Which they do after Python has done with them, with calls of OpenSSL's."""
    semaphore, key = ctypes.create_string_buffer(64), ctypes.c_uint()
    assert _libc.sem_init(semaphore, 0, 0) == 0
    # What is called at the end of each thread that has a value for the key.
    assert _libc.pthread_key_create(ctypes.byref(key), _libc.sem_wait) == 0

    def use() -> None:
        with openssl.undivided():
            _libc.pthread_setspecific(key, semaphore)

    thread, forking = threading.Thread(target=use), _Forking()
    thread.start()
    wait_until(lambda: not thread.is_alive(), "Python to be done with the thread")
    forking.start()
    forking.join(0.2)
    assert forking.is_alive()
    assert _libc.sem_post(semaphore) == 0
    forking.join(PATIENCE)
    assert forking.status == 0
    thread.join()
    assert _libc.pthread_key_delete(key) == 0


def test_a_fork_that_has_waited_in_vain_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the child has a lock that it can take."""
    monkeypatch.setattr(openssl, "PATIENCE_SECONDS", 0.0)
    forking = _Forking()
    with openssl.undivided():
        forking.start()
        forking.join(PATIENCE)
        assert forking.status == 0
    assert not openssl.undivided().locked()


def test_threads_that_are_gone_are_forgotten() -> None:
    """There is one for each `connect`."""
    for _ in range(5):
        thread = threading.Thread(target=openssl.undivided)
        thread.start()
        thread.join()
        wait_until(lambda: not openssl._forget_ended(), "its end")
    assert len(openssl._users) <= 2


def test_a_thread_may_have_the_number_of_one_that_is_gone() -> None:
    """A fork would wait for its end, in vain for as long as it lives."""
    number = threading.get_native_id()
    gone = threading.Thread(target=openssl.undivided)
    gone.start()
    gone.join()
    wait_until(lambda: not openssl._forget_ended(), "its end")
    openssl._users[number] = gone
    with openssl.undivided():
        assert openssl._users[number] is threading.current_thread()
    assert not openssl._forget_ended()
