"""Training a small model in llama.cpp."""
