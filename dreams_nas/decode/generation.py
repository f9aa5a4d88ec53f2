"""What a target's generation config asks for, beside what decoding here does."""

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

from dreams_nas.core.console import say
from dreams_nas.core.errors import UserError
from dreams_nas.decode.settings import GenerationSettings
from dreams_nas.targets.protocol import Target

_NEUTRAL: dict[str, tuple[Any, ...]] = {
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
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
}
"""Settings that no arm here honours, with the values, besides None, that change nothing."""

_HONOURED: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,),
    "stop_strings": ([], ""),
}
"""Settings that decoding honours, and recorded answers do not."""

_WARPS_NOT_HERE: dict[str, tuple[Any, ...]] = {
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
}
"""Settings that shape what transformers samples from, and that sampling here does not know."""

_WARPED = ("temperature", "top_k", "top_p", "min_p")
"""Settings of a generation config that shape what sampling draws from."""

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


def effective_settings(target: Target, settings: GenerationSettings) -> GenerationSettings:
    """Fill what was not given from the target's generation config.

    That a model would sample of its own accord is no reason to: it is said once per model, on
    stderr, that this is left out. A target without a model of transformers has no such config.

    Raises:
        UserError: The config asks for what no arm here honours; names each setting and value, and
            the way out.
    """
    _refuse_special_stops(target, settings)
    config = _generation_config(target)
    if config is None:
        return settings
    _refuse(target, config, _NEUTRAL | (_WARPS_NOT_HERE if settings.is_random else {}))
    names = ["repetition_penalty", *(_WARPED if settings.is_random else ())]
    found = {
        name: value
        for name in names
        if getattr(settings, name) is None and (value := getattr(config, name, None)) is not None
    }
    if not settings.stop_strings and (stops := getattr(config, "stop_strings", None)):
        found["stop_strings"] = (stops,) if isinstance(stops, str) else tuple(stops)
    if not settings.do_sample:
        _tell_sampling(target, config)
    return settings.replace(**found) if found else settings


def _refuse_special_stops(target: Target, settings: GenerationSettings) -> None:
    special = getattr(getattr(target, "tokenizer", None), "all_special_tokens", ())
    for stop in settings.stop_strings:
        if stop in special:
            raise UserError(
                f"stop string '{stop}' is a special token, and the text of an answer holds none: "
                "add its id to eos_token_id in generation_config.json in (a copy of) the target's "
                "folder"
            )


def require_greedy(target: Target) -> None:
    """Refuse a target whose generation config asks for other answers than greedy ones.

    For what works from recorded answers and knows no penalties: training, replay and search.

    Raises:
        UserError: As `effective_settings`, and for penalties and stop strings.
    """
    config = _generation_config(target)
    if config is not None:
        _refuse(target, config, _NEUTRAL | _HONOURED)
        _tell_sampling(target, config)


def _generation_config(target: Target) -> Any:
    return getattr(getattr(target, "model", None), "generation_config", None)


def _refuse(target: Target, config: Any, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    wrong = {
        name: value
        for name, values in neutral.items()
        if (value := getattr(config, name, None)) is not None and value not in values
    }
    if wrong:
        settings = ", ".join(f"{name} {value!r}" for name, value in wrong.items())
        raise UserError(
            f"the generation config of target '{target.spec.name}' asks for {settings}; decoding "
            "here would silently give other answers: to accept those, take the setting out of "
            "generation_config.json in (a copy of) the target's folder"
        )


def _tell_sampling(target: Target, config: Any) -> None:
    model = getattr(target, "model", None)
    if not getattr(config, "do_sample", None) or model in _told:
        return
    _told.add(model)
    found = [(name, getattr(config, name, None)) for name in _SAMPLING]
    settings = ", ".join(f"{name} {value}" for name, value in found if value is not None)
    say(
        f"target '{target.spec.name}': its generation config samples ({settings}); decoding "
        "here is greedy unless it is asked to sample"
    )
