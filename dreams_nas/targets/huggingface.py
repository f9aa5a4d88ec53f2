"""The `Target` protocol over a model of transformers; families override what differs.

Shapes: B batch, T prompt tokens, Q verified rows, S visible rows (committed and verified),
L tapped layers, F = L * D tapped features, D hidden, V vocabulary.

What holds for every family, and fails silently otherwise: the mask is additive and 4-D (a 2-D one
means plain causal attention, a boolean one is wrong under eager attention), positions are always
given (the default counts rows), a sliding window goes by position, pixels go in once, at prefill.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from dreams_nas.core.errors import UserError
from dreams_nas.targets.cache import PreallocatedCache
from dreams_nas.targets.capture import capture_embeddings, capture_importance, capture_layers
from dreams_nas.targets.grouped import grouped_queries
from dreams_nas.targets.prompts import build_inputs, prepare_model_inputs
from dreams_nas.targets.protocol import (
    PrefillOutput,
    TargetCache,
    TargetInputs,
    VerifyOutput,
)
from dreams_nas.targets.spec import build_spec

_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}


class HuggingFaceTarget:
    """A frozen model of transformers as a target. Batch 1; sequence state lives in the cache."""

    model_types: ClassVar[tuple[str, ...]] = ()
    """`config.model_type` values this adapter is for."""
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    """Class of transformers that loads the family."""
    takes_images: ClassVar[bool] = False
    """Whether prompts may hold images; a processor is needed then."""
    input_names: ClassVar[tuple[str, ...]] = ()
    """What the family's forward takes at prefill besides token ids."""

    def __init__(
        self, model: Any, processor: Any = None, tokenizer: Any = None, name: str | None = None
    ) -> None:
        """Wrap a loaded model.

        Args:
            model: The model; put into eval mode and frozen.
            processor: Turns messages and images into inputs; None where inputs are built by hand.
            tokenizer: By default the processor's.
            name: Name for people.

        Raises:
            UserError: The decoder has layers that this adapter cannot mask.
        """
        self.model = model.eval().requires_grad_(False)
        self.processor = processor
        self.tokenizer = tokenizer or getattr(processor, "tokenizer", None)
        self.decoder: Any = model.get_decoder()
        self.text_config: Any = model.config.get_text_config()
        self.image_token_id: int | None = getattr(model.config, "image_token_id", None)
        self.spec = build_spec(model, self.tokenizer, name)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._lm_head: Any = model.get_output_embeddings()
        layer_types = getattr(self.text_config, "layer_types", None)
        window = getattr(self.text_config, "sliding_window", None)
        if layer_types is None:  # such a decoder takes one mask for all its layers
            layer_types = ["full_attention" if window is None else "sliding_attention"]
            layer_types = layer_types * self.spec.dims.num_layers
            self._masks_by_type = False
        else:
            self._masks_by_type = "sliding_attention" in layer_types
        if unknown := set(layer_types) - _KNOWN_LAYER_TYPES:
            raise UserError(
                f"{self.spec.name}: decoder layers of type {sorted(unknown)} are not supported; "
                f"supported are {sorted(_KNOWN_LAYER_TYPES)}"
            )
        self._layer_types: list[str] = list(layer_types)
        self._window: int | None = window if "sliding_attention" in layer_types else None

    @property
    def has_window(self) -> bool:
        """Whether some layers see only rows near by."""
        return self._window is not None

    # Prompts

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[Any] = ()
    ) -> TargetInputs:
        """Chat messages and images to a prompt; see `Target.prepare`.

        Args:
            messages: Chat messages; an image stands as {"type": "image"} in a message's content.
            images: PIL images or paths, in the order of those entries.
        """
        input_ids_T, found, sizes = prepare_model_inputs(self, messages, images)
        model_inputs = {key: found[key] for key in self.input_names if key in found}
        return self.build_inputs(input_ids_T, model_inputs, image_sizes=sizes)

    def build_inputs(
        self,
        input_ids_T: Tensor,
        model_inputs: Mapping[str, Tensor] | None = None,
        image_sizes: Sequence[tuple[int, int]] = (),
    ) -> TargetInputs:
        """Token ids and the family's tensors to a checked prompt on the target's device.

        Raises:
            UserError: Too many tokens, or image tokens and visual features that do not match.
        """
        return build_inputs(self, input_ids_T, dict(model_inputs or {}), image_sizes)

    def num_image_tokens(self, model_inputs: Mapping[str, Tensor]) -> list[int]:
        """Visual features that each image of a prompt yields."""
        return []

    def collate(self, prompts: Sequence[TargetInputs]) -> tuple[dict[str, Tensor], list[int]]:
        """Pad prompts on the left to one batch for the model's own forward or `generate`.

        Returns:
            Keyword arguments of the model, and the padding before each prompt.
        """
        longest = max(len(prompt.input_ids_T) for prompt in prompts)
        offsets = [longest - len(prompt.input_ids_T) for prompt in prompts]
        pad = self.text_config.pad_token_id or 0
        ids = [
            F.pad(p.input_ids_T, (n, 0), value=pad) for p, n in zip(prompts, offsets, strict=True)
        ]
        seen = [
            F.pad(torch.ones_like(p.input_ids_T), (n, 0))
            for p, n in zip(prompts, offsets, strict=True)
        ]
        batch = {"input_ids": torch.stack(ids), "attention_mask": torch.stack(seen)}
        for key in self.input_names:
            parts = [
                F.pad(p.model_inputs[key], (n, 0))
                if key.endswith("token_type_ids")
                else p.model_inputs[key]
                for p, n in zip(prompts, offsets, strict=True)
                if key in p.model_inputs
            ]
            if parts:
                batch[key] = torch.cat(parts)
        return batch, offsets

    # The four acts

    def build_cache(self, capacity: int) -> PreallocatedCache:
        """Allocate a cache of that many rows."""
        dims = self.spec.dims
        return PreallocatedCache(
            dims.num_layers, dims.num_kv_heads, capacity, dims.head_size, self.dtype, self.device
        )

    @torch.inference_mode()
    def prefill(
        self,
        inputs: TargetInputs,
        cache: TargetCache,
        *,
        target_layer_ids: Sequence[int] = (),
        want_importance: bool = False,
    ) -> PrefillOutput:
        """Run the prompt, pixels included, and commit its rows; see `Target.prefill`."""
        assert isinstance(cache, PreallocatedCache)
        assert cache.length == 0, (
            f"prefill needs an empty cache, this one holds {cache.length} rows"
        )
        num_tokens = len(inputs.input_ids_T)
        with ExitStack() as stack:
            states = stack.enter_context(self.capture_layers(target_layer_ids))
            merged = stack.enter_context(self.capture_embeddings())
            importance: list[Tensor | None] = [None]
            if want_importance and inputs.image_spans:
                importance = stack.enter_context(self.capture_importance([inputs]))
            output = self.model(
                input_ids=inputs.input_ids_T[None],
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
                **self._prefill_arguments(inputs, cache),
            )
        cache.commit(range(num_tokens))
        return PrefillOutput(
            logits_V=output.logits[0, -1],
            features_TF=self._features(states, target_layer_ids, merged[0]),
            embeddings_TD=merged[0][0],
            importance_T=importance[0],
        )

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
        """Run rows after the committed ones, without waiting for the device; see `Target`."""
        assert isinstance(cache, PreallocatedCache)
        mask = self._attention_mask(mask_QQ, depths_Q, cache)
        with grouped_queries(self.device), self.capture_layers(target_layer_ids) as states:
            return self.run_rows(tokens_Q, depths_Q, mask, cache, target_layer_ids, states)

    def run_rows(
        self,
        tokens_Q: Tensor,
        depths_Q: Tensor,
        mask: Tensor | dict[str, Tensor],
        cache: Any,
        target_layer_ids: Sequence[int],
        states: Mapping[int, Tensor],
    ) -> VerifyOutput:
        """A verification with a mask over everything that the cache shows.

        Args:
            tokens_Q: Token of each row.
            depths_Q: Depth of each row below the committed length.
            mask: Additive, [1, 1, Q, S], or one per type of layer.
            cache: With `length` and `position_delta`, and what decoders of transformers ask for.
            target_layer_ids: Layers to tap.
            states: What `capture_layers` yielded for them.
        """
        output = self.decoder(**self._arguments(tokens_Q, depths_Q, mask, cache))
        state_1QD: Tensor = output.last_hidden_state
        return VerifyOutput(
            self._logits(state_1QD)[0], self._features(states, target_layer_ids, state_1QD)
        )

    def verify_arguments(
        self,
        tokens_Q: Tensor,
        depths_Q: Tensor,
        mask_QQ: Tensor | None,
        cache: PreallocatedCache,
    ) -> dict[str, Any]:
        """What the decoder's own forward is given in a verification."""
        mask = self._attention_mask(mask_QQ, depths_Q, cache)
        return self._arguments(tokens_Q, depths_Q, mask, cache)

    def _arguments(
        self, tokens_Q: Tensor, depths_Q: Tensor, mask: Any, cache: Any
    ) -> dict[str, Any]:
        return {
            "input_ids": tokens_Q[None],
            "attention_mask": mask,
            "position_ids": self._positions(depths_Q, cache),
            "cache": cache,
            "use_cache": True,
        }

    # Pieces that drafts share

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings of text tokens, [..., D], scaled as the family does."""
        embeddings: Tensor = self.model.get_input_embeddings()(tokens)
        return embeddings

    def head(self, states: Tensor) -> Tensor:
        """Logits of last hidden states taken before the final norm, [..., D] -> [..., V]."""
        return self._logits(self.decoder.norm(states))

    @property
    def head_weight_VD(self) -> Tensor:
        """Weight of the language model head."""
        weight: Tensor = self._lm_head.weight
        return weight

    @property
    def inv_freq(self) -> Tensor:
        """Rotary frequencies of the full attention layers, [E / 2], float32."""
        frequencies: Tensor = self.decoder.rotary_emb.inv_freq
        return frequencies.float()

    def decode_text(self, tokens: Sequence[int]) -> str:
        """Tokens to text, special tokens left out."""
        if self.tokenizer is None:
            raise UserError(
                f"{self.spec.name} was loaded without a tokenizer; load it from a folder"
            )
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    # Reading the model beside its forward, batched forwards included

    def capture_layers(self, layer_ids: Sequence[int]) -> AbstractContextManager[dict[int, Tensor]]:
        """Dict of the blocks' outputs [B, T, D], before the final norm, after each forward."""
        return capture_layers(self.decoder.layers, layer_ids)

    def capture_embeddings(self) -> AbstractContextManager[list[Tensor]]:
        """List of the decoder's inputs [B, T, D], images merged in, one per forward."""
        return capture_embeddings(self.decoder.layers)

    def capture_importance(
        self, prompts: Sequence[TargetInputs], offsets: Sequence[int] | None = None
    ) -> AbstractContextManager[list[Tensor | None]]:
        """List that the next forward fills with each prompt's importance [T] (None: no image).

        Args:
            prompts: One per row of the batch; rows may go on behind their prompt.
            offsets: Padding before each prompt; none by default.
        """
        layer = self.spec.dims.num_layers // 2
        window = self._window if self._layer_types[layer] == "sliding_attention" else None
        attention = self.decoder.layers[layer].self_attn
        return capture_importance(attention, window, prompts, offsets or [0] * len(prompts))

    # What families differ in

    def _prefill_arguments(self, inputs: TargetInputs, cache: PreallocatedCache) -> dict[str, Any]:
        return dict(inputs.model_inputs)

    def _positions(self, depths_Q: Tensor, cache: PreallocatedCache) -> Tensor:
        return (depths_Q + cache.length)[None]

    def _logits(self, normed: Tensor) -> Tensor:
        logits: Tensor = self._lm_head(normed)
        return logits

    def _attention_mask(
        self, mask_QQ: Tensor | None, depths_Q: Tensor, cache: PreallocatedCache
    ) -> Tensor | dict[str, Tensor]:
        """Additive mask [1, 1, Q, S], or one per layer type where the decoder has several.

        One masked attention over everything, not an unmasked one over the prefix merged with a
        masked one over the tree. Measured (ms a layer, masked against split, two CPU cores, 6 and
        60 rows): 8 heads of 24 over 232 rows 0.028 against 0.069 and 0.14 against 0.32; 32 heads of
        128 over 2,900 rows 5.05 against 5.06 and 19.5 against 20.6. `bench.device_check` measures
        it on a GPU.
        """
        if mask_QQ is None:
            assert len(depths_Q) == 1, "several rows need a mask"
            full = cache.zeros(cache.length + 1)
        else:
            full = F.pad(mask_QQ, (cache.length, 0))[None, None]
        if self._window is None:
            return full
        sliding = full
        if full.shape[3] > self._window:  # else no row can be out of reach
            sliding = self._slide(full, depths_Q, cache.length, self._window)
        if not self._masks_by_type:
            return sliding
        return {"full_attention": full, "sliding_attention": sliding}

    @staticmethod
    def _slide(full: Tensor, depths_Q: Tensor, length: int, window: int) -> Tensor:
        """Hide what lies `window` or more positions back; committed row i has position i."""
        positions_Q = depths_Q + length
        committed = torch.arange(length, device=depths_Q.device)
        distance_QS = positions_Q[:, None] - torch.cat((committed, positions_Q))
        return full.masked_fill(distance_QS >= window, torch.finfo(full.dtype).min)

    @staticmethod
    def _features(states: Mapping[int, Tensor], layer_ids: Sequence[int], like: Tensor) -> Tensor:
        if not layer_ids:
            return like.new_empty((like.shape[1], 0))
        if len(layer_ids) == 1:
            return states[layer_ids[0]][0]
        return torch.cat([states[k][0] for k in layer_ids], dim=-1)
