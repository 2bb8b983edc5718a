"""The connection to a server of vLLM."""

import base64
import http.client
import json
import socket
import threading
import urllib.parse
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_PIECE = 24 << 20
"""Bytes of a weight in one message."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float | None) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class Connection:
    """Speaks to a server of vLLM; may be used from several threads, each of which has a connection of its own.

    Args:
        address: URL, or path of a socket.
        key: Sent as a bearer token.
        timeout: Seconds to wait for an answer.
    """

    def __init__(self, address: str, key: str | None = None, timeout: float | None = None) -> None:
        self.address, self.timeout = address, timeout
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._local = threading.local()

    def _open(self) -> http.client.HTTPConnection:
        if "://" not in self.address:
            return _UnixConnection(self.address, self.timeout)
        parts = urllib.parse.urlsplit(self.address)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname or "", parts.port, timeout=self.timeout)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """What the server answers, decoded.

        Raises:
            ConnectionError: If it cannot be reached.
            RuntimeError: If it refuses; the message has its reason.
        """
        payload = None if body is None else json.dumps(body).encode()
        for is_last in (False, True):  # a server may have closed a connection that was idle
            fresh = getattr(self._local, "connection", None) is None
            if fresh:
                self._local.connection = self._open()
            try:
                self._local.connection.request(method, path, payload, self.headers)
                answer = self._local.connection.getresponse()
                text = answer.read()
                break
            except (OSError, http.client.HTTPException) as error:
                self._local.connection = None
                if fresh or is_last or isinstance(error, TimeoutError):
                    raise ConnectionError(f"vLLM's server at {self.address} does not answer: {error!r}.") from error
        if answer.status != 200:
            raise RuntimeError(
                f"vLLM's server answered {method} {path} by {answer.status}: {text[:500].decode(errors='replace')}"
            )
        return json.loads(text) if text else None

    def answers(self) -> bool:
        """Whether it is there and well."""
        try:
            self.call("GET", "/health")
        except (ConnectionError, RuntimeError):
            return False
        return True

    def rpc(self, method: str, *args: str | float) -> list[Any]:
        """What a method of the :class:`~rlalign.rollouts.sampling.vllm.worker.PolicyWorker` returns in each worker."""
        answer = self.call("POST", "/collective_rpc", {"method": method, "args": list(args)})
        return (answer or {}).get("results") or []

    def send(self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
        """Have the workers take over these weights, in this type; nothing is written to a disk."""
        self.rpc("rlalign_begin")
        for name, weight in weights:
            whole = weight.to("cpu", dtype).contiguous()
            data = whole.flatten().view(torch.uint8).numpy()
            label = (str(dtype).removeprefix("torch."), ",".join(map(str, whole.shape)))
            for start in range(0, max(len(data), 1), _PIECE):
                piece = base64.b64encode(data[start : start + _PIECE].tobytes()).decode()
                self.rpc("rlalign_receive", name, *label, piece, "1" if start + _PIECE >= len(data) else "0")
        self.rpc("rlalign_finish")
