"""Tokenizer, image processor and chat template of the embedded target, made from scratch.

The vocabulary is a byte-level BPE of 4,096 pieces trained on generated questions and answers; the
image processor works with PIL and numpy alone.
"""

from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from dreams_nas.targets.embedded.charts import IMAGE_SIZE
from dreams_nas.targets.embedded.generator import build_example
from dreams_nas.targets.embedded.questions import introduce

VOCABULARY_SIZE = 4096
PATCH_SIZE = 12
NUM_IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2
PAD, BOS, EOS, IMAGE, USER, ASSISTANT = SPECIAL_TOKENS = (
    "<pad>",
    "<bos>",
    "<eos>",
    "<image>",
    "<user>",
    "<assistant>",
)
CHAT_TEMPLATE = (
    "{{ '<bos>' }}"
    "{% for message in messages %}"
    "{{ '<user>' if message['role'] == 'user' else '<assistant>' }}"
    "{% if message['content'] is string %}{{ ' ' + message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ ' ' + part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""A part of text starts with a space, and so does the answer, as byte-level pieces do."""


def _training_text(num_charts: int) -> Iterator[str]:
    """Yield what the vocabulary is learned from: train split only."""
    for index in range(num_charts):
        example = build_example("train", index, seed=1, for_vocabulary=True)
        yield f" {example.question}"
        yield f" {example.answer}"
        yield f" {introduce(example.chart, with_image=False)}"
    for number in range(100):
        yield f" {number}" * 50


def build_tokenizer(num_charts: int = 12000) -> PreTrainedTokenizerFast:
    """Train the vocabulary on ``num_charts`` generated charts of the train split.

    Every grid level is one token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(num_charts), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        extra_special_tokens={"image_token": IMAGE},
        additional_special_tokens=[USER, ASSISTANT],
        padding_side="left",
        model_max_length=1024,
    )


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Join a tokenizer and the PIL image processor; pictures become 96 x 96 in -1..1."""
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    image_processor = CLIPImageProcessorPil(
        do_resize=True,
        size=size,
        do_center_crop=False,
        crop_size=size,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    return LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )
