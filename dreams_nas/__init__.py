"""Hardware-aware search for the draft models that make vision-language models decode faster.

Nothing is imported here, so that `dreams-nas --help` and the torch-free packages stay light.
"""

__version__ = "0.1.0"
