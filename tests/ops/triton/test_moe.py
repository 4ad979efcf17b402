"""Mixture-of-experts kernels against the torch references."""

import pytest
import torch

from vllm.ops import moe as ops
from vllm.ops.triton import moe as kernels


def error(got, want):
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (7, 3), (60, 4), (1, 1)])
def test_routing_matches_the_reference(experts, top_k, renormalize):
    logits = torch.randn(9, experts)
    got, want = (f(logits, top_k, renormalize) for f in (kernels.route, ops.route.reference))
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0])


@pytest.mark.parametrize(
    ("experts", "choice", "biased"),
    [
        (8, ops.Choice(2, scale=3.0), False),
        (9, ops.Choice(4, renormalize=False, scale=1.5, groups=3, top_groups=2), False),
        (24, ops.Choice(5, "sigmoid", scale=2.5, groups=4, top_groups=2, group_best=2), True),
        (10, ops.Choice(3, "sigmoid"), True),
        (64, ops.Choice(6, renormalize=False), False),
    ],
)
def test_routing_by_score_matches_the_reference(experts, choice, biased):
    logits, bias = torch.randn(19, experts), torch.randn(experts) / 4 if biased else None
    got, want = (f(logits, bias, choice) for f in (kernels.route_by_score, ops.route_by_score.reference))
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0])


def test_damaged_scores_choose_experts_that_exist():
    choice = ops.Choice(3, "sigmoid", groups=2, top_groups=1, group_best=2)
    chosen = kernels.route_by_score(torch.full((2, 8), float("nan")), None, choice)[1]
    assert ((chosen >= 0) & (chosen < 8)).all()


@pytest.mark.parametrize("tokens", [3, 40])
def test_biases_and_limits_match_the_reference(tokens):
    x, gate_up, down = (torch.randn(*shape) for shape in ((tokens, 33), (5, 42, 33), (5, 33, 21)))
    weights, chosen = ops.route.reference(torch.randn(tokens, 5), 2, True)
    biases = torch.randn(5, 42), torch.randn(5, 33)
    for extras in (ops.ExpertExtras(*biases, 0.7), ops.ExpertExtras(biases[0], None, 2.0), ops.ExpertExtras(limit=1.0)):
        args = (x, weights, chosen, gate_up, down, "quick_gelu", extras)
        assert error(kernels.expert_mlp(*args), ops.expert_mlp.reference(*args)) < 1e-5


@pytest.mark.parametrize("tokens", [3, 40])
def test_experts_without_a_gate_match_the_reference(tokens):
    x, up, down = (torch.randn(*shape) for shape in ((tokens, 33), (5, 21, 33), (5, 33, 21)))
    weights, chosen = ops.route.reference(torch.randn(tokens, 5), 2, False)
    for extras in (
        ops.ExpertExtras(gated=False),
        ops.ExpertExtras(torch.randn(5, 21), torch.randn(5, 33), gated=False),
    ):
        args = (x, weights, chosen, up, down, "gelu", extras)
        want = torch.zeros(tokens, 33)
        for token, (p, e) in enumerate(zip(weights, chosen, strict=True)):
            for weight, i in zip(p, e.tolist(), strict=True):
                h = up[i] @ x[token] + (0 if extras.gate_up_bias is None else extras.gate_up_bias[i])
                y = down[i] @ torch.nn.functional.gelu(h) + (0 if extras.down_bias is None else extras.down_bias[i])
                want[token] += weight * y
        assert error(kernels.expert_mlp(*args), want) < 1e-5
        assert error(ops.expert_mlp.reference(*args), want) < 1e-5


def test_of_equal_experts_the_lowest_are_taken():
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0], [0.0] * 5])
    assert kernels.route(logits, 2, True)[1].tolist() == [[1, 2], [0, 1]]


def test_damaged_logits_choose_experts_that_exist():
    experts = kernels.route(torch.full((2, 5), float("nan")), 3, True)[1]
    assert ((experts >= 0) & (experts < 5)).all()


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 3), (5, 2, 8), (700, 3, 5), (301, 6, 70)])
def test_pairs_are_sorted_by_expert_and_then_by_token(tokens, top_k, experts):
    chosen = torch.randint(0, experts, (tokens, top_k))
    chosen[chosen == 1] = 0  # an expert that nobody chose
    s = kernels.sort_pairs(chosen, experts, 16)
    flat = chosen.flatten()
    assert s.order.tolist() == flat.argsort(stable=True).tolist()
    assert s.home[s.order.long()].tolist() == list(range(len(flat)))
    used = int(s.tiles[-1])
    covered = []
    for expert, first, end in s.tiles[:-1].view(3, -1)[:, :used].T.tolist():
        rows = range(first, min(first + 16, end))
        assert {int(flat[s.order[r]]) for r in rows} == {expert}
        covered += rows
    assert covered == list(range(len(flat)))


def test_pairs_of_other_ranks_have_no_row():
    chosen = torch.randint(0, 9, (300, 4))  # 8 is another rank's
    s, flat = kernels.sort_pairs(chosen, 8, 16), chosen.flatten()
    mine = int((flat < 8).sum())
    assert s.order[:mine].tolist() == flat.argsort(stable=True)[:mine].tolist()
    used = int(s.tiles[-1])
    assert int((s.tiles[:-1].view(3, -1)[2, :used]).max()) == mine


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter multiplies bfloat16 wrongly
@pytest.mark.parametrize(
    ("tokens", "hidden", "inter", "experts", "top_k"), [(1, 64, 48, 4, 2), (37, 33, 21, 5, 3), (90, 64, 32, 2, 1)]
)
def test_experts_match_the_reference(tokens, hidden, inter, experts, top_k, dtype):
    x, gate_up, down = (
        torch.randn(*shape).to(dtype) / 4
        for shape in ((tokens, hidden), (experts, 2 * inter, hidden), (experts, hidden, inter))
    )
    weights, chosen = ops.route.reference(torch.randn(tokens, experts), top_k, True)
    for act in ("silu", "gelu"):
        got = kernels.expert_mlp(x, weights, chosen, gate_up, down, act)
        want = ops.expert_mlp.reference(x.float(), weights, chosen, gate_up.float(), down.float(), act)
        assert got.dtype == dtype
        assert error(got, want) < (1e-5 if dtype == torch.float32 else 2e-3)


