from __future__ import annotations

from pathlib import Path

from pyharness import tree


def test_hooks_of_llama_lie_outside_ggml(tmp_path: Path) -> None:
    for file in ("include/ggml.h", "src/ggml.c"):
        (tmp_path / "ggml" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "ggml" / file).touch()
    assert tree._place(tmp_path, "src/llama-context.cpp") == tmp_path / "src/llama-context.cpp"
    assert tree._place(tmp_path, "src/ggml.c") == tmp_path / "ggml/src/ggml.c"
