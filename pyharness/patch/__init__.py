"""Puts the operator into a ggml or llama.cpp tree and takes it out again."""
