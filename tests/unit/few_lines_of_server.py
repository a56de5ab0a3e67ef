"""A few lines of server in SGLang's place that die and hang as they are told, and an engine that has one."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen2ForCausalLM

from megatron_rl.resharding.names import hf_shapes
from megatron_rl.rollout.engine import EngineLost, Request, Sampling, generate
from megatron_rl.rollout.groups import EngineGroup
from megatron_rl.rollout.sglang import SglangEngine
from megatron_rl.training.hf_config import read_model_spec
from tests.engines.processes import left_behind, writing_to
from tests.tiny import SHAPE, run_config

Model = tuple[Path, Qwen2ForCausalLM]

SERVER = """
import http.server, json, os, sys, threading, time

arguments = dict(zip(sys.argv, sys.argv[1:]))
here = os.environ["HERE"]
def told(word):
    return os.path.exists(os.path.join(here, word))
if told("fail"):
    sys.exit(3)
if told("slow"):
    time.sleep(1.5)
if told("never"):
    time.sleep(600)
let_go = threading.Event()

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def say(self, what, code=200):
        text = json.dumps(what).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def do_GET(self):
        self.say({}, 503 if told("ill") else 200)
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        name = self.path.split("?")[0]
        print("asked", name, flush=True)
        if told("die at " + name[1:]):
            os.remove(os.path.join(here, "die at " + name[1:]))
            os._exit(4)
        if name != "/generate":
            if name == "/abort_request" and not told("deaf"):
                let_go.set()
            self.say({"success": True})
            return
        ids, reason = [9], {"type": "stop"}
        if body["input_ids"][0] == 5:
            let_go.wait()
            ids, reason = [7, 8], {"type": "abort"}
        self.say({"output_ids": ids, "meta_info": {"finish_reason": reason, "weight_version": "1",
            "output_token_logprobs": [[-1.0, token, None] for token in ids]}})

print("serves", flush=True)
http.server.ThreadingHTTPServer((arguments["--host"], int(arguments["--port"])), Handler).serve_forever()
"""
"""What prompts that begin with 5 ask for comes when it is aborted, unless the server is deaf."""

SHORT, LONG = (Request(prompt_ids=(token, 6), seeds=(0,), max_tokens=9) for token in (3, 5))


@pytest.fixture
def engine(untied_model: Model, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SglangEngine]:
    """Awake, with weights; it may be started again twice. Options come as a parameter."""
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(SERVER)
    environment = {"PYTHONPATH": str(tmp_path), "HERE": str(tmp_path)}
    options = dict(getattr(request, "param", {}))
    server = {"environment": environment, "start_timeout_s": 30, "hung_after_s": 1, **options.pop("sglang", {})}
    config = run_config(
        run_dir=tmp_path / "run",
        model={"path": untied_model[0]},
        trainer={"dtype": "float32"},
        rollout={"engine": "sglang", "engine_restarts": 2, **options, "sglang": server},
    )
    group = EngineGroup(rank=0, size=1, world=1)
    spec = read_model_spec(untied_model[0])
    made = SglangEngine(config, spec, group, eos_token_ids=frozenset({2}), vocabulary=SHAPE.vocab)
    made.start()
    made.sleep()
    wake(made)
    assert made.losses == 0
    yield made
    made.stop()
    assert left_behind(made.directory / "server.log", within_s=1) == []


def wake(engine: SglangEngine) -> None:
    engine.wake()
    engine.update_weights(((name, torch.zeros(size)) for name, size in hf_shapes(SHAPE).items()), version=1)
    engine.resume()


def answers(engine: SglangEngine) -> bool:
    ((_, _, response),) = generate(engine, [SHORT], Sampling())
    return engine.health() and response.ids == (9,)


def kill(engine: SglangEngine) -> None:
    """All of the server's processes at once."""
    for process in writing_to(engine.directory / "server.log"):
        os.kill(process, signal.SIGKILL)


def asked(engine: SglangEngine) -> list[str]:
    """What the last server was asked, generating apart."""
    lines = (engine.directory / "server.log").read_text().rpartition("serves\n")[2].splitlines()
    return [line.removeprefix("asked /") for line in lines if line != "asked /generate"]


def starts(engine: SglangEngine) -> int:
    return (engine.directory / "server.log").read_text().count("serves")


def lost(engine: SglangEngine) -> str:
    deadline = time.monotonic() + 10
    with pytest.raises(EngineLost) as caught:  # noqa: PT012
        while time.monotonic() < deadline:
            engine.poll(0.2)
    return str(caught.value)
