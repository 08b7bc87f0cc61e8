"""Process groups of the backend "hccl" on the stand-in for CANN, for tests.ranks:

    ranks = Ranks(8, start_hccl)

Importing this module loads the stand-in, so a worker has to import it before torch.
"""

from __future__ import annotations

import datetime
from typing import Any

from tests.npu import plugin

# Of the process group. The stand-in's own limit, CANN_STANDIN_HCCL_TIMEOUT, ends the process.
GROUP_TIMEOUT = 60.0


def start_hccl(rank: int, world_size: int, store: str) -> None:
    """Joins the default process group on a device of this process."""
    assert plugin.standin is not None
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.npu.set_device(rank % torch.npu.device_count())
    dist.init_process_group(
        "hccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=GROUP_TIMEOUT),
    )


def comm_name(group: Any = None) -> str:
    """What the fused operators know a group by. Every rank of the group has to ask at once."""
    import torch
    import torch.distributed as dist

    backend = (group or dist.group.WORLD)._get_backend(torch.device("npu"))
    return backend.get_hccl_comm_name(dist.get_rank(), init_comm=True)
