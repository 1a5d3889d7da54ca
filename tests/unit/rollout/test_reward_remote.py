"""The reward that a server computes, against a server of this process."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from anygauge.config.schema import Reward
from anygauge.plugins import load_plugins
from anygauge.rollout.rewards import Scorer, http_client, remote
from anygauge_hooks.errors import RewardError
from anygauge_tests.scoring import group

Answer = tuple[int, str, Mapping[str, str]]


class Server:
    """Answers each request with the next of the answers it was given, and the last for ever."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.answers: list[Answer] = [(200, "1.0", {})]
        self.before: Callable[[dict[str, Any]], Any] = lambda body: None
        """Called with each body before it is answered."""
        self.url = ""

    def answer(self, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        self.before(body)
        self.requests.append((body, headers))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Serve on a free port of the loopback interface."""
    found = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, text, headers = found.answer(body, dict(self.headers))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode("latin-1"))

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Say nothing of a client that did not wait for its answer."""

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Quiet(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        found.url = f"http://127.0.0.1:{http.server_port}/score"
        yield found
        http.shutdown()
        thread.join()


def ask(server: Server, **options: Any) -> Any:
    """Call the reward once, in an event loop of its own."""

    async def call() -> Any:
        async with http_client._client():
            return await remote(
                "4", "5", {"level": 3}, "2+2=", url=server.url, **{"pause_s": 0.001, **options}
            )

    return asyncio.run(call())


def refused(server: Server, **options: Any) -> str:
    """Return why a call failed."""
    with pytest.raises(RewardError) as error:
        ask(server, **options)
    return str(error.value.args[0]).removeprefix(server.url).strip()


@pytest.mark.parametrize(
    ("text", "value"),
    [("1.5", 1.5), ("1", 1), ("true", True), ('{"score": 2, "why": "x"}', {"score": 2, "why": "x"})],
)
def test_a_server_answers(server: Server, text: str, value: Any) -> None:
    server.answers = [(200, text, {})]
    assert ask(server) == value
    ((body, headers),) = server.requests
    assert body == {"response": "4", "label": "5", "metadata": {"level": 3}, "prompt": "2+2="}
    assert headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("packed", [False, True])
def test_an_answer_beyond_any_reward_is_not_kept(
    server: Server, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    """A thousandth of it may come through the network, and 10 GB would end the process."""
    text = " " * 100_000 + "1.5"
    body = gzip.compress(text.encode()).decode("latin-1") if packed else text
    server.answers = [(200, body, {"content-encoding": "gzip"} if packed else {})]
    assert ask(server) == 1.5
    monkeypatch.setattr(http_client, "_LARGEST_ANSWER", 100_000)
    assert refused(server) == "answered more than 100000 bytes."
    assert len(server.requests) == 2, "it is not asked again"


def test_a_secret_comes_from_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_TOKEN", "s3cret")
    ask(server, headers={"Authorization": "Bearer $SCORER_TOKEN"})
    assert server.requests[0][1]["Authorization"] == "Bearer s3cret"
    monkeypatch.delenv("SCORER_TOKEN")
    with pytest.raises(RewardError, match=r"\$SCORER_TOKEN, which reward processes do not have") as caught:
        ask(server, headers={"Authorization": "Bearer ${SCORER_TOKEN}"})
    assert 'reward.pass_env = ["SCORER_TOKEN"]' in str(caught.value)
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
def test_what_may_change_is_asked_again(server: Server, status: int) -> None:
    server.answers = [(status, "busy", {}), (status, "busy", {}), (200, "0.5", {})]
    assert ask(server) == 0.5
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [301, 400, 401, 404, 422])
def test_what_will_not_change_is_asked_once(server: Server, status: int) -> None:
    server.answers = [(status, "wrong field", {})]
    assert refused(server).startswith(f"answered {status} ")
    assert len(server.requests) == 1


def test_attempts_are_bounded(server: Server) -> None:
    server.answers = [(503, "busy", {})]
    why = refused(server, attempts=3)
    assert why == "did not answer in 3 attempts and 25 s; the last: 503 Service Unavailable: 'busy'."
    assert len(server.requests) == 3


@pytest.mark.parametrize("after", ["0.2", pytest.param(None, id="date")])
def test_the_server_says_when(server: Server, after: str | None) -> None:
    later = after or formatdate(time.time() + 1.5, usegmt=True)
    server.answers = [(429, "", {"Retry-After": later}), (200, "1", {})]
    started = time.monotonic()
    assert ask(server) == 1
    assert time.monotonic() - started > 0.15


def test_a_date_that_is_none_is_no_reason_to_wait(server: Server) -> None:
    server.answers = [(503, "", {"Retry-After": "soon"}), (200, "1", {})]
    assert ask(server) == 1


def test_no_pause_goes_past_the_deadline(server: Server) -> None:
    server.answers = [(429, "", {"Retry-After": "3600"})]
    started = time.monotonic()
    assert refused(server, deadline_s=20.0).startswith("did not answer in 1 attempt and 20 s; the last: 429 ")
    assert time.monotonic() - started < 10


def test_a_request_and_the_whole_have_deadlines(server: Server) -> None:
    free = threading.Event()
    server.before = lambda body: free.wait(30)
    try:
        assert refused(server, attempts=2, request_timeout_s=0.1).endswith("the last: no answer in 0.1 s.")
        why = refused(server, request_timeout_s=30.0, deadline_s=0.2)
        assert why == "did not answer in 1 attempt and 0.2 s; the last: no answer in 0.2 s."
    finally:
        free.set()


def test_nobody_there(server: Server) -> None:
    server.url = server.url.replace("127.0.0.1", "127.0.0.2")
    assert "did not answer in 2 attempts and 25 s; the last: ClientConnectorError" in refused(
        server, attempts=2
    )


@pytest.mark.parametrize("url", ["localhost:80/score", "ftp://host/score", "/score"])
def test_what_is_no_address(server: Server, url: str) -> None:
    server.url = url
    assert "is not a valid address" in refused(server)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0.5 points", "which is not JSON"),
        ("", "which is not JSON"),
        ("[1]", "answered [1], neither"),
        ("null", "neither"),
    ],
)
def test_an_answer_that_is_none(server: Server, text: str, why: str) -> None:
    server.answers = [(200, text, {})]
    assert why in refused(server)
    assert len(server.requests) == 1


