"""Settings of `export`."""

from dreams_nas.core.config import Config


class ExportConfig(Config):
    """Everything that `export` needs."""

    draft: str = ""
    """Folder of the draft."""
    format: str = "dreams-nas"
    """Format to write; `dreams-nas` is our own."""
    bench: str | None = None
    """bench.json, or the folder that holds it; its table goes into the model card."""
    out: str = "export"
    """Folder to write."""
