"""A proxy in front of an object store that counts requests, and fails as networks and servers do.

::

    with proxy(server) as between:
        between.fail("PUT", slow_down, key="packs/", times=3)
        ...
        assert between.count["LIST"] == 1
"""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

__all__ = [
    "Fault",
    "Handler",
    "Proxy",
    "abridge",
    "cut",
    "deny",
    "ignore_conditions",
    "ignore_ranges",
    "internal_error",
    "late",
    "lengthen",
    "lose_reply",
    "proxy",
    "slow_down",
]


@dataclass(slots=True)
class Rule:
    """The fault of some requests."""

    verb: str
    fault: Fault
    key: str
    left: int | None


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    server: _Server
    upstream: http.client.HTTPConnection | None = None

    def do_GET(self) -> None:
        between = self.server.between
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        listing = self.command == "GET" and "list-type=2" in self.path
        fault = between.meet("LIST" if listing else self.command, self.path)
        try:
            fault(self)
        finally:
            between.done()

    do_PUT = do_HEAD = do_DELETE = do_POST = do_GET  # noqa: N815

    def log_message(self, *args: object) -> None:
        """Say nothing: in a test of a command, stderr is what the command says."""

    def forward(self, *, without: tuple[str, ...] = ()) -> http.client.HTTPResponse:
        """Send the request to the server behind; returns its answer."""
        between = self.server.between
        if self.upstream is None:
            self.upstream = http.client.HTTPConnection(between.host, timeout=600)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in without}
        self.upstream.request(self.command, self.path, self.body or None, headers)
        return self.upstream.getresponse()

    def answer(
        self,
        found: http.client.HTTPResponse,
        *,
        cut: bool = False,
        change: Callable[[bytes], bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send an answer to the client, with another body if ``change`` makes one, and with these ``headers`` besides;
        with ``cut``, send half of the body and close the connection."""
        body = found.read()
        if change is not None:
            body = change(body)
        self.send_response_only(found.status, found.reason)
        for name, value in found.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        length = found.getheader("Content-Length") if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.leave()

    def refuse(self, status: int, code: str) -> None:
        """Answer in the place of the server."""
        self.answer_with(status, f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>by script</Message></Error>')

    def answer_with(self, status: int, text: str) -> None:
        """Answer in the place of the server with such a body."""
        body = text.encode()
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def leave(self) -> None:
        """End the connection."""
        self.close_connection = True

    def finish(self) -> None:
        if self.upstream is not None:
            self.upstream.close()
        super().finish()


Fault = Callable[[Handler], None]


def _pass_on(request: Handler) -> None:
    request.answer(request.forward())


def slow_down(request: Handler) -> None:
    """The server has too much to do."""
    request.refuse(503, "SlowDown")


def internal_error(request: Handler) -> None:
    """The server has failed."""
    request.refuse(500, "InternalError")


def deny(request: Handler) -> None:
    """The credentials do not allow it."""
    request.refuse(403, "AccessDenied")


def late(request: Handler) -> None:
    """The request is done after a while, even if its client has gone."""
    time.sleep(0.3)
    with contextlib.suppress(OSError):
        _pass_on(request)


def lose_reply(request: Handler) -> None:
    """The request is done, and its answer is lost."""
    request.forward().read()
    request.leave()


def cut(request: Handler) -> None:
    """The connection ends in the middle of the answer."""
    request.answer(request.forward(), cut=True)


def abridge(request: Handler) -> None:
    """The server sends fewer bytes than the range that it names."""
    request.answer(request.forward(), change=lambda body: body[: len(body) // 2])


def lengthen(request: Handler) -> None:
    """The server sends more bytes than the range that it names."""
    request.answer(request.forward(), change=lambda body: body + bytes(50))


def ignore_conditions(request: Handler) -> None:
    """The server knows no condition of a put."""
    request.answer(request.forward(without=("if-none-match", "if-match")))


def ignore_ranges(request: Handler) -> None:
    """The server answers a range with the whole object."""
    request.answer(request.forward(without=("range",)))


class Hang:
    """Requests that hang until they are released; their connections end then, without an answer."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._released = threading.Event()

    def __call__(self, request: Handler) -> None:
        self.reached.set()
        self._released.wait(120)
        request.leave()

    def release(self) -> None:
        """End them."""
        self._released.set()


class Postponed:
    """Requests that their client gives up, and that reach the server when they are let on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._let_on = threading.Event()
        self._passed = threading.Event()

    def __call__(self, request: Handler) -> None:
        self.reached.set()
        if self._let_on.wait(120):
            request.forward().read()
            self._passed.set()
        request.leave()

    def let_on(self) -> None:
        """Pass them on, and wait until the server has answered one."""
        self._let_on.set()
        assert self._passed.wait(60)


class Proxy:
    """Counts and disturbs the requests from a client to a server; made by `proxy`."""

    def __init__(self, server: str) -> None:
        self.host = urlsplit(server).netloc
        self.url = ""
        self.count: Counter[str] = Counter()
        """Requests by verb; a GET that lists is a LIST."""
        self.asked: list[tuple[str, str]] = []
        """Verb and path of each."""
        self._rules: list[Rule] = []
        self._hangs: list[Hang] = []
        self._often: tuple[random.Random, float, tuple[Fault, ...]] | None = None
        self._guards = threading.Condition()
        self._under_way = 0
        self.most_under_way = 0
        """Requests at a time."""

    def fail(self, verb: str, fault: Fault, *, key: str = "", times: int | None = 1, first: bool = False) -> None:
        """Disturb the next ``times`` requests of a verb, ``*`` for any, whose path contains ``key``; ``first`` before
        other faults."""
        with self._guards:
            self._rules.insert(0 if first else len(self._rules), Rule(verb, fault, key, times))

    def fail_often(self, share: float, *faults: Fault, seed: int) -> None:
        """Inject one of the faults into a share of all requests."""
        with self._guards:
            self._often = random.Random(seed), share, faults

    def hang(self, verb: str, *, key: str = "", times: int | None = 1) -> Hang:
        """Keep requests waiting until they are released."""
        hang = Hang()
        self._hangs.append(hang)
        self.fail(verb, hang, key=key, times=times)
        return hang

    def heal(self) -> None:
        """Forget all faults."""
        with self._guards:
            self._rules.clear()
            self._often = None
        for hang in self._hangs:
            hang.release()

    def restart_count(self) -> None:
        """Begin to count anew."""
        with self._guards:
            self.count.clear()
            self.asked.clear()

    def settle(self) -> None:
        """Wait until no request is under way; its client may have gone."""
        with self._guards:
            assert self._guards.wait_for(lambda: not self._under_way, 60)

    def done(self) -> None:
        """Count a request as ended."""
        with self._guards:
            self._under_way -= 1
            self._guards.notify_all()

    def meet(self, verb: str, path: str) -> Fault:
        """The fault of a request, which counts as under way from now on."""
        with self._guards:
            self._under_way += 1
            self.most_under_way = max(self.most_under_way, self._under_way)
            self.count[verb] += 1
            self.asked.append((verb, path))
            for rule in self._rules:
                if rule.verb in ("*", verb) and rule.key in path and rule.left != 0:
                    if rule.left is not None:
                        rule.left -= 1
                    return rule.fault
            if self._often is not None:
                chance, share, faults = self._often
                if chance.random() < share:
                    return chance.choice(faults)
        return _pass_on


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    between: Proxy

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has gone is no error."""


@contextmanager
def proxy(server: str) -> Iterator[Proxy]:
    """Stand in front of a server."""
    between = Proxy(server)
    with _Server(("127.0.0.1", 0), Handler) as listening:
        listening.between = between
        between.url = f"http://127.0.0.1:{listening.server_port}"
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield between
        finally:
            between.heal()
            listening.shutdown()
            thread.join()
