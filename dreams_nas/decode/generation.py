"""What a target's generation config asks for, beside what greedy decoding here does."""

from typing import Any
from weakref import WeakSet

from dreams_nas.core.console import say
from dreams_nas.core.errors import UserError
from dreams_nas.targets.protocol import Target

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": ([], {}),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "token_healing": (False,),
    "stop_strings": ([], ""),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
}
"""Settings that change what greedy decoding answers, with the values, besides None, that do not."""

_SAMPLING = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "top_h",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)

_told: WeakSet[Any] = WeakSet()
"""Models whose sampling was spoken of."""


def require_greedy(target: Target) -> None:
    """Refuse a target whose generation config asks for other answers than greedy ones.

    Sampling is no reason: it is said once per model, on stderr, that it is left out. A target
    without a model of transformers has no generation config.

    Raises:
        UserError: Names each setting and value, and the way out.
    """
    model = getattr(target, "model", None)
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    wrong = {
        name: value
        for name, neutral in _NEUTRAL.items()
        if (value := getattr(config, name, None)) is not None and value not in neutral
    }
    if wrong:
        settings = ", ".join(f"{name} {value!r}" for name, value in wrong.items())
        raise UserError(
            f"the generation config of target '{target.spec.name}' asks for {settings}; decoding "
            "here is plainly greedy and would silently give other answers: to accept those, take "
            "the setting out of generation_config.json in (a copy of) the target's folder"
        )
    if getattr(config, "do_sample", None) and model not in _told:
        _told.add(model)
        found = [(name, getattr(config, name, None)) for name in _SAMPLING]
        settings = ", ".join(f"{name} {value}" for name, value in found if value is not None)
        say(
            f"target '{target.spec.name}': its generation config samples ({settings}); decoding "
            "here is greedy and leaves that out"
        )
