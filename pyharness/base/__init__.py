"""Errors, digests, builds and the commands that messages name: what the other packages stand on."""
