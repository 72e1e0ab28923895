"""Without a GPU, Triton kernels run in Triton's interpreter, which has to be asked for before Triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
