"""The shape of the embedded target: a CLIP vision tower, a projector and a Llama decoder."""

import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from dreams_nas.targets.embedded.charts import IMAGE_SIZE
from dreams_nas.targets.embedded.tokens import IMAGE, NUM_IMAGE_TOKENS, PATCH_SIZE

EMBEDDING_SCALE = 1.5
FINAL_NORM_SCALE = 0.03


def build_config(tokenizer: PreTrainedTokenizerFast) -> LlavaConfig:
    """Return the configuration of design section 11, with the tokenizer's special ids."""
    vision = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        projection_dim=128,
        hidden_act="gelu_pytorch_tanh",
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=24,
        max_position_embeddings=1024,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=NUM_IMAGE_TOKENS,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )


def build_model(config: LlavaConfig) -> LlavaForConditionalGeneration:
    """Build the model with fresh weights, ready to train in fp32.

    Embedding and head are tied, so the embedding starts large and the final norm small: names are
    copied from the prompt, and at the usual start (0.02) a token's identity drowns in what the
    blocks add (0.05 beside 7 when it was measured), and no name is learned.
    """
    model = LlavaForConditionalGeneration(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=EMBEDDING_SCALE)
        model.model.language_model.norm.weight.fill_(FINAL_NORM_SCALE)
    generation = model.generation_config
    text = config.text_config
    generation.pad_token_id = text.pad_token_id
    generation.bos_token_id = text.bos_token_id
    generation.eos_token_id = text.eos_token_id
    generation.do_sample = False
    return model
