"""Steps have few sizes, and none is much larger than what it was rounded up from."""

from hypothesis import given
from hypothesis import strategies as st

from vllm.step.sizes import LARGE, large_sizes, rounded_down, rounded_up


@given(st.integers(1, 200_000))
def test_a_size_is_near_what_it_is_made_of_and_stays_itself(tokens: int) -> None:
    up, down = rounded_up(tokens), rounded_down(tokens)
    assert down <= tokens <= up
    assert rounded_up(up) == up and rounded_down(up) == up
    assert rounded_up(down) == down or down == tokens < 32
    if tokens > 128:
        assert up <= tokens * 5 / 4 and down >= tokens * 3 / 4


def test_there_are_four_sizes_between_powers_of_two() -> None:
    assert {rounded_up(n) for n in range(4097, 8193)} == {5120, 6144, 7168, 8192}
    assert large_sizes(8192) == sorted({rounded_up(n) for n in range(LARGE + 1, 8193)})
    assert large_sizes(700) == [320, 384, 448, 512, 640, 700]
    assert large_sizes(256) == large_sizes(100) == []
