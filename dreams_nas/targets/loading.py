"""A target from a folder, a hub id or the word "embedded": checked first, loaded after."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dreams_nas.core.device import Attention, Dtype, default_threads, resolve_device
from dreams_nas.core.errors import UserError
from dreams_nas.core.files import hash_json, read_json
from dreams_nas.core.place import PlaceConfig
from dreams_nas.targets.families import adapter_for
from dreams_nas.targets.huggingface import HuggingFaceTarget

EMBEDDED = "embedded"
"""Name of the target that comes with the package."""


def load_target(
    name_or_path: str | Path,
    device: str = "auto",
    dtype: Dtype = "float32",
    threads: int | None = None,
    attention: Attention = "sdpa",
) -> HuggingFaceTarget:
    """Load a target; configuration, tokenizer and processor are checked before the weights.

    Args:
        name_or_path: "embedded", a local folder, or a hub id such as "owner/name".
        device: "auto", "cpu" or "cuda:N".
        dtype: Type of weights and states.
        threads: CPU threads of one operation; None: `OMP_NUM_THREADS`, or all cores.
        attention: Attention backend, "sdpa" or "eager".

    Raises:
        UserError: Missing or broken folder, a family without an adapter, missing processor, or
            weights that are missing, misshapen or not finite. Code from a checkpoint is never run.
    """
    resolved = resolve_device(device)
    source = _resolve_source(str(name_or_path))
    config = _load_config(source)
    adapter = adapter_for(config, f"{source}/config.json")
    processor, tokenizer = _load_readers(source, adapter)
    torch.set_num_threads(threads or default_threads())
    model = _load_model(source, adapter, getattr(torch, dtype), attention)
    return adapter(model.to(resolved), processor, tokenizer, name=Path(source).name)


def load_placed(place: PlaceConfig) -> HuggingFaceTarget:
    """Load the target of a config; see `load_target`."""
    return load_target(place.target, place.device, place.dtype, place.threads, place.attention)


def check_target(name_or_path: str | Path) -> None:
    """Check a target's folder, configuration and family without loading anything.

    Raises:
        UserError: Missing or broken folder, or a family without an adapter.
    """
    source = _resolve_source(str(name_or_path))
    adapter_for(_load_config(source), f"{source}/config.json")


def target_fingerprint(name_or_path: str | Path) -> str:
    """What tells two targets apart without reading their weights.

    Names, sizes and times of a folder's files and the content of its configuration; a hub id is
    taken by its name.
    """
    folder = Path(_resolve_source(str(name_or_path)))
    if not folder.is_dir():
        return hash_json(str(name_or_path))
    files = sorted(path for path in folder.iterdir() if path.is_file())
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hash_json([stats, read_json(folder / "config.json")])


def _resolve_source(name: str) -> str:
    if name == EMBEDDED:
        from dreams_nas.targets.embedded import embedded_target_path

        return str(embedded_target_path())
    folder = Path(name).expanduser()
    if folder.is_dir():
        config = folder / "config.json"
        if not config.is_file():
            raise UserError(f"{folder}: holds no config.json, so it is not a target's folder")
        if not isinstance(read_json(config), dict):
            raise UserError(f"{config}: should hold a JSON object with the model's configuration")
        return str(folder)
    if folder.exists():
        raise UserError(f"{folder}: is a file; give the folder of the target")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UserError(
            f"target '{name}': no such folder; give a folder, a hub id such as owner/name, or "
            f"'{EMBEDDED}'"
        )
    return name


@contextmanager
def _reading(source: str, what: str, hint: str = "") -> Iterator[None]:
    """Turn what transformers raises on broken or missing files into one kind of error."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # it raises nearly anything, by the kind of damage
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"target '{source}': cannot read its {what}: {reason}{hint}") from error


def _load_config(source: str) -> Any:
    from transformers import AutoConfig

    with _reading(source, "config.json"):
        return AutoConfig.from_pretrained(source, trust_remote_code=False)


def _load_readers(source: str, adapter: type[HuggingFaceTarget]) -> tuple[Any, Any]:
    """The processor (None for text) and the tokenizer."""
    from transformers import AutoProcessor, AutoTokenizer

    if not adapter.takes_images:
        with _reading(source, "tokenizer"):
            return None, AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    # Processors that also read video (Qwen-VL) cannot be built without torchvision, and what
    # transformers raises then does not say so.
    hint = "" if find_spec("torchvision") else "; some processors need `pip install torchvision`"
    with _reading(source, "processor", hint):
        processor = AutoProcessor.from_pretrained(source, trust_remote_code=False)
    # Without processor files transformers hands out a bare tokenizer.
    if getattr(processor, "image_processor", None) is None:
        raise UserError(
            f"target '{source}': has no image processor; add its processor files "
            "(preprocessor_config.json or processor_config.json)"
        )
    return processor, processor.tokenizer


def _load_model(
    source: str, adapter: type[HuggingFaceTarget], dtype: torch.dtype, attention: str
) -> Any:
    import transformers

    loader = getattr(transformers, adapter.auto_class)
    with _reading(source, "weights"), _quiet_loading():
        model, report = loader.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=False,
            use_safetensors=True,  # never unpickle
            ignore_mismatched_sizes=True,  # reported below, by name
            output_loading_info=True,
        )
    _check_report(source, report)
    _check_values(source, model)
    return model


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Silence transformers' bar and warnings, which our errors replace."""
    from transformers.utils import logging as transformers_logging

    logger = logging.getLogger("transformers")
    level = logger.level
    has_bar = transformers_logging.is_progress_bar_enabled()
    logger.setLevel(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if has_bar:
            transformers_logging.enable_progress_bar()


def _check_report(source: str, report: Mapping[str, Any]) -> None:
    """A weight that the checkpoint lacks would silently be drawn at random."""
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"target '{source}': its weights lack {_listed(missing)}; the checkpoint is incomplete"
        )
    if mismatched := sorted(str(key[0]) for key in report["mismatched_keys"]):
        raise UserError(
            f"target '{source}': the shapes of {_listed(mismatched)} differ from its config.json"
        )
    if messages := report["error_msgs"]:
        raise UserError(f"target '{source}': cannot load its weights: {messages[0]}")


def _check_values(source: str, model: Any) -> None:
    named = list(model.named_parameters())
    finite = torch.stack([p.detach().isfinite().all() for _, p in named]).tolist()
    if broken := [name for (name, _), ok in zip(named, finite, strict=True) if not ok]:
        raise UserError(f"target '{source}': {_listed(broken)} hold values that are not finite")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
