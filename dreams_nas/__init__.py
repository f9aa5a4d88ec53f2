"""Hardware-aware search for the draft models that make vision-language models decode faster.

`dreams_nas.generate(...)` answers a prompt, `dreams_nas.load_decoder(...)` loads a target and a
draft for many. They are imported when they are first used, so that `dreams-nas --help` and the
torch-free packages stay light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dreams_nas.decode.loading import generate, load_decoder
    from dreams_nas.decode.settings import GenerationSettings

__all__ = ["GenerationSettings", "__version__", "generate", "load_decoder"]
__version__ = "0.1.0"
_MODULES = {
    "generate": "dreams_nas.decode.loading",
    "load_decoder": "dreams_nas.decode.loading",
    "GenerationSettings": "dreams_nas.decode.settings",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'dreams_nas' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
