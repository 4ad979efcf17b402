"""Groups of requests with a common prefix: found, and cut into work that covers every shared key once."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.ops.shared_prefix import ALIGN, Group, Tiles, cut, find_groups, worthwhile


def block_table(prefixes, own, block_size):
    """Block table and cached tokens of requests that begin with the blocks `prefixes[i]` and go on alone."""
    fresh = iter(range(1000, 1_000_000))
    rows = [[*p, *(next(fresh) for _ in range(-(-n // block_size)))] for p, n in zip(prefixes, own, strict=True)]
    table = np.zeros((len(rows), max(map(len, rows)) + 1), np.int32)
    for row, blocks in zip(table, rows, strict=True):
        row[: len(blocks)] = blocks
    return table, np.array([len(p) * block_size + n - 1 for p, n in zip(prefixes, own, strict=True)], np.int32)


def found(prefixes, own, block_size=16, members=8):
    table, cached = block_table(prefixes, own, block_size)
    groups = find_groups(table, np.arange(len(prefixes)), cached, block_size, members)
    return [(group.rows.tolist(), group.keys) for group in groups]


def test_requests_that_begin_with_the_same_blocks_are_a_group():
    a, b = list(range(1, 41)), list(range(100, 120))
    assert found([a, b, a, b, a, b, a, b], [5, 6, 7, 8, 9, 3, 9, 1]) == [([0, 2, 4, 6], 640), ([1, 3, 5, 7], 320)]
    assert found([a, b, a, b, [], []], [5, 6, 7, 8, 900, 900]) == [], "two of a kind gain nothing"
    assert found([a[:8]] * 6, [3] * 6) == [], "short prefixes gain nothing"


def test_a_group_in_a_group_is_preferred_where_it_gains_more():
    a = list(range(1, 101))
    inner = [[*a[:20], *range(200 + i, 280 + i)] for i in (0, 100)]
    both = found([inner[0]] * 4 + [inner[1]] * 4, [9] * 8)
    assert both == [([0, 1, 2, 3], 1600), ([4, 5, 6, 7], 1600)]
    # the common beginning of all is worth more than the long one of a few
    assert found([a] * 3 + [[*a[:80], 500 + i] for i in range(9)], [9] * 12, members=16) == [(list(range(12)), 1280)]


def test_tokens_not_computed_yet_are_not_shared():
    a = list(range(1, 41))
    table, cached = block_table([a] * 4, [20] * 4, 16)
    cached[2] = 500
    (group,) = find_groups(table, np.arange(4), cached, 16, 8)
    assert group.keys == 448


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_groups_are_disjoint_and_really_share_their_keys(data):
    block_size = data.draw(st.sampled_from([8, 16, 32]))
    count = data.draw(st.integers(1, 20))
    trunk = [list(range(1 + 300 * i, 300 + 300 * i)) for i in range(3)]
    prefixes, own = [], []
    for _ in range(count):
        first, second = (data.draw(st.integers(0, 2)) for _ in range(2))
        n = data.draw(st.integers(0, 60))
        prefixes.append([*trunk[first][:n], *trunk[second][n : n + data.draw(st.integers(0, 60))]])
        own.append(data.draw(st.integers(1, 100)))
    table, cached = block_table(prefixes, own, block_size)
    order = np.array(data.draw(st.permutations(range(count))))
    members = data.draw(st.integers(2, 8))
    groups = find_groups(table, order, cached[order], block_size, members)
    seen = np.concatenate([g.rows for g in groups]) if groups else np.zeros(0, int)
    assert len(set(seen.tolist())) == len(seen)
    for g in groups:
        assert g.keys % ALIGN == 0
        assert g.keys <= cached[order][g.rows].min()
        blocks = table[order[g.rows], : -(-g.keys // block_size)]
        assert (blocks == blocks[0]).all()

    tiles = Tiles(members, data.draw(st.integers(1, 40)), data.draw(st.integers(1, 30)))
    work = cut(groups, count, tiles)
    assert len(work.items) <= tiles.items
    covered = np.zeros((count, 64 * 1024), np.int8)
    for first, size, lo, hi in work.items:
        assert 0 < size <= members
        assert lo % ALIGN == 0
        covered[work.members[first : first + size], lo:hi] += 1
    for row, (keys, parts, item, place) in enumerate(work.rows):
        assert (covered[row, :keys] == 1).all()
        assert not covered[row, keys:].any()
        for first, size, _, _ in work.items[item : item + parts]:
            assert place < size
            assert work.members[first + place] == row


def test_sharing_is_worth_it_for_many_requests_and_long_prefixes_only():
    def worth(rows, keys):
        return worthwhile([Group(np.arange(rows, dtype=np.int32), keys)], 32, 4096)

    assert worth(64, 4096)
    assert worth(8, 4096)
    assert not worth(3, 4096)
    assert not worth(64, 64)
    assert not worthwhile([], 32, 4096)
