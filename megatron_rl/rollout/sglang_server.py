"""An SGLang server as a child process: started, watched until it is healthy, and ended with all of its children."""

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import httpx2

from megatron_rl.errors import UserError
from megatron_rl.resharding import engine_side
from megatron_rl.rollout import sglang_child
from megatron_rl.rollout.options import SglangConfig
from megatron_rl.training import cpu

PASSED_ON = (
    "PATH HOME USER LANG LC_ALL TZ TMPDIR LD_LIBRARY_PATH CUDA_HOME CUDA_PATH XDG_CACHE_HOME TRITON_CACHE_DIR "
    "HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE TRANSFORMERS_OFFLINE SSL_CERT_FILE"
).split()
"""Variables that the server gets of ours. The others are torchrun's (RANK, MASTER_ADDR, TORCHELASTIC_...: SGLang would
join the trainer's store and hang) or the trainer's (OMP_NUM_THREADS, PYTORCH_CUDA_ALLOC_CONF, ...)."""

PASSED_ON_PREFIXES = ("NCCL_", "NVIDIA_")
"""What the node's links and containers ask for holds for both."""

PORTS = range(12_000, 22_000)
"""Where a port is sought: the server listens only when it is healthy, and until then every connection that this node
makes could take one of the kernel's own range. SGLang's other ports lie above."""

LOADER = "megatron_rl_loader.load"
"""Takes slices of weights; of us the server can import only this (see `resharding/engine_side`)."""

END_TIMEOUT_S = sglang_child.GRACE_S + 25
"""How long the child may take to end all that it looks after."""

KILL_TIMEOUT_S = 10
"""How long it may take where it gives them no time: a GPU's driver may hold a killed process for seconds."""

LOG_LINES = 15
"""Lines of the log in an error."""


class ServerEnded(UserError):
    """The server's process has ended; with the end of its log."""


