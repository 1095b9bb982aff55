"""Tensors and graphs without memory, for what autodiff builds."""

from __future__ import annotations

from typing import Any

from pyharness.case import cases
from pyharness.device import ggml


class Graph:
    def __init__(self, library: ggml.Library) -> None:
        self.library, self.c, self.ffi = library, library.c, library.ffi
        self.ctx = self.c.ggml_init({"mem_size": 64 << 20, "mem_buffer": self.ffi.NULL, "no_alloc": True})

    def tensor(self, *ne: int, kind: str = "f32", param: bool = False) -> Any:
        made = self.c.ggml_new_tensor_4d(self.ctx, int(cases.TYPES[kind]), *ne, *[1] * (4 - len(ne)))
        if param:
            self.c.ggml_set_param(made)
        return made

    def attend(self, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        return self.c.ggml_flash_attn_ext(self.ctx, q, k, v, mask or self.ffi.NULL, 0.125, 0.0, 0.0)

    def backward(self, out: Any, size: int = 256) -> Any:
        loss = self.c.ggml_sum(self.ctx, out)
        self.c.ggml_set_loss(loss)
        graph = self.c.ggml_new_graph_custom(self.ctx, size, True)
        self.c.ggml_build_forward_expand(graph, loss)
        self.c.ggml_build_backward_expand(self.ctx, graph, self.ffi.NULL)
        return graph

    def nodes(self, graph: Any) -> list[Any]:
        return [self.c.ggml_graph_node(graph, i) for i in range(self.c.ggml_graph_n_nodes(graph))]
