"""The functions of flash_attn 4 (flash_attn.cute), for NumPy arrays and CPU tensors of torch."""

from .interface import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
