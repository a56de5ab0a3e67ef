"""A real SGLang server, from its start to its end."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

from megatron_rl.errors import UserError
from megatron_rl.rollout.sglang_server import SglangServer
from tests.engines.conftest import Model, cpu_config, server_of
from tests.engines.processes import left_behind, writing_to


def test_the_server_serves_the_model(server: SglangServer, model: Model) -> None:
    headers = {"Authorization": f"Bearer {server.api_key}"}
    info = httpx2.get(f"{server.url}/model_info", headers=headers).json()
    assert info["model_path"] == str(model[0])


def test_keys_show_in_no_list_of_processes(server: SglangServer) -> None:
    processes = writing_to(server.log_file)
    assert len(processes) >= 4  # child, server, scheduler, detokenizer
    for process in processes:
        for file in ("cmdline", "environ"):
            shown = Path(f"/proc/{process}/{file}").read_text()
            assert server.api_key not in shown
            assert server.admin_key not in shown
    assert server.log_file.stat().st_mode & 0o077 == 0


def test_the_admin_key_alone_opens_the_control_plane(server: SglangServer) -> None:
    def flush(key: str) -> int:
        return httpx2.post(
            f"{server.url}/flush_cache?timeout=30", headers={"Authorization": f"Bearer {key}"}
        ).status_code

    assert flush("wrong") == 401
    assert flush(server.api_key) == 401
    assert flush(server.admin_key) == 200


def test_a_port_in_use_is_refused_at_once(server: SglangServer, model: Model, tmp_path: Path) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(UserError, match=rf"can't listen on 127.0.0.1 port {port} \(Address already in use\)"):
        server_of(cpu_config(port=port), model[0], tmp_path / "log").start()


def test_a_server_that_dies_at_start_up_is_told_with_its_log(tmp_path: Path) -> None:
    dying = server_of(cpu_config(), tmp_path / "no_such_model", tmp_path / "log")
    with pytest.raises(UserError, match=r"ended with exit code [1-9]\d*; the end of(.|\n)*no_such_model"):
        dying.start()
    assert writing_to(tmp_path / "log") == []


def test_a_server_that_is_not_healthy_in_time_is_given_up(model: Model, tmp_path: Path) -> None:
    slow = server_of(cpu_config(start_timeout_s=2), model[0], tmp_path / "log")
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"not healthy after 2 s; give it more with rollout.sglang.start_timeout_s"):
        slow.start()
    assert time.monotonic() - begun < 20
    assert writing_to(tmp_path / "log") == []


@pytest.mark.parametrize(
    ("how", "killed_by", "code"),
    [("return", None, 0), ("raise", None, 1), ("wait", signal.SIGTERM, -15), ("wait", signal.SIGKILL, -9)],
    ids=["return", "raise", "SIGTERM", "SIGKILL"],
)
def test_nothing_is_left_behind(
    how: str, killed_by: signal.Signals | None, code: int, model: Model, tmp_path: Path
) -> None:
    log_file = tmp_path / "log"
    arguments = [how, cpu_config().model_dump_json(), str(model[0]), str(log_file)]
    command = [sys.executable, "-m", "tests.engines.owner", *arguments]
    started: list[int] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "started\n"
        if killed_by:
            started = writing_to(log_file)
            owner.send_signal(killed_by)
    assert owner.returncode == code
    assert len(started) >= 5 or not killed_by  # child, server, two schedulers, detokenizer
    assert left_behind(log_file, within_s=20) == []
