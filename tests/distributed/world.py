"""Processes with gloo groups of one to all of them, started once, that run functions on every rank of a group."""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

_SERVER = multiprocessing.get_context("forkserver")
PRELOADED = ["skyformer.distributed", "skyformer.model", "torch.nn.parallel", "tests.distributed.warm"]
ANSWER_SECONDS = 100


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class World:
    """Processes that wait for functions to run; `run` calls one on each rank of the group of the first `size` ranks."""

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        _SERVER.set_forkserver_preload(PRELOADED)
        self.connections: list[Connection] = []
        self.processes = []
        port = free_port()
        for rank in range(size):
            ours, theirs = _SERVER.Pipe()
            process = _SERVER.Process(target=_serve, args=(rank, size, port, timeout, theirs), daemon=True)
            process.start()
            self.connections.append(ours)
            self.processes.append(process)

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of `function(group, *arguments)`, or the errors that it raised, of all ranks."""
        for connection in self.connections[:size]:
            connection.send((size, function, arguments))
        return [self._answer(connection) for connection in self.connections[:size]]

    def check(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """As `run`, but errors fail the test."""
        answers = self.run(size, function, *arguments)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    @staticmethod
    def _answer(connection: Connection) -> Any:
        assert connection.poll(ANSWER_SECONDS), "a rank gave no answer"
        try:
            return connection.recv()
        except EOFError:
            return None

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(5)
            if process.exitcode is None:
                process.kill()


def _serve(rank: int, size: int, port: int, timeout: float, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    limit = timedelta(seconds=timeout)
    groups = {count: dist.new_group(list(range(count)), timeout=limit) for count in range(1, size + 1)}
    while True:
        try:
            count, function, arguments = connection.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            answer = function(groups[count], *arguments)
        except Exception as error:
            error.add_note(traceback.format_exc())
            answer = error
        connection.send(answer)
