"""fastattn for torch: tensors of the CPU, with gradients, under torch.compile and torch.export."""

from ..optional import missing

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise missing("fastattn.torch", "torch", "'fastattn[torch]'") from error

from ..errors import ArgumentError, ArgumentTypeError
from .api import attention
from .patching import patch
from .sdpa import scaled_dot_product_attention

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "attention",
    "patch",
    "scaled_dot_product_attention",
]