class SglangServer:
    """A server for one engine group. `start` it from the main thread, `stop` it in a `finally`; then it can be started
    again.

    Should this process die, even by SIGKILL, the server ends by itself (see `sglang_child.py`).
    """

    def __init__(
        self,
        config: SglangConfig,
        model_dir: Path,
        *,
        number: int,
        tensor_parallel_size: int,
        gpus: Sequence[str],
        dtype: str,
        deterministic: bool = False,
        log_file: Path,
    ) -> None:
        """Describe the server; `start` starts it.

        Args:
            config: the options.
            model_dir: HF directory, of which config.json is read; the weights are made up until they are updated.
            number: which of the node's servers it is, from 0.
            tensor_parallel_size: GPUs of the engine.
            gpus: their entries for CUDA_VISIBLE_DEVICES; none on a CPU.
            dtype: of the weights.
            deterministic: each response depends on its own seed only.
            log_file: its output; only the user may read it, as SGLang logs all its arguments, the keys too.
        """
        self.config, self.model_dir, self.log_file = config, model_dir, log_file
        self.number, self.tensor_parallel_size, self.gpus = number, tensor_parallel_size, tuple(gpus)
        self.dtype, self.deterministic = dtype, deterministic
        self.url = ""
        # In hex: one that began with "-" would be an option on SGLang's command line.
        self.api_key, self.admin_key = secrets.token_hex(32), secrets.token_hex(32)
        self._child: subprocess.Popen[str] | None = None
        self._launched: float | None = None

    def start(self) -> None:
        """Start it and wait until it is healthy.

        Raises:
            UserError: the interpreter is missing, the port is in use, it ends at once, or isn't healthy in time.
        """
        self.launch()
        try:
            self.wait_until_healthy()
        except BaseException:
            self.stop()
            raise

    def launch(self) -> None:
        """Start it and don't wait. Its log goes on where an earlier one's ended.

        Raises:
            UserError: the interpreter is missing, or the port is in use.
        """
        if threading.current_thread() is not threading.main_thread():
            # The kernel's parent-death signal comes when the *thread* that started the child ends.
            raise RuntimeError("an SGLang server must be started from the main thread")
        port = self._port()
        self.url = f"http://{_in_url(self.config.host)}:{port}"
        self._child = self._launch(port)
        self._launched = time.monotonic()

    def stop(self, *, at_once: bool = False) -> None:
        """End it and its children. Again does nothing.

        Args:
            at_once: kill them: it hangs, or is not worth waiting for.
        """
        child, self._child = self._child, None
        if child is None:
            return
        child.send_signal(signal.SIGUSR1 if at_once else signal.SIGTERM)
        child.send_signal(signal.SIGCONT)  # were it stopped, it would not hear that
        try:
            child.wait(KILL_TIMEOUT_S if at_once else END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # it leads the group; the kernel then kills the server too
            child.wait()

    def check(self) -> None:
        """Raise ServerEnded, with the end of its log, if the server has ended."""
        code = self._child.poll() if self._child else 0
        if code is not None:
            raise ServerEnded(f"the SGLang server ended with exit code {code}; {self._end_of_log()}")

    def _port(self) -> int:
        """The port, which nobody uses at this moment."""
        refused = ""
        for port in [self.config.port + self.number] if self.config.port else random.SystemRandom().sample(PORTS, 64):
            with socket.socket(socket.AF_INET6 if ":" in self.config.host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server sets it
                try:
                    probe.bind((self.config.host, port))
                except OSError as error:
                    refused = f"port {port} ({error.strerror})"
                else:
                    return port
        raise UserError(
            f"rollout.sglang: can't listen on {self.config.host} {refused}; set rollout.sglang.port to a free one, or "
            "to null, and rollout.sglang.host to an address of this node"
        )

    def _launch(self, port: int) -> "subprocess.Popen[str]":
        python = str(self.config.python or sys.executable)
        script = [python, "-P", sglang_child.__file__, str(os.getpid())]
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        is_first = self._launched is None  # of this run; an earlier run's log is overwritten
        how = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if is_first else 0)
        handle = os.open(self.log_file, how, 0o600)
        try:
            child = subprocess.Popen(
                [*script, *self._arguments(port)],
                env=server_environment(os.environ, self.gpus, self.tensor_parallel_size, self.config.environment),
                stdin=subprocess.PIPE,
                stdout=handle,
                stderr=handle,
                start_new_session=True,  # a process group of its own
                text=True,
            )
        except OSError as error:
            raise UserError(
                f"rollout.sglang.python: {python} can't be run ({error.strerror}); give the interpreter that has sglang"
            ) from None
        finally:
            os.close(handle)
        keys = json.dumps({"--api-key": self.api_key, "--admin-api-key": self.admin_key}) + "\n"
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.stdin as pipe:  # has it ended, the log says why
            pipe.write(keys)
        return child

    def _arguments(self, port: int) -> list[str]:
        chosen = {
            "--model-path": self.model_dir,
            "--host": self.config.host,
            "--port": port,
            "--tp-size": self.tensor_parallel_size,
            "--mem-fraction-static": self.config.memory_fraction,
            "--dtype": self.dtype,
            "--load-format": "dummy",
        }
        flags = ["--weight-version=-1", "--skip-tokenizer-init"]  # token ids in, token ids out
        flags.append(f"--custom-weight-loader={LOADER}")
        flags += ["--enable-memory-saver"] if self.gpus else cpu.SGLANG_ARGUMENTS
        if self.deterministic:
            flags.append("--enable-deterministic-inference")
        return [str(word) for pair in chosen.items() for word in pair] + flags + list(self.config.extra_args)

    def wait_until_healthy(self) -> None:
        """Wait until it is healthy, at most `start_timeout_s` after it was started.

        Raises:
            ServerEnded: it ended meanwhile.
            UserError: it isn't healthy in time.
        """
        assert self._launched is not None
        deadline = self._launched + self.config.start_timeout_s
        with httpx2.Client(base_url=self.url, trust_env=False, timeout=10) as client:
            while not self._answers(client):
                self.check()
                if time.monotonic() > deadline:
                    raise UserError(
                        f"the SGLang server was not healthy after {self.config.start_timeout_s} s; give it more with "
                        f"rollout.sglang.start_timeout_s, or see why: {self._end_of_log()}"
                    )
                time.sleep(0.2)

    def _answers(self, client: httpx2.Client) -> bool:
        """Whether it is ready. It must know our key: another program could have taken the port meanwhile."""
        try:
            if client.get("/health").status_code != 200:
                return False
            return client.get("/model_info", headers={"Authorization": f"Bearer {self.api_key}"}).status_code == 200
        except httpx2.TransportError:
            return False

    def _end_of_log(self) -> str:
        with open(self.log_file, errors="replace") as file:
            lines = "".join(deque(file, LOG_LINES))
        for key in (self.api_key, self.admin_key):
            lines = lines.replace(key, "***")
        return f"the end of {self.log_file}:\n{lines}"


def server_environment(
    ours: Mapping[str, str], gpus: Sequence[str], ranks: int, added: Mapping[str, str]
) -> dict[str, str]:
    """The server's variables.

    Args:
        ours: of this process.
        gpus: the server's, as entries of CUDA_VISIBLE_DEVICES; none on a CPU.
        ranks: of its tensor parallelism.
        added: what the config adds; it goes before all others.
    """
    passed = {key: value for key, value in ours.items() if key in PASSED_ON or key.startswith(PASSED_ON_PREFIXES)}
    # Without it the memory saver leaves CUDA graphs where they are.
    of_device = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"} if gpus else cpu.sglang_environment(ranks)
    importable = os.pathsep.join(filter(None, (str(Path(engine_side.__file__).parent), added.get("PYTHONPATH"))))
    return {
        **passed,
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        **of_device,
        **added,
        "PYTHONPATH": importable,
    }


def local_gpus(local_ranks: Iterable[int]) -> tuple[str, ...]:
    """The GPUs of these ranks of a node, as entries of CUDA_VISIBLE_DEVICES; none on a CPU."""
    if not cpu.has_cuda():
        return ()
    visible = [entry for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry]
    return tuple(visible[rank] if visible else str(rank) for rank in local_ranks)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
