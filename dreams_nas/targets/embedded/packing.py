"""Training sequences: one chart with many conversations that share its image and names.

A sequence is a prefix (image tokens and the names of the marks) and several conversations of one
or two turns. Each conversation sees the prefix and itself only, at the positions it would have
alone; so the image is paid once, and no answer can be copied from another conversation.

Shapes: B sequences, T tokens of a sequence, M image tokens.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from dreams_nas.targets.embedded.charts import (
    COLOUR_NAMES,
    IMAGE_SIZE,
    KINDS,
    Chart,
    build_chart,
    draw_chart,
    slot_edges,
)
from dreams_nas.targets.embedded.questions import ask, introduce
from dreams_nas.targets.embedded.tables import NUM_LEVELS
from dreams_nas.targets.embedded.tokens import (
    ASSISTANT,
    BOS,
    EOS,
    IMAGE,
    NUM_IMAGE_TOKENS,
    PATCH_SIZE,
    USER,
)

_Token = tuple[int, int, bool]
"""Id, the mark that the token is about (or -1), whether it is part of an answer."""

TEXT_ONLY_SHARE = 0.06
SECOND_TURN_SHARE = 0.25
NO_LABEL = -100


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """One step's sequences."""

    ids: Tensor
    """Token ids [B, T], padded on the right."""
    labels: Tensor
    """The token each position predicts [B, T]; ``NO_LABEL`` outside of answers."""
    groups: Tensor
    """Conversation of each token [B, T]: 0 is the shared prefix, -1 padding."""
    positions: Tensor
    """Rotary positions [B, T]."""
    told: Tensor
    """What the predicted token of an answer is about [B, T, 3]: place, colour and value of a mark,
    or ``NO_LABEL`` where it is about none."""
    known: Tensor
    """The same for the token itself where a name ends in the prompt's list (place alone without an
    image) or in a question (place alone) [B, T, 3]."""
    sources: Tensor
    """Where in the sequence the predicted piece of a name stands in the prompt [B, T], or
    ``NO_LABEL``."""
    matches: Tensor
    """Where in the prompt's list the piece of a name stands that a question repeats [B, T], or
    ``NO_LABEL``."""
    asked: Tensor
    """Where the question names the mark that the predicted token of its answer is about [B, T], or
    ``NO_LABEL`` where it does not."""
    numbers: Tensor
    """Where the number stands that a piece of a name in the prompt's list follows [B, T], or
    ``NO_LABEL``."""
    pixels: Tensor
    """Pictures of the sequences that have one, [B', 3, 96, 96]."""
    patch_targets: Tensor
    """What each image token shows, [B', M, 4]: see ``patch_targets_of``."""


def to_pixels(images: list[Image.Image]) -> Tensor:
    """Turn RGB pictures into [B, 3, 96, 96] in -1..1, as the image processor does."""
    array = np.stack([np.asarray(image, dtype=np.float32) for image in images])
    return torch.from_numpy(array).permute(0, 3, 1, 2).div(127.5).sub(1.0).contiguous()


def patch_targets_of(chart: Chart) -> np.ndarray:
    """Return for each image token the mark of its slot: (place, colour, value, kind), [M, 4].

    A vision tower that can tell this from every patch has read the chart; used by a throw-away
    probe that speeds up training.
    """
    side = IMAGE_SIZE // PATCH_SIZE
    edges = [end for _, end in slot_edges(len(chart.values))]
    lines = []
    for i in range(side):
        centre = (i + 0.5) * PATCH_SIZE
        place = min(sum(centre > end for end in edges), len(edges) - 1)
        colour = COLOUR_NAMES.index(chart.colours[place])
        lines.append((place, colour, chart.values[place], KINDS.index(chart.kind)))
    along = np.array(lines, dtype=np.int64)
    whole = np.broadcast_to(along, (side, side, 4))
    if chart.kind == "rows":
        whole = whole.transpose(1, 0, 2)
    return whole.reshape(NUM_IMAGE_TOKENS, 4)


def seen_by_probe(charts: list[Chart]) -> tuple[Tensor, Tensor]:
    """Return the pictures [B, 3, 96, 96] and patch targets [B, M, 4] of charts, B = 0 included."""
    if not charts:
        size = (0, 3, IMAGE_SIZE, IMAGE_SIZE)
        return torch.zeros(size), torch.zeros(0, NUM_IMAGE_TOKENS, 4, dtype=torch.long)
    targets = np.stack([patch_targets_of(chart) for chart in charts])
    return to_pixels([draw_chart(chart) for chart in charts]), torch.from_numpy(targets)


PROBE_SIZES = (6, len(COLOUR_NAMES), NUM_LEVELS, len(KINDS))
"""Number of classes of each column of the patch targets."""