def test_a_token_is_computed_alike_in_any_company():
    # small whole numbers: the interpreter's products, which round as numpy pleases, are exact
    x, gate_up, down = (torch.randint(-2, 3, shape).float() for shape in ((40, 32), (4, 48, 32), (4, 32, 24)))
    weights, chosen = ops.route.reference(torch.randn(40, 4), 2, True)
    together = kernels.expert_mlp(x, weights, chosen, gate_up, down, "relu")
    for t in (0, 17, 39):
        one = slice(t, t + 1)
        assert torch.equal(kernels.expert_mlp(x[one], weights[one], chosen[one], gate_up, down, "relu"), together[one])


def test_no_tokens_and_all_tokens_of_one_expert():
    gate_up, down = torch.randn(3, 16, 8), torch.randn(3, 8, 8)
    none = kernels.expert_mlp(torch.empty(0, 8), torch.empty(0, 2), torch.empty(0, 2).long(), gate_up, down, "silu")
    assert none.shape == (0, 8)
    assert kernels.route(torch.empty(0, 3), 2, True)[1].shape == (0, 2)
    x, weights, chosen = torch.randn(20, 8), torch.rand(20, 1), torch.full((20, 1), 2)
    got, want = (f(x, weights, chosen, gate_up, down, "relu") for f in (kernels.expert_mlp, ops.expert_mlp.reference))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (40, 5, 3), (3, 60, 4), (12, 64, 6), (90, 64, 2)])
def test_routing_and_sorting_at_once_is_the_one_after_the_other(tokens, experts, top_k, renormalize):
    logits = torch.randn(tokens, experts)
    weights, chosen = ops.route.reference(logits, top_k, renormalize)
    got, s = kernels.route_and_sort(logits, top_k, renormalize, 16)
    want = kernels.sort_pairs(chosen, experts, 16)
    torch.testing.assert_close(got, weights)
    assert torch.equal(s.order, want.order) and torch.equal(s.home, want.home) and s.most == want.most
    used = int(s.tiles[-1])
    assert used == int(want.tiles[-1])
    tiles = [sorted(t.tiles[:-1].view(3, -1)[:, :used].T.tolist()) for t in (s, want)]
    assert tiles[0] == tiles[1]


def test_rows_of_nan_disturb_no_other_row():
    logits = torch.randn(6, 5)
    logits[2] = float("nan")
    weights, s = kernels.route_and_sort(logits, 2, True, 16)
    fine = [0, 1, 3, 4, 5]
    torch.testing.assert_close(weights[fine], ops.route.reference(logits[fine], 2, True)[0])
    assert ((s.home >= 0) & (s.home < 12)).all()


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("experts", "top_k", "inter"), [(8, 2, 64), (5, 3, 40)])
def test_a_decode_steps_experts_match_the_reference(tokens, experts, top_k, inter):
    x, logits = torch.randn(tokens, 48), torch.randn(tokens, experts)
    gate_up, down = torch.randn(experts, 2 * inter, 48) / 7, torch.randn(experts, 48, inter) / 7
    outputs, weights, home = kernels.routed_mlp(x, logits, gate_up, down, top_k, True, "gelu_tanh")
    got = kernels.sum_chosen(outputs, weights, home)
    want = ops.expert_mlp.reference(x, *ops.route.reference(logits, top_k, True), gate_up, down, "gelu_tanh")
    assert error(got, want) < 1e-5


@pytest.mark.parametrize("tma", [True, False])
def test_products_of_many_rows_with_and_without_descriptors(tma, monkeypatch):
    monkeypatch.setattr(kernels, "has_tma", lambda: tma)
    hidden, inner, experts, top_k = 72, 520, 3, 2  # tiles and inputs that are not full
    x, gate_up = torch.randn(90, hidden), torch.randn(experts, 2 * inner, hidden) / 8
    down = torch.randn(experts, hidden, inner) / 16
    weights, chosen = kernels.route(torch.randn(90, experts), top_k, True)
    s = kernels.sort_pairs(chosen, experts, 128)
    cut = kernels._Tiling(128, (128, 64, 1, 1), (128, 64, 1, 1))
    got = kernels._apply(x, s, cut, gate_up, down, top_k, "silu", ops.NO_EXTRAS, False)
    want = ops.expert_mlp.reference(x, weights, chosen, gate_up, down, "silu")
    torch.testing.assert_close(kernels.sum_chosen(got, weights, s.home), want, rtol=1e-4, atol=1e-5)


def test_tiles_are_deep_where_they_divide_the_inputs():
    few = kernels._choose_tiling(256, 40, 1536, 512, torch.bfloat16)
    assert (few.gated, few.plain) == (kernels._SHORT, kernels._SHORT)
    few = kernels._choose_tiling(256, 64, 2048, 1024, torch.bfloat16)
    assert (few.gated, few.plain) == (kernels._DEEP, kernels._DEEP)
    few = kernels._choose_tiling(192, 64, 2048, 1408, torch.bfloat16)
    assert (few.gated, few.plain) == (kernels._DEEP, kernels._FEW.plain)
    assert kernels._choose_tiling(640, 64, 2048, 1024, torch.bfloat16) == kernels._FEW
