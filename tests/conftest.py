from __future__ import annotations

import pytest

from pyharness import ggml


@pytest.fixture(scope="session")
def library() -> ggml.Library:
    return ggml.Library.open()


@pytest.fixture(scope="session")
def cpu(library: ggml.Library) -> ggml.Device:
    return library.device("CPU")