class Packer:
    """Builds training batches from chart numbers; keeps no state between calls."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, max_tokens: int, seed: int) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.seed = seed
        convert = tokenizer.convert_tokens_to_ids
        self._bos, self._eos, self._image, self._user, self._assistant = (
            convert(token) for token in (BOS, EOS, IMAGE, USER, ASSISTANT)
        )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(f" {text}", add_special_tokens=False)
        return ids

    def _marked(
        self, text: str, spans: Sequence[tuple[int, int, int]]
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of a text, and the mark that each token is about, or -1."""
        encoded = self.tokenizer(f" {text}", add_special_tokens=False, return_offsets_mapping=True)
        marks = [
            next((mark for first, last, mark in spans if start <= last and end > first + 1), -1)
            for start, end in encoded["offset_mapping"]
        ]  # the offsets count the space in front, the spans do not
        return encoded["input_ids"], marks

    def _conversation(self, chart: Chart, rng: random.Random) -> list[_Token]:
        """Return the tokens of one or two turns after the prefix."""
        tokens: list[_Token] = []
        for turn in range(2 if rng.random() < SECOND_TURN_SHARE else 1):
            said = ask(chart, rng, taught=True)
            tokens += [(self._user, -1, False)] if turn else []
            tokens += [
                (i, mark, False)
                for i, mark in zip(*self._marked(said.question, said.asked), strict=True)
            ]
            tokens.append((self._assistant, -1, False))
            tokens += [
                (i, mark, True)
                for i, mark in zip(*self._marked(said.text, said.spans), strict=True)
            ]
            tokens.append((self._eos, -1, True))
        return tokens

    def _sources(
        self, names: list[list[int]], starts: list[int], tokens: list[_Token]
    ) -> list[int]:
        """Return for each token of a conversation where its piece of a name is in the prefix."""
        ids = [i for i, _, _ in tokens]
        sources = [NO_LABEL] * len(ids)
        for at, (_, mark, _) in enumerate(tokens):
            size = len(names[mark])
            if mark >= 0 and tokens[at - 1][1] != mark and ids[at : at + size] == names[mark]:
                sources[at : at + size] = range(starts[mark], starts[mark] + size)
        return sources

    def sequence(self, split: str, index: int) -> tuple[Chart, bool, np.ndarray]:
        """Build sequence number ``index``: the chart, whether its image is used, rows [14, T].

        The rows are ids, labels, groups, positions, sources, matches, numbers, asked, place,
        colour and value told, and place, colour and value known.
        """
        chart = build_chart(split, index, self.seed)
        rng = random.Random(f"sequence/{self.seed}/{split}/{index}")
        with_image = rng.random() >= TEXT_ONLY_SHARE
        prefix = [self._bos, self._user]
        prefix += [self._image] * (NUM_IMAGE_TOKENS if with_image else 0)
        prefix += self._encode(introduce(chart, with_image))
        names = [self._encode(name) for name in chart.names]
        facts = [
            (i, COLOUR_NAMES.index(chart.colours[i]), value) for i, value in enumerate(chart.values)
        ]
        none = NO_LABEL
        nothing = (none, none, none)
        columns = [
            [token, none, 0, at, none, none, none, none, *nothing, *nothing]
            for at, token in enumerate(prefix)
        ]
        starts: list[int] = []
        at = 0
        for name, fact in zip(names, facts, strict=True):
            at = next(i for i in range(at, len(prefix)) if prefix[i : i + len(name)] == name)
            starts.append(at)
            for piece in range(len(name)):
                columns[at + piece][6] = at - 1
            columns[at + len(name) - 1][11:] = fact if with_image else (fact[0], none, none)
        group = 1
        while True:
            tokens = self._conversation(chart, rng)
            if group > 1 and len(columns) + len(tokens) > self.max_tokens:
                break
            found = self._sources(names, starts, tokens)
            named: dict[int, int] = {}
            for at, (token, mark, said) in enumerate(tokens):
                label = copied = matched = known = asked = none
                about = -1
                if mark >= 0 and not said:
                    matched = found[at]
                    known = mark if tokens[at + 1][1] != mark else none
                    named[mark] = len(columns)
                if token == self._user:
                    named.clear()
                if at + 1 < len(tokens) and tokens[at + 1][2]:
                    label, about, _ = tokens[at + 1]
                    copied, asked = found[at + 1], named.get(about, none)
                told = facts[about] if about >= 0 else nothing
                place = len(prefix) + at
                marks = (copied, matched, none, asked)
                columns.append([token, label, group, place, *marks, *told, known, none, none])
            group += 1
        return chart, with_image, np.array(columns, dtype=np.int64).T

    def batch(self, split: str, indices: range) -> TrainingBatch:
        """Build the sequences with these numbers as one batch, padded to the longest."""
        built = [self.sequence(split, index) for index in indices]
        longest = max(rows.shape[1] for _, _, rows in built)
        fill = np.array([self.tokenizer.pad_token_id, NO_LABEL, -1, 0, *[NO_LABEL] * 10])
        packed = np.tile(fill[:, None, None], (1, len(built), longest))
        for i, (_, _, rows) in enumerate(built):
            packed[:, i, : rows.shape[1]] = rows
        charts = [chart for chart, with_image, _ in built if with_image]
        ids, labels, groups, positions, sources, matches, numbers, asked = torch.from_numpy(
            packed[:8]
        )
        pixels, targets = seen_by_probe(charts)
        return TrainingBatch(
            ids=ids,
            labels=labels,
            groups=groups,
            positions=positions,
            sources=sources,
            matches=matches,
            numbers=numbers,
            asked=asked,
            told=torch.from_numpy(packed[8:11]).permute(1, 2, 0),
            known=torch.from_numpy(packed[11:]).permute(1, 2, 0),
            pixels=pixels,
            patch_targets=targets,
        )


def attention_mask(groups: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the additive mask [B, 1, T, T]: causal, prefix and own conversation only.

    Args:
        groups: conversation of each token [B, T].
        dtype: that of the hidden states; torch's attention on a CPU takes an fp32 mask beside
            fp64 states without a word and is wrong.
    """
    num_tokens = groups.shape[1]
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    key, query = groups[:, None, :], groups[:, :, None]
    allowed = causal & ((key == 0) | (key == query))
    mask = torch.zeros(allowed.shape, dtype=dtype)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]
