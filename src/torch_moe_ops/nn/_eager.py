"""The decorator for what torch.compile runs as it stands."""

# torch.compiler.disable without its import of the whole compiler, which takes as long as that of
# torch: this one waits for the first call, as in torch's own optimizers.
from torch._compile import _disable_dynamo as run_eagerly

__all__ = ["run_eagerly"]
