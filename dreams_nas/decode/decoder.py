"""A target and its draft, ready to answer: whole answers, or piece by piece as they come."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from dreams_nas.core.config import build_config
from dreams_nas.core.console import warn
from dreams_nas.core.device import Attention, Dtype
from dreams_nas.core.errors import UserError
from dreams_nas.decode.answer import Answer, Piece
from dreams_nas.decode.choose import seeded
from dreams_nas.decode.drafting import ready_draft
from dreams_nas.decode.engine import (
    Collector,
    build_plan,
    decode_steps,
    require_decodable,
)
from dreams_nas.decode.generation import effective_settings
from dreams_nas.decode.settings import GREEDY, GenerateConfig, GenerationSettings
from dreams_nas.decode.stopping import TextStream, cut_text
from dreams_nas.draft.model import DraftModel, load_draft
from dreams_nas.space.tree import StaticTree
from dreams_nas.targets.loading import load_placed
from dreams_nas.targets.prompts import load_image
from dreams_nas.targets.protocol import Target, TargetInputs

Prompt = str | Sequence[dict[str, Any]]
"""A question, or a whole conversation in the form of Hugging Face."""
Picture = str | Path | Image.Image
"""An image or its file."""
Pictures = Picture | Sequence[Picture]
"""One or several, in the order of the prompt."""


def load_draft_and_tree(
    folder: Path, target: Target, chain: int | None = None
) -> tuple[DraftModel, StaticTree]:
    """Read a draft folder; the tree is the one stored with the draft.

    Args:
        folder: Draft checkpoint.
        target: Whose device and dtype the draft takes.
        chain: Levels of a chain to draft instead.

    Raises:
        UserError: No such draft, another target's, or no tree stored and no chain given.
    """
    draft = load_draft(folder, target.device, target.dtype)
    spec = target.spec
    draft.config.require_target(spec.tokenizer_hash, spec.embedding_hash, spec.name)
    if chain is not None:
        return draft, StaticTree.chain(chain)
    if draft.config.policy is None:
        raise UserError(
            f"{folder}: no draft tree was chosen for this draft yet (policy is null in its "
            "config.json); run `dreams-nas finetune`, or give --chain LEVELS"
        )
    return draft, draft.config.policy


def require_draft_folder(name: str, folder: str | Path) -> None:
    """Refuse a missing draft folder before a target is loaded.

    Raises:
        UserError: No draft there.
    """
    for file in ("config.json", "model.safetensors"):
        if not (Path(folder) / file).is_file():
            raise UserError(
                f"draft '{name}': {folder} holds no {file}; a draft folder is what "
                "`dreams-nas finetune` or `dreams-nas export` wrote"
            )


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
        self, target: Target, draft: DraftModel | None = None, tree: StaticTree | None = None
    ) -> None:
        """Bind a draft and its tree; without a draft, or with an empty tree, decode plainly.

        Args:
            target: Whose answers are wanted.
            draft: Who proposes.
            tree: What is proposed; the one stored with the draft when None.

        Raises:
            UserError: The draft belongs to another target.
        """
        self.target = target
        stored = None if draft is None else draft.config.policy
        self.tree = (tree or stored or StaticTree()) if draft is not None else StaticTree()
        speculates = draft is not None and self.tree.num_nodes > 0
        self._draft = ready_draft(draft, target) if speculates and draft is not None else None
        self._plan = build_plan(self.tree, target) if speculates else None

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
        inputs = self.target.prepare(*_conversation(prompt, images))
        effective = effective_settings(self.target, settings)
        require_decodable(self.target, inputs, max_new_tokens, effective, self._plan)
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


def _conversation(
    prompt: Prompt, images: Pictures
) -> tuple[Sequence[dict[str, Any]], list[Image.Image]]:
    """Chat messages and pictures; refuses an empty prompt and what is no image."""
    if isinstance(images, str | Path | Image.Image):
        images = (images,)
    pictures = [x.convert("RGB") if isinstance(x, Image.Image) else load_image(x) for x in images]
    if not isinstance(prompt, str):
        return prompt, pictures
    if not prompt.strip():
        raise UserError('there is no prompt; give --prompt "..."')
    content = [{"type": "image"} for _ in images] + [{"type": "text", "text": prompt}]
    return [{"role": "user", "content": content}], pictures


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
            plan=decoder._plan,
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
            tree=self._decoder.tree,
            settings=self._settings,
            num_prompt_tokens=len(self._inputs.input_ids_T),
        )


def load_decoder(
    target: str = "embedded",
    draft: str | Path | None = None,
    *,
    device: str = "auto",
    dtype: Dtype = "float32",
    attention: Attention = "sdpa",
    threads: int | None = None,
    chain: int | None = None,
) -> Decoder:
    """Load a target and a draft to answer many prompts with.

    Args:
        target: `embedded`, a folder in the form of Hugging Face, or a hub id.
        draft: Draft folder; None decodes plainly.
        device: auto, cpu or cuda:N.
        dtype: Precision of both.
        attention: Attention backend of the target.
        threads: CPU threads of one operation; None takes OMP_NUM_THREADS, or all cores.
        chain: Levels of a chain to draft instead of the draft's own tree.

    Raises:
        UserError: A missing target or draft, or a draft of another target.
    """
    given = {
        "target": target,
        "draft": None if draft is None else str(draft),
        "device": device,
        "dtype": dtype,
        "attention": attention,
        "threads": threads,
        "chain": chain,
    }
    return _load(build_config(GenerateConfig, given, "the call"))


def start(config: GenerateConfig) -> AnswerStream:
    """Answer the prompt of a config; prompt, images and draft are looked at before loading.

    Raises:
        UserError: As `load_decoder` and `Decoder.stream`.
    """
    _conversation(config.prompt, config.images)
    if config.settings.idle:
        warn(f"{', '.join(config.settings.idle)}: not used without --sample")
    if config.chain is not None and config.draft is None:
        warn("--chain is not used without --draft")
    return _load(config).stream(
        config.prompt,
        config.images,
        max_new_tokens=config.max_new_tokens,
        settings=config.settings,
        seed=config.seed,
    )


def _load(config: GenerateConfig) -> Decoder:
    if config.draft is None:
        return Decoder(load_placed(config))
    require_draft_folder("draft", config.draft)
    target = load_placed(config)
    return Decoder(target, *load_draft_and_tree(Path(config.draft), target, config.chain))


def generate(
    prompt: Prompt,
    images: Pictures = (),
    *,
    target: str = "embedded",
    draft: str | Path | None = None,
    device: str = "auto",
    dtype: Dtype = "float32",
    chain: int | None = None,
    max_new_tokens: int = 128,
    seed: int = 0,
    **settings: Any,
) -> Answer:
    """Answer one prompt; loads target and draft anew, so keep a `load_decoder` for many.

    Args:
        prompt: A question, or a conversation in the form of Hugging Face.
        images: Pictures or their files.
        target: `embedded`, a folder in the form of Hugging Face, or a hub id.
        draft: Draft folder; None decodes plainly.
        device: auto, cpu or cuda:N.
        dtype: Precision of target and draft.
        chain: Levels of a chain to draft instead of the draft's own tree.
        max_new_tokens: Most tokens of the answer.
        seed: Of the random numbers that sampling draws.
        settings: Fields of `GenerationSettings` by name: `do_sample`, `temperature`, `top_p`...

    Raises:
        UserError: Bad input or settings.
    """
    if isinstance(stop := settings.get("stop_strings"), str):
        settings["stop_strings"] = (stop,)
    chosen = build_config(GenerationSettings, settings, "the call")
    if chosen.idle:
        warn(f"{', '.join(chosen.idle)}: not used without do_sample=True")
    _conversation(prompt, images)
    decoder = load_decoder(target, draft, device=device, dtype=dtype, chain=chain)
    return decoder.generate(
        prompt, images, max_new_tokens=max_new_tokens, settings=chosen, seed=seed
    )
