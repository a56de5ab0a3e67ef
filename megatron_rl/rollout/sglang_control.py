"""Tells an SGLang server about its weights, its memory, and whether it generates. One call after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx2

from megatron_rl.errors import UserError

TIMEOUT_S = 600.0
"""Of one call. A bucket of weights is copied in seconds; the drain before a release is bounded by DRAIN_S."""

DRAIN_S = 60
"""How long a flush may wait for what is still running. Nothing should be: generating has ended or was aborted."""


class Unreachable(RuntimeError):
    """The server did not answer."""


class SglangControl:
    """The control plane of one server, which its admin key opens. Replies are checked: SGLang returns its failures."""

    def __init__(self, url: str, admin_key: str) -> None:
        self._http = httpx2.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {admin_key}"},
            # The server closes idle connections after 5 seconds; a call that met that could not be made again.
            limits=httpx2.Limits(max_keepalive_connections=0),
            trust_env=False,
        )

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def pause(self, within_s: float = TIMEOUT_S) -> None:
        """Take no further requests, abort those under way, and return when none is left, within `within_s`."""
        self._post("/pause_generation", {"mode": "abort"}, within_s)

    def abort(self, within_s: float) -> None:
        """End all requests that the server has at this moment; it goes on to take new ones. Doesn't wait for them.

        Raises:
            Unreachable: it did not answer within `within_s`.
        """
        self._post("/abort_request", {"abort_all": True}, within_s)

    def go_on(self) -> None:
        """Take requests again."""
        self._post("/continue_generation", {})

    def flush(self) -> None:
        """Forget all keys and values."""
        self._post(f"/flush_cache?timeout={DRAIN_S}", {})

    def release(self, tags: Sequence[str]) -> None:
        """Give back the device memory of `weights`, `kv_cache`, `cuda_graph`; what was in it is lost."""
        self._post("/release_memory_occupation", {"tags": list(tags)})

    def resume(self, tags: Sequence[str]) -> None:
        """Have it again; what is in it is undefined. Of what wasn't released it would end the server."""
        self._post("/resume_memory_occupation", {"tags": list(tags)})

    def begin_update(self) -> None:
        """Before the first bucket of new weights."""
        self._post("/begin_weight_update", {})

    def end_update(self) -> None:
        """After the last bucket."""
        self._post("/end_weight_update", {})

    def update(self, payloads: Sequence[str], *, load_format: str, version: int | None) -> None:
        """Load a bucket.

        Args:
            payloads: one for each TP rank of the engine; each can be read once.
            load_format: how it is read: `flattened_bucket`, or the name of a custom loader.
            version: of the weights, with the last bucket: it also flushes the cache. None with all others.
        """
        body = {
            "serialized_named_tensors": list(payloads),
            "load_format": load_format,
            "flush_cache": version is not None,
        }
        self._post("/update_weights_from_tensor", body | ({} if version is None else {"weight_version": str(version)}))

    def _post(self, path: str, body: Mapping[str, Any], timeout_s: float = TIMEOUT_S) -> Any:
        name = path.partition("?")[0]
        try:
            reply = self._http.post(path, json=body, timeout=httpx2.Timeout(timeout_s, connect=10))
        except httpx2.TransportError as error:
            raise Unreachable(
                f"SGLang: {self._http.base_url} did not answer {name} ({error!r}); see its log"
            ) from error
        if reply.status_code == 401:
            raise UserError(f"SGLang: {self._http.base_url} refused the admin key; is it this run's server?")
        told = reply.json() if reply.headers.get("content-type", "").startswith("application/json") else None
        if reply.status_code != 200 or (isinstance(told, dict) and told.get("success") is False):
            raise RuntimeError(f"SGLang: {name} failed ({reply.status_code}): {reply.text[:500]}")
        return told
