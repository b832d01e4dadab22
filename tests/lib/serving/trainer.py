"""A trainer that sends weights to a server over HTTP: from tensors in shared memory, or through a process group."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
import torch
from model.updates import Named, payload
from serving.server import Server, free_port

TIMEOUT_S = 300


class Trainer:
    """Rank 0 of the process groups; the server's ranks follow."""

    def __init__(self, server: Server, ranks: int = 1) -> None:
        self.server, self.ranks = server, ranks
        self._group: Any = None
        self._name = ""

    def post(self, route: str, **body: Any) -> requests.Response:
        return requests.post(f"{self.server.url}/{route}", json=body, timeout=TIMEOUT_S)

    def do(self, route: str, **body: Any) -> str:
        """The message of an answer that must be 200."""
        answer = self.post(route, **body)
        assert answer.status_code == 200, answer.text
        return answer.text

    def send(self, bucket: Named, **fields: Any) -> requests.Response:
        """Send tensors; every rank gets handles of the same shared memory."""
        return self.send_each_rank([bucket] * self.ranks, **fields)

    def send_each_rank(self, buckets: list[Named], **fields: Any) -> requests.Response:
        payloads = [base64.b64encode(payload(bucket)).decode() for bucket in buckets]
        return self.post("update_weights_from_tensor", serialized_named_tensors=payloads, **fields)

    def update(self, buckets: Iterable[Named], **fields: Any) -> str:
        """The message of an update from tensors that must succeed."""
        self.do("begin_weight_update")
        for bucket in buckets:
            answer = self.send(bucket, **fields)
            assert answer.status_code == 200, answer.text
        return self.do("end_weight_update")

    def broadcast(self, buckets: Iterable[Named]) -> str:
        """The message of an update through a process group that must succeed."""
        if self._group is None:
            self._group = self._join()
        self.do("begin_weight_update")
        with ThreadPoolExecutor(1) as pool:
            for bucket in buckets:
                announced = pool.submit(
                    self.do,
                    "update_weights_from_distributed",
                    names=[name for name, _ in bucket],
                    dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                    shapes=[list(tensor.shape) for _, tensor in bucket],
                    group_name=self._name,
                )
                for _, tensor in bucket:
                    sent = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
                    work = torch.distributed.broadcast(sent, src=0, group=self._group, async_op=True)
                    while not work.is_completed():
                        if announced.done():
                            announced.result()  # the server did not receive it, and said why
                        time.sleep(0.001)
                announced.result()
        return self.do("end_weight_update")

    def _join(self) -> Any:
        from sglang.srt.utils import init_custom_process_group

        port = free_port()
        self._name = f"weights-{port}"  # this process knows the groups of earlier trainers
        fields = {"world_size": 1 + self.ranks, "group_name": self._name, "backend": "gloo"}
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(
                self.do,
                "init_weights_update_group",
                master_address="127.0.0.1",
                master_port=port,
                rank_offset=1,
                **fields,
            )
            group = init_custom_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=0, **fields)
            told.result()
        return group
