"""The harness of FLASH_ATTN_BACK, the gradient of ggml's flash attention."""

__version__ = "0.2.0"
