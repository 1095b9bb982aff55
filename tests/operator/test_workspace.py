"""The tensor-core paths plan within the workspace's limit: asked on the host, without a device."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from pyharness.base import errors
from pyharness.case.cases import Case
from pyharness.check import shapes
from pyharness.patch import tree
from pyharness.perf import ptxas

MIB = 1 << 20

pytestmark = pytest.mark.xdist_group("workspace")


class Node(NamedTuple):
    """What a plan depends on; arch as in __CUDA_ARCH__."""

    dk: int
    dv: int
    n: int
    m: int
    h: int
    hkv: int
    s: int = 1
    mask_heads: int = 1  # 0: no mask
    softcap: int = 0
    sinks: int = 0
    grads: int = 7  # dQ, dK, dV as bits
    kv_first: int = 0
    kv_count: int = 0
    precise: int = 0
    arch: int = 900
    multiprocessors: int = 132
    limit: int = 256 * MIB


class Plan(NamedTuple):
    """Bytes of each path's workspace and of its smallest, below which hopper refuses a limit; 0: not for this node.

    ranges: of keys whose dS hopper keeps, 0 if it keeps none; splits, splits_dq: shares of the keys among blocks of
    queries.
    """

    mma: int
    mma_least: int
    hopper: int
    hopper_least: int
    ranges: int
    splits: int
    splits_dq: int


TARGET = Node(256, 256, 2048, 75520, 24, 4, kv_count=75520)
BARS = [
    TARGET,
    TARGET._replace(kv_first=73472, kv_count=2048),
    Node(128, 128, 8192, 8192, 32, 8, kv_count=8192),
    Node(64, 64, 4096, 4096, 32, 8, kv_count=4096),
    Node(256, 256, 4096, 4096, 16, 8, kv_count=4096),
    Node(128, 128, 64, 8192, 8, 2, kv_count=8192),
]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Iterable[Node]], list[Plan]]:
    try:
        nvcc = ptxas.find_nvcc()
    except errors.Environment as missing:
        pytest.skip(str(missing))
    src = tree.ggml_root(tree.ensure()) / "src"
    program = tmp_path_factory.mktemp("workspace") / "workspace"
    include = [f"-I{folder}" for folder in (src, src / "ggml-cuda", src.parent / "include")]
    # for compute capability 7.5 the kernels are empty; with -O1 nothing of ggml that is not called has to be linked
    flags = ["-O1", "-std=c++17", "-w", "-extended-lambda", "-arch=sm_75", *include]
    subprocess.run([nvcc, *flags, Path(__file__).with_name("workspace.cu"), "-o", program], check=True)

    def ask(nodes: Iterable[Node]) -> list[Plan]:
        text = "\n".join(" ".join(map(str, node)) for node in nodes)
        done = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
        return [Plan(*map(int, line.split())) for line in done.stdout.splitlines()]

    return ask


def random_node(rng: random.Random) -> Node:
    dk, dv = rng.choice([(40, 40), (64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256)])
    arch, multiprocessors = rng.choice([(800, 108), (860, 28), (890, 128), (900, 132), (1200, 170)])
    hkv, m = rng.randint(1, 9), int(64 * 2 ** rng.uniform(0, 12))
    first = rng.choice([0, rng.randrange(m)])
    return Node(
        dk,
        dv,
        n=int(64 * 2 ** rng.uniform(0, 8)),
        m=m,
        h=hkv * rng.randint(1, 8),
        hkv=hkv,
        s=rng.choice([1, 1, 3, 50]),
        mask_heads=rng.choice([0, 1, hkv]),
        softcap=rng.randint(0, 1),
        sinks=rng.randint(0, 1),
        grads=rng.randrange(8),
        kv_first=first,
        kv_count=rng.randint(1, m - first),
        precise=rng.randint(0, 1),
        arch=arch,
        multiprocessors=multiprocessors,
        limit=rng.choice([16, 64, 256, 1024]) * MIB,
    )


def test_no_plan_is_above_the_limit_unless_the_path_cannot_do_with_less(
    plans: Callable[[Iterable[Node]], list[Plan]],
) -> None:
    rng = random.Random(0)
    nodes = [*BARS, *(random_node(rng) for _ in range(3000))]
    got = plans(nodes)
    assert len(got) == len(nodes)
    for node, plan in zip(nodes, got, strict=True):
        assert plan.mma <= max(node.limit, plan.mma_least), node
        assert plan.hopper <= max(node.limit, plan.hopper_least), node


def test_hopper_runs_with_the_smallest_workspace_and_with_no_less(
    plans: Callable[[Iterable[Node]], list[Plan]],
) -> None:
    rng = random.Random(1)
    nodes = [*BARS, *(random_node(rng) for _ in range(3000))]
    least = [(node, plan.hopper_least) for node, plan in zip(nodes, plans(nodes), strict=True) if plan.hopper_least > 0]
    assert len(least) > 1000
    for limits in ([n for _, n in least], [n - 1 for _, n in least], [0] * len(least)):
        got = plans(node._replace(limit=limit) for (node, _), limit in zip(least, limits, strict=True))
        assert [plan.hopper for plan in got] == [n for _, n in least]


def test_the_timed_shapes_use_the_limit_and_keep_it(plans: Callable[[Iterable[Node]], list[Plan]]) -> None:
    for node, plan in zip(BARS, plans(BARS), strict=True):
        assert plan.mma <= node.limit, node
        assert 0 < plan.hopper <= node.limit, node


def test_repeated_shapes_keep_ds_of_several_ranges_of_keys_and_share_keys(
    plans: Callable[[Iterable[Node]], list[Plan]],
) -> None:
    cases = [Case.parse(text) for text in shapes.REPEATED]
    nodes = [Node(c.hsk, c.hsv, c.nb, c.kv, c.nh, c.nhkv, c.ns, sinks=c.sinks, kv_count=c.kv) for c in cases]
    ranges, splits, splits_dq = zip(*(plan[-3:] for plan in plans(nodes)), strict=True)
    assert ranges == (0, 0, 0, 5, 0, 0)
    assert splits == (1, 4, 1, 5, 8, 0)
    assert splits_dq == (1, 4, 1, 8, 8, 0)


def test_no_share_of_the_keys_is_short_and_few_queries_fill_the_device(
    plans: Callable[[Iterable[Node]], list[Plan]],
) -> None:
    queries = [64, 128, 256, 512, 1024, 2048]
    got = plans(TARGET._replace(n=n) for n in queries)
    for n, plan in zip(queries, got, strict=True):
        blocks = TARGET.h * -(-n // 128)
        assert plan.splits * 8 <= TARGET.m / 64
        assert blocks * plan.splits >= 0.85 * TARGET.multiprocessors, n
    assert got[-1][-3:] == (9, 2, 2)  # of the two units of a pass


def test_only_a_long_cache_of_one_head_takes_more(plans: Callable[[Iterable[Node]], list[Plan]]) -> None:
    keys = [131072, 1048576]
    short, long = plans(TARGET._replace(m=m, kv_count=m, n=512) for m in keys)
    assert short.mma <= 256 * MIB < long.mma == long.mma_least
    assert long.mma_least < 1.6 * 1024 * keys[1]  # fp16 K and V of the head, and the pairs of 128 rows
    assert 256 * MIB < long.hopper == long.hopper_least
