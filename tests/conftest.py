"""The library and the device that the tests run on.

`--device CUDA0 --libs DIR` runs the tests that take `op` there, once for each kernel path; the others always run on
the CPU. A path that refuses a node is skipped with its reason; that no path takes it is a failure.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from attention import Operator
from receipt_world import World, make

from pyharness.base.cuda import KERNEL_PATH, PATHS
from pyharness.check import gpucheck
from pyharness.device import ggml


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="CPU", help="device of the operator's tests (default: CPU)")
    parser.addoption("--libs", type=Path, help="directory of libraries built elsewhere (also $PYHARNESS_LIBS)")
    parser.addoption("--vocabulary", type=Path, help="tokenizer of the trained models, where there is no upstream tree")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "large(gib): needs a GPU with so much free memory")
    gpucheck.heed_interrupts()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    large = metafunc.definition.get_closest_marker("large")  # tries the paths on sources that it fills once
    if "path" in metafunc.fixturenames and metafunc.config.getoption("--device").startswith("CUDA") and not large:
        metafunc.parametrize("path", PATHS)


@pytest.fixture(scope="session")
def library(request: pytest.FixtureRequest) -> ggml.Library:
    cpu = request.config.getoption("--device").upper() == "CPU"
    return ggml.Library.open(request.config.getoption("--libs"), "cpu" if cpu else "cuda")


@pytest.fixture(scope="session")
def cpu(library: ggml.Library) -> ggml.Device:
    return library.device("CPU")


@pytest.fixture(scope="session")
def device(library: ggml.Library, request: pytest.FixtureRequest) -> ggml.Device:
    return library.device(request.config.getoption("--device"))


@pytest.fixture
def path() -> str:
    """The kernel path that a CUDA device is held to, "" where there is no choice."""
    return ""


@pytest.fixture
def op(library: ggml.Library, device: ggml.Device, path: str, monkeypatch: pytest.MonkeyPatch) -> Operator:
    if path:
        monkeypatch.setenv(KERNEL_PATH, path)
    return Operator(library, device, path)


@pytest.fixture(autouse=True)
def _enough_memory(request: pytest.FixtureRequest) -> None:
    if marker := request.node.get_closest_marker("large"):
        name = request.config.getoption("--device")
        if name.upper() == "CPU":
            pytest.skip("a size for GPUs")
        free = request.getfixturevalue("library").device(name).memory_free / 2**30
        if free < marker.args[0]:
            pytest.skip(f"{name} has {free:.0f} GiB free, {marker.args[0]} are needed")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a small operator and its hooks, beside a small tree."""
    import readers  # needs tree-sitter, which a GPU machine may lack

    files = readers.OPERATOR | readers.EDITS | {"upstream.toml": readers.PINS}
    readers.lay(tmp_path / "repository/ggml", files)
    readers.lay(tmp_path / "tree", readers.UPSTREAM)
    return tmp_path / "repository"


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A checkout with receipts, for tests to copy."""
    return make(tmp_path_factory.mktemp("receipts") / "checkout")


@pytest.fixture
def world(original: World, tmp_path: Path) -> World:
    return original.copy(tmp_path / "checkout")
