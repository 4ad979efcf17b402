"""The tensors of one step, frozen, passed explicitly to every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class GroupInputs(msgspec.Struct, frozen=True):
    """One KV group's view of the step.

    slot_mapping: [tokens] int64, `block_id * block_size + offset` where each token's key and value go.
    block_table:  [requests, max_blocks] int32; entries past a request's blocks are 0 (the null block).
    plan:         whatever the attention backend prepared for this batch (split counts, tile lists), or None.

    Of a recurrent group, a row of the table is the request's pages of state. `states()` and `drafts` are all that a
    layer needs: it reads the state before the step's first token from `states()[r]`, and writes the one behind its last
    token to `block_table[r, 0]`. Where a request has drafts, which may be refused, it keeps what each would leave: with
    n tokens of which the last d are drafts, the state behind token n - 1 - d + i goes to `block_table[r, i]`.
    Requests that pad a captured step have page 0, which may hold anything.

    first:        [requests] int64, the pages of `states()` where they are not the table's first column.
    drafts:       [requests] int64; None: no request has any.

    Of a group of cross attention, `slot_mapping` is about the tokens of the encoder whose keys this step must write:
    those of its `entering` requests, one after the other.

    key_lens:     [requests] int32, tokens of each request's encoder.
    entering:     the requests, as rows of the step, whose encoder's keys are not there yet.
    """

    slot_mapping: Tensor
    block_table: Tensor
    plan: Any = None
    first: Tensor | None = None
    drafts: Tensor | None = None
    key_lens: Tensor | None = None
    entering: tuple[int, ...] = ()

    def states(self) -> Tensor:
        """[requests] the pages that hold each request's recurrent state before the step."""
        return self.block_table[:, 0] if self.first is None else self.first


class Segment(msgspec.Struct, frozen=True):
    """The rows of one adapter. slot: its place among those on the device.   rows: [n] int64, None for all rows."""

    slot: int
    rows: Tensor | None


class RowView(msgspec.Struct, frozen=True):
    """What layers need to know of a set of rows beyond their values: which adapter each of them uses.

    adapters: [rows] int32, the adapter's slot, -1 for none.   segments: the same as the host knows it, one for each
    adapter that occurs; empty where only the device knows it, as in a captured step.
    """

    adapters: Tensor
    segments: tuple[Segment, ...]


class StepFeatures(msgspec.Struct, frozen=True):
    """What some steps bring beyond tokens, positions and caches. A fast path states which of it it handles, by name;
    any other that is there sends the step to the general path.

    adapters: the views of all tokens and of those in `logits_rows`, where a request of the step uses an adapter.
    virtual: (which tokens have embeddings of their own, [n] int64; those embeddings, [n, width]).
    token_types: [tokens] int64, which text of a pair each token belongs to, where a request has two.
    rotary: [tokens] int64, the row of the rotary tables for each token, where it is not its position.
    taps: by layer, [tokens, hidden] into which its output for every token is written, for whoever reads more of a model
    than its last states; of those in the model's `Traits.taps`.
    """

    adapters: tuple[RowView | None, RowView | None] | None = None
    token_types: Tensor | None = None
    virtual: tuple[Tensor, Tensor] | None = None
    rotary: Tensor | None = None
    taps: Mapping[int, Tensor] | None = None

    def names(self) -> frozenset[str]:
        """The features that the step brings."""
        return frozenset(name for name in self.__struct_fields__ if getattr(self, name) is not None)


class StepInputs(msgspec.Struct, frozen=True):
    """A mixed batch: request r owns tokens `query_starts[r] : query_starts[r + 1]`, the last of its `seq_lens[r]`
    tokens. Made by `of`.

    token_ids, positions: [tokens] int64.   query_starts: [requests + 1] int32.   seq_lens: [requests] int32, the step's
    tokens included.
    logits_rows: [rows] int64, each at most once: the tokens whose hidden states are wanted; None: all, in order.
    max_query_len, max_seq_len: no request has more; a captured step says what it was captured for.
    host_query_starts, host_seq_lens: the same numbers as numpy int32, for planning without a device round trip.
    features: what this step brings beyond that, None for most.
    """

    token_ids: Tensor
    positions: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    logits_rows: Tensor | None
    groups: tuple[GroupInputs, ...]
    max_query_len: int
    max_seq_len: int
    host_query_starts: np.ndarray
    host_seq_lens: np.ndarray
    features: StepFeatures | None = None

    @classmethod
    def of(
        cls,
        token_ids: Tensor,
        positions: Tensor,
        query_starts: Tensor,
        seq_lens: Tensor,
        groups: Sequence[GroupInputs],
        *,
        host_query_starts: np.ndarray,
        host_seq_lens: np.ndarray,
        logits_rows: Tensor | None = None,
        max_query_len: int | None = None,
        max_seq_len: int | None = None,
        features: StepFeatures | None = None,
    ) -> StepInputs:
        """The one way to make a step's inputs: what is not said is neutral, the bounds are those of the host's
        numbers.
        """
        if max_query_len is None:
            max_query_len = int((host_query_starts[1:] - host_query_starts[:-1]).max())
        if max_seq_len is None:
            max_seq_len = int(host_seq_lens.max())
        return cls(
            token_ids=token_ids,
            positions=positions,
            query_starts=query_starts,
            seq_lens=seq_lens,
            logits_rows=logits_rows,
            groups=tuple(groups),
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            host_query_starts=host_query_starts,
            host_seq_lens=host_seq_lens,
            features=features,
        )

    @property
    def rotary_positions(self) -> Tensor:
        """[tokens] int64, the row of the rotary tables for each token."""
        features = self.features
        return self.positions if features is None or features.rotary is None else features.rotary

    def view(self, picked: bool) -> RowView | None:
        """The view of all tokens, or of those in `logits_rows`; None if none of them uses an adapter."""
        if self.features is None or self.features.adapters is None:
            return None
        return self.features.adapters[picked]

    def wanted(self, hidden: Tensor) -> Tensor:
        """hidden: [tokens, ...] -> [rows, ...], its rows that `logits_rows` names."""
        return hidden if self.logits_rows is None else hidden.index_select(0, self.logits_rows)
