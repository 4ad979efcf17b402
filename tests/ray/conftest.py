"""A Ray cluster of two nodes on this machine, each with one processor for a rank, and the model that ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.executor.test_pipeline import save


@pytest.fixture(scope="module")
def cluster(monkeypatch_module: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("ray", reason="pip install vllm[ray]")
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch_module.setenv("OMP_NUM_THREADS", "1")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    ray.init(address=made.address, logging_level="warning")
    made.wait_for_nodes()
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("mixtral", tmp_path_factory.mktemp("mixtral"))
