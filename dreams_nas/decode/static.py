"""Passes of fixed shape, for CUDA graphs and compilers: the same tokens as the eager ones.

An eager pass sees as many cached rows as there are, so no two rounds have the same shapes. Here
every pass sees the whole cache behind a mask and reads from a tensor where it begins: the host
knows nothing about it, and the same kernels with the same addresses run in every round. That costs
attention over rows that are masked out; it pays where launching kernels is what takes the time.

Eager passes stay the default. Measured on two CPU cores, the embedded target, 6 rows over 300 (ms):
verification eager 2.54 (key/value heads were repeated then), of fixed shape 2.63, compiled by
inductor 1.79; a draft step of fixed shape 0.157, compiled 0.117. Compiling those two took 25 s, and
each further number of rows takes as long.

Shapes: S capacity, Q verified rows, W rows of a draft step, A rows to commit, R self-fed rows of a
round, D hidden, F tapped features.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from dreams_nas.core.errors import UserError
from dreams_nas.decode.drafting import Bounds, DraftSession, ReadyDraft
from dreams_nas.decode.graphs import Captured, Pass
from dreams_nas.decode.plan import additive_mask
from dreams_nas.draft.layers import Rotary, forward_rows, fuse
from dreams_nas.targets.cache import PreallocatedCache, WholeCache
from dreams_nas.targets.huggingface import HuggingFaceTarget
from dreams_nas.targets.protocol import Target, TargetCache, VerifyOutput


class WholeRows:
    """Writes rows where a tensor says and shows whole buffers, [1, K, S, E] each."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Take the buffers of all layers."""
        self._keys, self._values = tuple(keys), tuple(values)
        device = self._keys[0].device
        self.length = torch.zeros((), dtype=torch.int64, device=device)
        """Row that the pass begins at."""
        self._columns_S = torch.arange(self._keys[0].shape[2], device=device)
        self._rows_T = self._columns_S[:0]

    def begin(self, mask_TR: Tensor, num_rows: int) -> Tensor:
        """Open a pass whose rows see all before `length` and, from there on, what a mask says.

        Args:
            mask_TR: Additive, [T, R]; the rows that are written are the last of its R columns.
            num_rows: Rows that are written.

        Returns:
            Additive mask over the whole buffers, [T, S].
        """
        num_columns = mask_TR.shape[1]
        columns_R = self.length + self._columns_S[:num_columns]
        self._rows_T = columns_R[num_columns - num_rows :]
        hidden_S = (self._columns_S >= self.length).to(mask_TR.dtype)
        hidden_TS = (hidden_S * torch.finfo(mask_TR.dtype).min).expand(len(mask_TR), -1)
        return hidden_TS.index_copy(1, columns_R, mask_TR)

    def update(self, layer: int, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's rows of the pass; see `KeyValues.update`."""
        self._keys[layer].index_copy_(2, self._rows_T, k_BKTE)
        self._values[layer].index_copy_(2, self._rows_T, v_BKTE)
        return self._keys[layer], self._values[layer]


class StaticTarget:
    """A target whose verifications have fixed shapes; everything else is the target's own."""

    def __init__(self, target: HuggingFaceTarget, capacity: int) -> None:
        """Allocate the one cache that all sequences share, one after the other.

        Raises:
            UserError: The target hides rows by their distance, which one mask cannot say.
        """
        if target.has_window:
            raise UserError(
                f"{target.spec.name} has layers with a sliding window; passes of fixed shape need "
                "full attention in all layers: decode it eagerly"
            )
        self._target, self._cache = target, target.build_cache(capacity)
        self._rows = WholeRows(*self._cache.buffers)
        self._shown = WholeCache(self._rows)
        self._passes: dict[tuple[int, tuple[int, ...]], Captured] = {}
        self._hooks = ExitStack()
        self._states: dict[tuple[int, ...], dict[int, Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def build_cache(self, capacity: int) -> PreallocatedCache:
        """The one cache, emptied: what was decoded on it before must have ended.

        Raises:
            UserError: It is too small.
        """
        if capacity > self._cache.capacity:
            raise UserError(
                f"a cache of {capacity} rows is needed, and the static one has "
                f"{self._cache.capacity}: build the StaticTarget with a larger capacity"
            )
        self._cache.reset()
        return self._cache

    @torch.inference_mode()
    def verify(
        self,
        tokens_Q: Tensor,
        depths_Q: Tensor,
        mask_QQ: Tensor | None,
        cache: TargetCache,
        *,
        target_layer_ids: Sequence[int] = (),
    ) -> VerifyOutput:
        """Run rows after the committed ones; see `Target.verify`."""
        assert cache is self._cache, "a static target verifies on its own cache"
        num_rows, stop = len(tokens_Q), self._cache.length + len(tokens_Q)
        # On a GPU a row beyond the buffers would end the process.
        assert stop <= self._cache.capacity, f"{stop} rows in a cache of {self._cache.capacity}"
        if mask_QQ is None:
            assert num_rows == 1, "several rows need a mask"
            mask_QQ = torch.zeros(1, 1, dtype=self._target.dtype, device=tokens_Q.device)
        self._rows.length.fill_(self._cache.length)
        self._shown.position_delta.fill_(self._cache.position_delta)
        key = (num_rows, tuple(target_layer_ids))
        arguments = (tokens_Q, depths_Q, mask_QQ)
        if key not in self._passes:
            self._passes[key] = Captured(self.verify_pass(key[1]), arguments)
        logits_QV, features_QF = self._passes[key](*arguments)
        self._cache.take(num_rows)
        # Features may be kept, and the next replay overwrites them; logits are read before it.
        return VerifyOutput(logits_QV, features_QF.clone())

    def verify_pass(self, target_layer_ids: tuple[int, ...]) -> Pass:
        """The verification as a function of (tokens_Q, depths_Q, mask_QQ).

        The hooks on its tapped layers stay until `close`: to set them in the pass breaks its graph.
        """
        if target_layer_ids not in self._states:
            capture = self._target.capture_layers(target_layer_ids)
            self._states[target_layer_ids] = self._hooks.enter_context(capture)
        states = self._states[target_layer_ids]

        def run(tokens_Q: Tensor, depths_Q: Tensor, mask_QQ: Tensor) -> tuple[Tensor, Tensor]:
            mask_QS = self._rows.begin(mask_QQ, len(tokens_Q))
            return self._target.run_rows(
                tokens_Q, depths_Q, mask_QS[None, None], self._shown, target_layer_ids, states
            )

        return run

    def close(self) -> None:
        """Let go of the target's layers; further verifications hook and capture anew."""
        self._hooks.close()
        self._states.clear()
        self._passes.clear()


class StaticDraft:
    """A draft whose passes have fixed shapes; one sequence at a time."""

    def __init__(self, draft: ReadyDraft, target: Target, bounds: Bounds, capacity: int) -> None:
        """Allocate the one session, for `capacity` committed rows."""
        self.target_layer_ids, self.wants_importance = (
            draft.target_layer_ids,
            draft.wants_importance,
        )
        self._session = StaticSession(draft, target, bounds, capacity)

    def open_session(self, target: Target, bounds: Bounds, capacity: int) -> DraftSession:
        """The one session, empty.

        Raises:
            UserError: It is too small.
        """
        return self._session.reopened(bounds, capacity)


class StaticSession(DraftSession):
    """Drafts for one sequence after the other in the same buffers."""

    def __init__(self, draft: ReadyDraft, target: Target, bounds: Bounds, capacity: int) -> None:
        """See `DraftSession`."""
        super().__init__(draft, target, bounds, capacity)
        self._limits = (capacity, bounds.num_self_fed, bounds.num_levels)
        self._rows = WholeRows(self._cache.keys, self._cache.values)
        self._start = torch.zeros((), dtype=torch.int64, device=target.device)
        self._passes: dict[tuple[str, int, int], Captured] = {}

    def reopened(self, bounds: Bounds, capacity: int) -> "StaticSession":
        """Forget the sequence.

        Raises:
            UserError: The buffers are too small for the next.
        """
        wanted = (capacity, bounds.num_self_fed, bounds.num_levels)
        if any(need > own for need, own in zip(wanted, self._limits, strict=True)):
            raise UserError(
                f"a draft cache for {wanted} committed rows, self-fed rows and levels is needed, "
                f"and the static one was built for {self._limits}"
            )
        self._cache.reset()
        self._position = 0
        return self

    def _step(self, tokens_W: Tensor, states_WD: Tensor, mask_WR: Tensor | None) -> Tensor:
        num_rows, num_fed = len(tokens_W), self._cache.num_self_fed
        if mask_WR is None:
            mask_WR = states_WD.new_zeros(num_rows, num_fed)
        elif mask_WR.dtype == torch.bool:
            mask_WR = additive_mask(mask_WR, states_WD.dtype)
        arguments = (tokens_W, states_WD, mask_WR)
        self._start.fill_(self._position + self._depth)
        self._rows.length.fill_(self._cache.length)
        return self._run("step", (num_rows, num_fed), self.step_pass, arguments)

    def step_pass(self, tokens_W: Tensor, states_WD: Tensor, mask_WR: Tensor) -> tuple[Tensor]:
        """A self-fed step as a function of tensors of fixed shape."""
        mask_WS = self._rows.begin(mask_WR, len(tokens_W))
        states_WD = forward_rows(
            self._draft.weights,
            self._target.embed(tokens_W)[None],
            states_WD[None],
            self._rotary_at(self._start[None]),
            self._rows,
            mask_WS,
        )[0]
        return (states_WD,)

    def sync(self, tokens_A: Tensor, features_AF: Tensor) -> None:
        """Commit the rows of the tokens gained last round; see `DraftSession.sync`."""
        num_rows = len(tokens_A)
        self._cache.open(num_rows)
        self._start.fill_(self._position)
        self._rows.length.fill_(self._cache.length)
        arguments = (tokens_A, features_AF)
        self._state_1D = self._run("sync", (num_rows, 0), self.sync_pass, arguments)
        self._cache.commit()
        self._position += num_rows

    def sync_pass(self, tokens_A: Tensor, features_AF: Tensor) -> tuple[Tensor]:
        """A sync as a function of tensors of fixed shape."""
        num_rows = len(tokens_A)
        row_A = torch.arange(num_rows, device=features_AF.device)
        mask_AA = additive_mask(row_A <= row_A[:, None], features_AF.dtype)
        state_1D = forward_rows(
            self._draft.weights,
            self._target.embed(tokens_A)[None],
            fuse(self._draft.weights, features_AF)[None],
            self._rotary_at(self._start + row_A),
            self._rows,
            self._rows.begin(mask_AA, num_rows),
            num_queries=1,
        )[0]
        return (state_1D,)

    def _rotary_at(self, positions_T: Tensor) -> Rotary:
        return Rotary(
            self._table.cos.index_select(0, positions_T),
            self._table.sin.index_select(0, positions_T),
        )

    def _run(
        self, kind: str, sizes: tuple[int, int], run: Pass, arguments: tuple[Tensor, ...]
    ) -> Tensor:
        key = (kind, *sizes)
        if key not in self._passes:
            self._passes[key] = Captured(run, arguments)
        # The next replay of this shape overwrites what it returns.
        return self._passes[key](*arguments)[0].clone()