def test_a_step_asks_for_all_samples_at_once(server: Server) -> None:
    """The server answers nobody before everybody has asked."""
    everybody = threading.Barrier(32)
    server.before = lambda body: everybody.wait(30)
    server.answers = [(200, '{"score": 1, "mark": 0.25}', {})]
    reward = Reward(function="remote", options={"url": server.url}, key="mark", concurrency=32)
    with Scorer(reward, load_plugins(only=[]), max_new_tokens=8, log=None) as scorer:
        (scored,) = scorer.score([group(*"4" * 32)])
    assert [sample.reward for sample in scored.samples] == [0.25] * 32
    assert scored.samples[0].raw_reward == {"score": 1, "mark": 0.25}


def test_a_server_that_is_down_is_found_out_early(server: Server) -> None:
    """It answers no more than eight requests."""
    free = threading.Event()
    server.before = lambda body: len(server.requests) < 8 or free.wait(30)
    server.answers = [(400, "down", {})]
    reward = Reward(function="remote", options={"url": server.url}, concurrency=1, max_failed_ratio=0.1)
    with Scorer(reward, load_plugins(only=[]), max_new_tokens=8, log=None) as scorer:
        try:
            with pytest.raises(
                RewardError, match=r"^[78] of 64 (?s:.*): 'down'.*\n  and 5[67] were not tried"
            ):
                scorer.score([group(*"4" * 64)])
        finally:
            free.set()
        server.answers = [(200, "1", {})]
        (scored,) = scorer.score([group("4")])
    assert scored.samples[0].reward == 1.0


def test_only_the_samples_that_a_server_refuses_fail(server: Server) -> None:
    def look(body: dict[str, Any]) -> None:
        server.answers = [(400, "too long", {})] if body["response"] == "long" else [(200, "1", {})]

    server.before = look
    reward = Reward(function="remote", options={"url": server.url}, concurrency=1, max_failed_ratio=0.5)
    with Scorer(reward, load_plugins(only=[]), max_new_tokens=8, log=None) as scorer:
        (scored,) = scorer.score([group("4", "long", "5")])
    assert [sample.reward for sample in scored.samples] == [1.0, None, 1.0]
    assert "remote failed: " in str(scored.samples[1].error)
    assert "answered 400 Bad Request: 'too long'." in str(scored.samples[1].error)
