"""A grader that is a server: retries, refusals, silence. The server is real, and of this machine."""

import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megatron_rl.config import RewardConfig
from megatron_rl.rewards.grade import Grade
from megatron_rl.rewards.pool import GraderPool
from megatron_rl.types import Prompt
from tests.unit.test_grader_pool import until_done

PROMPT = Prompt(index=1, text="2+2=", ids=(1,), answer="4", metadata={"level": 3})


class Handler(BaseHTTPRequestHandler):
    """Does what the response that is to be graded says."""

    server: "Server"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = body["response"]
        with self.server.lock:
            self.server.bodies.append(body)
            asked = sum(one["response"] == said for one in self.server.bodies)
        if said == "silence":
            self.server.closing.wait(30)
            return
        if said == "hang up" and asked <= 2:
            return
        if said.startswith("fail") and asked <= 2:
            self.answer(int(said.split()[1]), "busy")
        elif said == "refuse":
            self.answer(422, "no such\nproblem")
        elif said == "always 503":
            self.answer(503, "busy")
        elif said == "no json":
            self.answer(200, "right!")
        elif said == "object":
            self.answer(200, '{"score": 0.25, "judge": "b"}')
        else:
            self.answer(200, str(float(said == body["answer"])))

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.lock, self.closing = threading.Lock(), threading.Event()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.closing.set()
        server.shutdown()


def grades_of(server: Server, *texts: str, timeout_s: int = 5) -> list[Grade]:
    config = RewardConfig(
        grader=f"http://127.0.0.1:{server.server_port}/grade", timeout_s=timeout_s, workers=1, learned=True
    )
    with GraderPool(config) as pool:
        pool.submit("group", PROMPT, [(text, text != "5") for text in texts])
        (grades,) = until_done(pool, 1).values()
    return grades


def test_a_server_is_asked_about_each_answer(server: Server) -> None:
    assert grades_of(server, "4", "5", "object") == [
        Grade(score=1.0),
        Grade(score=0.0),
        Grade(score=0.25, details={"judge": "b"}),
    ]
    row = {"prompt": "2+2=", "answer": "4", "metadata": {"level": 3}}
    asked = sorted(server.bodies, key=lambda body: body["response"])
    assert asked == [
        {**row, "response": "4", "finished": True},
        {**row, "response": "5", "finished": False},
        {**row, "response": "object", "finished": True},
    ]


@pytest.mark.parametrize("failure", ["fail 500", "fail 503", "fail 429", "hang up"])
def test_a_failure_is_tried_again(server: Server, failure: str) -> None:
    assert [grade.error for grade in grades_of(server, failure)] == [""]
    assert len(server.bodies) == 3


def test_a_refusal_is_not_tried_again_and_no_answer_is_not_wrong(server: Server) -> None:
    started = time.monotonic()
    refused, silent, busy, no_json, right = grades_of(
        server, "refuse", "silence", "always 503", "no json", "4", timeout_s=2
    )
    assert refused.error == "RuntimeError('its server refused the request (422: no such problem)')"
    assert silent.error == "RuntimeError('its server gave no answer within 1.62 s')"
    assert re.fullmatch(r".*its server gave no answer within 1.62 s \(try \d: 503: busy\)'\)", busy.error)
    assert no_json.error.startswith("JSONDecodeError(")
    assert right == Grade(score=1.0)
    assert sum(body["response"] == "refuse" for body in server.bodies) == 1
    assert time.monotonic() - started < 5


def test_nobody_listens() -> None:
    with Server() as gone:
        pass
    (grade,) = grades_of(gone, "4", timeout_s=1)
    assert re.search(r"its server gave no answer within 0.81 s \(try \d: ConnectError\(", grade.error)
