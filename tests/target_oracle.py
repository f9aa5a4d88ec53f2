"""What a target should say, by the model's own forward over whole sequences, without a cache."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from dreams_nas.targets.huggingface import HuggingFaceTarget
from dreams_nas.targets.protocol import TargetInputs


def extend(prompt: TargetInputs, tokens: list[int]) -> TargetInputs:
    """The prompt with text tokens behind it, as one longer prompt."""
    extra = len(tokens)
    mask = prompt.image_mask_T
    return replace(
        prompt,
        input_ids_T=torch.cat((prompt.input_ids_T, torch.tensor(tokens, dtype=torch.long))),
        image_mask_T=None if mask is None else F.pad(mask, (0, extra)),
        model_inputs={
            key: F.pad(value, (0, extra)) if key.endswith("token_type_ids") else value
            for key, value in prompt.model_inputs.items()
        },
    )


def full_forward(
    target: HuggingFaceTarget, prompt: TargetInputs, tokens: list[int]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Logits [T, V] and all hidden states [T, D] of prompt and tokens."""
    whole = extend(prompt, tokens)
    with torch.inference_mode():
        output = target.model(
            input_ids=whole.input_ids_T[None],
            **whole.model_inputs,
            use_cache=False,
            output_hidden_states=True,
        )
    return output.logits[0], tuple(state[0] for state in output.hidden_states)


class Tree:
    """A random draft tree: row 0 is the root, every other row hangs below an earlier one."""

    def __init__(self, num_nodes: int, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens_Q = torch.randint(3, 80, (num_nodes + 1,), generator=generator)
        self.parents = [-1]
        for row in range(1, num_nodes + 1):
            self.parents.append(int(torch.randint(0, row, (1,), generator=generator)))
        self.paths = [self._path(row) for row in range(num_nodes + 1)]
        self.depths_Q = torch.tensor([len(path) - 1 for path in self.paths])
        size = num_nodes + 1
        self.mask_QQ = torch.full((size, size), torch.finfo(dtype).min, dtype=dtype)
        for row, path in enumerate(self.paths):
            self.mask_QQ[row, path] = 0.0

    def _path(self, row: int) -> list[int]:
        path = [row]
        while self.parents[path[0]] >= 0:
            path.insert(0, self.parents[path[0]])
        return path

    def path_tokens(self, row: int) -> list[int]:
        """Tokens from the root to this row."""
        return self.tokens_Q[self.paths[row]].tolist()
