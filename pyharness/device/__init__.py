"""ggml and the devices that it finds."""
