"""Long lists of prompt logprobs travel in pieces: nothing is lost, doubled or moved."""

from __future__ import annotations

import random

from vllm.step.messages import PIECE_ENTRIES, CoreOutput, prompt_pieces
from vllm.step.result import TokenLogprobs


def steps(count: int, width: int) -> list[TokenLogprobs]:
    return [TokenLogprobs([i, *range(width - 1)], [-float(i)] * width, i + 1) for i in range(count)]


def test_a_few_stay_in_their_message() -> None:
    output = CoreOutput("a", [7], prompt_logprobs=steps(100, 21))
    assert list(prompt_pieces([output, CoreOutput("b", [1])])) == []
    assert output.prompt_logprobs == steps(100, 21)


def test_pieces_together_are_the_whole() -> None:
    chance = random.Random(0)
    for _ in range(50):
        sizes = {f"r{i}": (chance.randint(0, 3000), chance.randint(1, 30)) for i in range(chance.randint(1, 5))}
        outputs = [CoreOutput(i, [3], prompt_logprobs=steps(*size)) for i, size in sizes.items()]
        pieces = list(prompt_pieces(outputs))
        for piece in pieces:
            assert piece.prompt_logprobs and piece.new_token_ids == [] and piece.finish_reason is None
            assert sum(len(step.token_ids) for step in piece.prompt_logprobs) <= PIECE_ENTRIES
        for output in outputs:
            mine = [step for piece in pieces if piece.request_id == output.request_id for step in piece.prompt_logprobs]
            assert mine + (output.prompt_logprobs or []) == steps(*sizes[output.request_id])
            assert output.new_token_ids == [3]


def test_a_position_wider_than_a_piece_is_a_piece() -> None:
    output = CoreOutput("a", [], prompt_logprobs=steps(3, PIECE_ENTRIES + 1))
    assert [len(piece.prompt_logprobs or ()) for piece in prompt_pieces([output])] == [1, 1, 1]
