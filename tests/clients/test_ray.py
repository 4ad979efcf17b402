"""Ray Data: an engine in an actor completes the rows of a data set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


class Completer:
    """What users of the guide's `offline_inference_distributed` write."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(model="demo", **settings)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        from vllm import SamplingParams

        outputs = self.llm.generate(list(batch["text"]), SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        return {
            "prompt": [str(output.prompt) for output in outputs],
            "generated": [output.outputs[0].text for output in outputs],
        }


def test_rows_of_a_data_set_are_completed(engine_settings: dict[str, Any]) -> None:
    capitals = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo"}
    rows = [{"text": f"The capital of {country} is"} for country in capitals] * 8
    done = ray.data.from_items(rows).map_batches(
        Completer, fn_constructor_args=(engine_settings,), compute=ray.data.ActorPoolStrategy(size=1), batch_size=16
    )
    found = done.take_all()
    assert len(found) == len(rows)
    assert all(capitals[row["prompt"].split()[3]] in row["generated"] for row in found)
