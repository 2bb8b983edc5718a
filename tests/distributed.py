"""Run a function on several CPU ranks, forked from this process: imports are paid once, and no session is started
again."""

import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessException


def _entry(rank: int, function: Callable[..., Any], world: int, port: int, args: tuple, results: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        GROUP_RANK="0",
        NODE_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="pytest",  # Lightning then takes the ranks as they are and launches nothing
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    try:
        results.put((rank, function(rank, *args), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def run_distributed(function: Callable[..., Any], *args: Any, world: int = 2, timeout: float = 180) -> list[Any]:
    """What ``function(rank, *args)`` returns on each rank; picklable values.

    Raises:
        TimeoutError: If a rank hangs.
        RuntimeError: If one fails, with its traceback.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = mp.get_context("fork").SimpleQueue()
    processes = mp.start_processes(
        _entry, (function, world, port, args, results), nprocs=world, join=False, start_method="fork"
    )
    deadline = time.monotonic() + timeout
    found: dict[int, Any] = {}

    def drain() -> None:  # a rank that has much to say waits until it is read
        while not results.empty():
            rank, value, trace = results.get()
            if trace:
                raise RuntimeError(f"Rank {rank} failed:\n{trace}")
            found[rank] = value

    try:
        while not processes.join(timeout=0.2):
            drain()
            if time.monotonic() > deadline:
                raise TimeoutError(f"Ranks are still running after {timeout} s.")
    except ProcessException as error:
        drain()
        raise RuntimeError("A rank died without a traceback.") from error
    finally:
        for process in processes.processes:
            process.kill()
    drain()
    return [found[rank] for rank in range(world)]
