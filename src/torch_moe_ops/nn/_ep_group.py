"""The process group of an expert-parallel module, held in a way that the module can be copied."""

from __future__ import annotations

from typing import NoReturn

import torch.distributed as dist


class EPGroup:
    """A process group whose ranks hold equal parts of the experts, in the order of the ranks.

    A process group can be neither copied nor pickled. A deep copy of the module shares it; pickling
    raises with the way out, since the group would not exist where the pickle is read.
    """

    def __init__(self, owner: str, group: object, num_experts: int) -> None:
        """Raises TypeError or ValueError, starting with ``owner``, if the group does not fit."""
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"{owner}: ep_group must be None or a ProcessGroup that this rank belongs to, "
                f"got {group!r}"
            )
        if num_experts % group.size():
            raise ValueError(
                f"{owner}: num_experts must be a multiple of the number of ranks in ep_group "
                f"({group.size()}), got {num_experts}"
            )
        self.group = group
        self.num_local_experts = num_experts // group.size()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.group.size()

    @property
    def local_experts(self) -> range:
        """The global ids of this rank's experts."""
        first = self.group.rank() * self.num_local_experts
        return range(first, first + self.num_local_experts)

    def __deepcopy__(self, memo: object) -> EPGroup:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an expert-parallel layer cannot be pickled, as its process group exists in this "
            "process alone; save its state_dict() instead (torch_moe_ops.nn.gather_expert_state "
            "makes it whole)"
        )
