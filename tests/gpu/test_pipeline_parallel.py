"""Pipeline stages on several GPUs, joined by NCCL: the same greedy tokens as one, and a clean end."""

import pytest
import torch

from tests.gpu.test_tensor_parallel import answers, folders  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(180)  # ranks that wait for each other would wait for ever


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "neox"])
def test_two_stages_give_the_tokens_of_one(folders, family):  # noqa: F811
    want = answers(folders[family])
    assert answers(folders[family], pipeline_parallel_size=2) == want


if torch.cuda.device_count() >= 4:

    @pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
    def test_two_stages_of_two_ranks_give_the_tokens_of_one(folders, family):  # noqa: F811
        want = answers(folders[family])
        assert answers(folders[family], pipeline_parallel_size=2, tensor_parallel_size=2) == want
