"""Hardware-aware search for the draft models that make vision-language models decode faster.

`dreams_nas.generate(...)` answers a prompt, `dreams_nas.load_decoder(...)` loads a target and a
draft for many. They are imported when they are first used, so that `dreams-nas --help` and the
torch-free packages stay light.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dreams_nas.decode.loading import generate, load_decoder

__all__ = ["__version__", "generate", "load_decoder"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in ("generate", "load_decoder"):
        raise AttributeError(f"module 'dreams_nas' has no attribute '{name}'")
    from dreams_nas.decode import loading

    return getattr(loading, name)
