"""Workers of the user's own class, and classes mixed into them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vllm import LLM
from vllm.worker.worker import Worker


class CountingWorker(Worker):
    steps = 0

    def execute(self, plan):
        self.steps += 1
        return super().execute(plan)

    def count_steps(self):
        return self.steps


class Extension:
    def layers(self):
        return len(list(self.get_model().blocks))

    def what_extensions_read(self):
        same = (
            self.model_config.dtype is torch.float32
            and self.model_config.max_model_len == self.config.model_config.max_model_len
        )
        parts = (self.parallel_config, self.cache_config, self.scheduler_config, self.load_config)
        return [
            same,
            self.is_driver_worker,
            self.device.type,
            self.lora_config,
            *(type(part).__name__ for part in parts),
        ]


class Clashing:
    def execute(self, plan):
        return None


def test_a_worker_class_and_an_extension_are_used(model_folder: Path) -> None:
    llm = LLM(str(model_folder), worker_cls=f"{__name__}.CountingWorker", worker_extension_cls=f"{__name__}:Extension",
              dtype="float32")  # fmt: skip
    llm.generate("Hello")
    assert llm.collective_rpc("count_steps")[0] >= 16
    configs = ["ParallelConfig", "CacheConfig", "SchedulerConfig", "LoadConfig"]
    assert llm.collective_rpc("what_extensions_read") == [[True, True, "cpu", None, *configs]]
    assert llm.collective_rpc("layers") == [llm.llm_engine.model_config.hf_config.num_hidden_layers]


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("worker_cls", "no.such.Worker", "cannot be imported"),
        ("worker_cls", "pathlib.Path", "must name a subclass"),
        ("worker_extension_cls", "os.getcwd", "must name a class"),
        ("worker_extension_cls", f"{__name__}.Clashing", "names that the worker has too: execute"),
    ],
)
def test_wrong_classes_are_refused(model_folder: Path, argument: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(str(model_folder), **{argument: value})
