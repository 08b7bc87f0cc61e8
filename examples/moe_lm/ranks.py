"""The processes of a run: one, or those that torchrun started; what they do together.

The experts of every block are spread over all ranks, and each batch is: rank r works on the r-th
part of its sequences. Everything else is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_moe_ops.nn import expert_parameters

from .options import Config, UserError

TIMEOUT = datetime.timedelta(minutes=10)
"""What a rank waits for another that hangs. One that ends is noticed at once."""


class Ranks:
    """This process and the others. Without others nothing here does anything."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()

    @property
    def is_first(self) -> bool:
        """Whether this rank prints, draws and writes."""
        return self.rank == 0

    def check(self, config: Config) -> None:
        """Raises UserError if experts or batch cannot be shared out evenly."""
        for option, number in (("--experts", config.experts), ("--batch", config.batch)):
            if number % self.size:
                raise UserError(
                    f"{option} must be a multiple of the number of ranks ({self.size}), "
                    f"got {number}"
                )

    def part(self, batch: Tensor) -> Tensor:
        """The sequences of this rank; none, where there are fewer than ranks."""
        return batch.tensor_split(self.size)[self.rank] if self.size > 1 else batch

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over the ranks, on the CPU."""
        numbers = numbers.detach().cpu()
        if self.size > 1:
            dist.all_reduce(numbers, group=self.group)
        return numbers

    def any(self, wish: bool) -> bool:
        """Whether a rank wishes it: all get the same answer."""
        return bool(self.total(torch.tensor(int(wish)))) if self.size > 1 else wish

    def average_gradients(self, model: nn.Module) -> None:
        """Replaces the gradients of what all ranks have by their mean over the ranks."""
        if self.size == 1:
            return
        experts = set(expert_parameters(model).values())
        shared = (p for p in model.parameters() if p not in experts)
        grads = [p.grad for p in shared if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=self.group)
        flat /= self.size
        for grad, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(mean.view_as(grad))

    def together(self, action: Callable[[], None], *, first_only: bool = False) -> None:
        """Runs an action on every rank, or on the first while the others wait.

        Raises:
            UserError: one of them raised it. It is raised on all, so that nobody waits in vain.
        """
        error: str | None = None
        try:
            if self.is_first or not first_only:
                action()
        except UserError as caught:
            error = str(caught)
        errors: list[str | None] = [error]
        if self.size > 1:
            errors = [None] * self.size
            dist.all_gather_object(errors, error, group=self.group)
        for message in errors:
            if message is not None:
                raise UserError(message)

    @contextlib.contextmanager
    def own_random_numbers(self) -> Iterator[None]:
        """Random numbers that differ from rank to rank, as dropout needs; then the common ones."""
        if self.size == 1:
            yield
            return
        # The common generator, which a checkpoint keeps, gives the seed.
        seed = int(torch.randint(2**62, ()))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + self.rank)
            yield


@contextlib.contextmanager
def started(device: str) -> Iterator[Ranks]:
    """Joins the ranks that torchrun has started, if it has."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    # Rows travel by HCCL between NPUs; counts and flags are on the host, and stay there.
    npu = device.split(":")[0] == "npu"
    try:
        if npu:
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,npu:hccl" if npu else "gloo", timeout=TIMEOUT)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"--device {device} cannot be used by several ranks: {reason}") from None
    yield Ranks(dist.group.WORLD)
    # Only after success: after an error the others may not come.
    dist.destroy_process_group()
