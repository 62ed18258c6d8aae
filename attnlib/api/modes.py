"""Whether tensors have values and sizes are numbers while a function of the package is called."""

import torch


def symbolic() -> bool:
    """Whether a compiler or a dispatch mode is on: tensors may have no values, and sizes may be symbols."""
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0
