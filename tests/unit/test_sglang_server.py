"""Starting and ending a server, with a program in SGLang's place that does what is hard to ask of a real one."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from megatron_rl.errors import UserError
from megatron_rl.rollout.options import SglangConfig
from megatron_rl.rollout.sglang_server import PORTS, SglangServer, server_environment
from tests.engines.processes import left_behind, writing_to

HEALTHY = """
import http.server, subprocess, sys

arguments = dict(zip(sys.argv, sys.argv[1:]))
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.headers["Authorization"] == "Bearer " + arguments["--api-key"]
        self.send_response(200 if known or self.path == "/health" else 401)
        self.end_headers()

print("the key is", arguments["--api-key"], flush=True)
http.server.HTTPServer((arguments["--host"], int(arguments["--port"])), Handler).serve_forever()
"""
"""Answers, and has a child in a session of its own that ignores SIGTERM."""


def server_of(program: str, directory: Path, **options: object) -> SglangServer:
    """A server whose sglang.launch_server is `program`."""
    package = directory / "sglang"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(program)
    environment = {"PYTHONPATH": str(directory)}
    config = SglangConfig.model_validate({"environment": environment, "start_timeout_s": 60, **options})
    log_file = directory / "log"
    return SglangServer(
        config, Path("model"), number=0, tensor_parallel_size=2, gpus=("4", "5"), dtype="float32", log_file=log_file
    )


def test_no_key_looks_like_an_option(tmp_path: Path) -> None:
    servers = [server_of("", tmp_path) for _ in range(500)]
    assert not [key for server in servers for key in (server.api_key, server.admin_key) if key.startswith("-")]
    assert len({server.api_key for server in servers}) == 500


def test_it_starts_and_ends_with_all_descendants(tmp_path: Path) -> None:
    server = server_of(HEALTHY, tmp_path)
    server.start()
    server.check()
    assert int(server.url.rpartition(":")[2]) in PORTS
    assert len(writing_to(server.log_file)) == 3
    begun = time.monotonic()
    server.stop()
    server.stop()
    assert time.monotonic() - begun < 20
    assert writing_to(server.log_file) == []


def test_killing_what_started_it_ends_it(tmp_path: Path) -> None:
    """SIGKILL of a program that has a server: the kernel tells the server's keeper, which ends all."""
    log_file = tmp_path / "log"
    program = f"""
from pathlib import Path
from tests.unit.test_sglang_server import HEALTHY, server_of
server_of(HEALTHY, Path({str(tmp_path)!r})).start()
print("started", flush=True)
input()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "started\n"
        started = writing_to(log_file)
        owner.send_signal(signal.SIGKILL)
    assert len(started) == 3
    assert left_behind(log_file, within_s=20) == []


def test_keys_are_random_and_show_nowhere(tmp_path: Path) -> None:
    server = server_of(HEALTHY, tmp_path)
    assert len({server.api_key, server.admin_key, server_of(HEALTHY, tmp_path).api_key}) == 3
    server.start()
    try:
        for process in writing_to(server.log_file):
            shown = "".join(Path(f"/proc/{process}/{file}").read_text() for file in ("cmdline", "environ"))
            assert server.api_key not in shown
            assert server.admin_key not in shown
        assert server.log_file.stat().st_mode & 0o777 == 0o600
    finally:
        server.stop()


def test_a_server_that_dies_is_told_with_its_log_but_without_its_keys(tmp_path: Path) -> None:
    server = server_of('import sys; print("no such model;", *sys.argv); sys.exit(3)', tmp_path)
    with pytest.raises(UserError, match=r"ended with exit code 3; the end of .*log:\nno such model") as caught:
        server.start()
    assert "--api-key *** --admin-api-key ***" in str(caught.value)
    assert writing_to(server.log_file) == []


def test_a_server_that_dies_later_is_told_too(tmp_path: Path) -> None:
    server = server_of(HEALTHY, tmp_path)
    server.start()
    keeper = server._child.pid  # type: ignore[union-attr]
    the_server = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0]
    os.kill(int(the_server), signal.SIGKILL)
    assert left_behind(server.log_file, within_s=20) == []
    with pytest.raises(UserError, match=r"ended with exit code 137; (.|\n)*the key is \*\*\*"):
        server.check()


def test_a_server_that_is_not_healthy_in_time_is_given_up(tmp_path: Path) -> None:
    server = server_of("import time; time.sleep(600)", tmp_path, start_timeout_s=1)
    with pytest.raises(UserError, match="not healthy after 1 s"):
        server.start()
    assert writing_to(server.log_file) == []


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"can't listen on 127.0.0.1 port {port} \(Address already in use\)"):
            server_of(HEALTHY, tmp_path, port=port).start()


def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"rollout.sglang.python: /no/python can't be run \(No such file or directory\)"
    ):
        server_of(HEALTHY, tmp_path, python="/no/python").start()


def test_it_is_started_from_the_main_thread_only(tmp_path: Path) -> None:
    server = server_of(HEALTHY, tmp_path)
    caught: list[BaseException] = []

    def start() -> None:
        try:
            server.start()
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])


LOADER_FILES = ["__init__.py", "megatron_rl_loader.py"]
"""All of us that a server can import."""


def test_of_our_environment_little_is_passed_on() -> None:
    ours = {
        "PATH": "/bin",
        "NCCL_SOCKET_IFNAME": "eth0",
        "RANK": "3",
        "MASTER_ADDR": "node0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5",
        "WANDB_API_KEY": "secret",
    }
    given = server_environment(ours, ("4", "5"), 2, {"SGLANG_X": "1", "PYTHONPATH": "/theirs"})
    (loader, theirs) = given.pop("PYTHONPATH").split(":")
    assert (sorted(path.name for path in Path(loader).glob("*.py")), theirs) == (LOADER_FILES, "/theirs")
    assert given == {
        "PATH": "/bin",
        "NCCL_SOCKET_IFNAME": "eth0",
        "CUDA_VISIBLE_DEVICES": "4,5",
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1",
        "SGLANG_X": "1",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "0.0.0.0"}, "not a private address"),
        ({"host": "8.8.8.8"}, "not a private address"),
        ({"host": "node7"}, "not an IP address"),
        ({"extra_args": ["--log-level", "info", "--api-key=x"]}, "--api-key is set by the program"),
        ({"extra_args": ["--custom-weight-loader", "a.b"]}, "--custom-weight-loader is set by the program"),
        ({"memory_fraction": 1.0}, "less than 1"),
    ],
)
def test_what_can_not_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SglangConfig.model_validate(options)


@pytest.mark.parametrize("host", ["127.0.0.1", "10.1.2.3", "192.168.0.4", "::1"])
def test_private_addresses_are_taken(host: str) -> None:
    assert SglangConfig(host=host).host == host
