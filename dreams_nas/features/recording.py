"""One recorded answer: what training and replay know of the target.

Shapes: T prompt and answer tokens, F = L * D tapped features, D hidden, M image tokens.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Recording:
    """A prompt, the target's greedy answer, and tapped features of every position."""

    id: str
    """Sample id, unique in its store."""
    tokens_T: Tensor
    """Prompt, then answer (its end token included when it was generated), int64."""
    prompt_length: int
    """Tokens of the prompt."""
    image_spans: tuple[tuple[int, int], ...]
    """[start, stop) of the image tokens of each image."""
    target_layer_ids: tuple[int, ...]
    """Layers in `features_TF`, ascending; the last block is always among them."""
    features_TF: Tensor
    """Outputs of those blocks, side by side, before the final norm."""
    image_embeddings_MD: Tensor
    """Merged input embeddings of the image tokens, in order."""
    importance_M: Tensor
    """Importance of the image tokens, in order, from the prompt alone (as in decoding)."""

    @property
    def num_answer_tokens(self) -> int:
        """Generated tokens."""
        return len(self.tokens_T) - self.prompt_length

    def features(self, target_layer_ids: tuple[int, ...]) -> Tensor:
        """Columns of these layers, [T, len * D]; the whole tensor unsliced when it is all."""
        if target_layer_ids == self.target_layer_ids:
            return self.features_TF
        hidden = self.features_TF.shape[1] // len(self.target_layer_ids)
        columns = [self.target_layer_ids.index(k) for k in target_layer_ids]
        view_TLD = self.features_TF.unflatten(1, (len(self.target_layer_ids), hidden))
        return view_TLD[:, columns].flatten(1)
