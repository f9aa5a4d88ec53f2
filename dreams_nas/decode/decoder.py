"""A target and its draft, ready to answer: whole answers, or piece by piece as they come."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from dreams_nas.core.errors import UserError
from dreams_nas.decode.answer import Answer, Piece
from dreams_nas.decode.choose import seeded
from dreams_nas.decode.drafting import ready_draft
from dreams_nas.decode.engine import Collector, Plan, build_plan, decode_steps, require_decodable
from dreams_nas.decode.generation import effective_settings
from dreams_nas.decode.policies import Policy
from dreams_nas.decode.settings import GREEDY, GenerationSettings
from dreams_nas.decode.stopping import TextStream, cut_text
from dreams_nas.draft.model import DraftModel
from dreams_nas.space.tree import StaticTree
from dreams_nas.targets.prompts import load_image
from dreams_nas.targets.protocol import Target, TargetInputs

Prompt = str | Sequence[dict[str, Any]]
"""A question, or a whole conversation in the form of Hugging Face."""
Picture = str | Path | Image.Image
"""An image or its file."""
Pictures = Picture | Sequence[Picture]
"""One or several, in the order of the prompt."""


class AnswerStream(Iterator[Piece]):
    """Pieces of an answer as they are committed; the whole of it once they have ended."""

    def __init__(self, pieces: "_Pieces") -> None:
        self._pieces = pieces
        self._iterator = pieces.run()

    def __next__(self) -> Piece:
        return next(self._iterator)

    @property
    def answer(self) -> Answer:
        """The whole answer; what has not come yet is waited for."""
        for _ in self._iterator:
            pass
        return self._pieces.answer()


class Decoder:
    """Answers prompts with one target and, if there is one, its draft.

    Plain and speculative answers are equal when greedy, and of one distribution when sampling.
    """

    def __init__(
        self, target: Target, draft: DraftModel | None = None, policy: Policy | None = None
    ) -> None:
        """Bind a draft and its policy; without a draft, or with an empty tree, decode plainly.

        Args:
            target: Whose answers are wanted.
            draft: Who proposes.
            policy: What is proposed; the tree stored with the draft when None.

        Raises:
            UserError: The draft belongs to another target.
        """
        self.target = target
        self.plan: Plan | None = None
        """What is proposed; None decodes plainly."""
        if draft is not None:
            policy = policy or draft.config.policy or StaticTree()
            if isinstance(policy, StaticTree):
                self.plan = build_plan(policy, target)
            else:
                self.plan = policy
        self._draft = None
        if draft is not None and self.plan is not None:
            self._draft = ready_draft(draft, target)

    def stream(
        self,
        prompt: Prompt,
        images: Pictures = (),
        *,
        max_new_tokens: int = 128,
        settings: GenerationSettings = GREEDY,
        seed: int = 0,
    ) -> AnswerStream:
        """Answer a prompt piece by piece.

        Args:
            prompt: A question, or chat messages whose image parts stand for `images` in order.
            images: Pictures or their files.
            max_new_tokens: Most tokens of the answer, 0 or more.
            settings: How tokens are chosen, and what ends the answer.
            seed: Of the random numbers that sampling draws.

        Raises:
            UserError: No prompt, an image that is none, a prompt that does not fit, or settings
                that cannot be honoured.
        """
        if not isinstance(settings, GenerationSettings):
            raise UserError(f"settings: {settings!r:.80} is no dreams_nas.GenerationSettings")
        if not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise UserError(f"seed = {seed!r}: must be a whole number from 0 to 2**63 - 1")
        inputs = self.target.prepare(*conversation(prompt, images))
        effective = effective_settings(self.target, settings)
        require_decodable(self.target, inputs, max_new_tokens, effective, self.plan)
        return AnswerStream(_Pieces(self, inputs, max_new_tokens, effective, seed))

    def generate(
        self,
        prompt: Prompt,
        images: Pictures = (),
        *,
        max_new_tokens: int = 128,
        settings: GenerationSettings = GREEDY,
        seed: int = 0,
    ) -> Answer:
        """Answer a prompt; see `stream`."""
        stream = self.stream(
            prompt, images, max_new_tokens=max_new_tokens, settings=settings, seed=seed
        )
        return stream.answer


def conversation(
    prompt: Prompt, images: Pictures
) -> tuple[Sequence[dict[str, Any]], list[Image.Image]]:
    """Chat messages and pictures.

    Raises:
        UserError: An empty prompt, text that is no Unicode, or what is no conversation or no image.
    """
    if isinstance(images, str | Path | Image.Image):
        images = (images,)
    pictures = [_picture(image) for image in _sequence("images", images)]
    if isinstance(prompt, str):
        if not prompt.strip():
            raise UserError('there is no prompt; give --prompt "..."')
        content = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": prompt}]
        prompt = [{"role": "user", "content": content}]
    for message in _sequence("prompt", prompt):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise UserError(
                f"prompt: {message!r} is no chat message; give a text, or messages like "
                '{"role": "user", "content": "..."}'
            )
        try:
            json.dumps(message, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"prompt: holds bytes that are no UTF-8 text ({error.object[error.start]!r}); "
                "write it in UTF-8"
            ) from error
    return prompt, pictures


def _sequence(name: str, values: Any) -> Sequence[Any]:
    """Values that can be gone through and counted; refuses others, and none."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise UserError(f"{name}: {values!r:.80} is no list")
    if name == "prompt" and not values:
        raise UserError("prompt: the conversation has no message")
    return values


def _picture(image: Any) -> Image.Image:
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    if not isinstance(image, str | Path):
        raise UserError(f"images: a {type(image).__name__} is no image; give PIL images or files")
    return load_image(image)


class _Pieces:
    """The run behind one stream."""

    def __init__(
        self,
        decoder: Decoder,
        inputs: TargetInputs,
        max_new_tokens: int,
        settings: GenerationSettings,
        seed: int,
    ) -> None:
        self._decoder, self._inputs = decoder, inputs
        self._settings = settings
        self._collector = Collector()
        self._text = ""
        device = decoder.target.device
        self._steps = decode_steps(
            decoder.target,
            inputs,
            max_new_tokens=max_new_tokens,
            draft=decoder._draft,
            plan=decoder.plan,
            settings=settings,
            generator=seeded(seed, device) if settings.is_random else None,
        )

    def run(self) -> Iterator[Piece]:
        stream = TextStream(self._decoder.target.decode_text)
        for step in self._steps:
            self._collector.add(step)
            num_accepted = 0 if step.round is None else step.round.num_accepted
            for index, token in enumerate(step.tokens):
                text = stream.push(token)
                if step.ended and index + 1 == len(step.tokens):
                    text = self._last(text + stream.finish())
                self._text += text
                yield Piece(text, token, index < num_accepted)

    def _last(self, text: str) -> str:
        """The last piece, without what its token says behind a stop string."""
        whole = cut_text(self._text + text, self._settings.stop_strings)
        return whole[len(self._text) :]

    def answer(self) -> Answer:
        return Answer(
            text=self._text,
            result=self._collector.result(),
            plan=self._decoder.plan,
            settings=self._settings,
            num_prompt_tokens=len(self._inputs.input_ids_T),
        )
