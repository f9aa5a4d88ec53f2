"""The stage `profile`: load target and space, measure, write `table.json`."""

from dreams_nas.core.files import write_json
from dreams_nas.core.provenance import provenance
from dreams_nas.latency.table import LatencyTable, save_table
from dreams_nas.profiling.config import ProfileConfig
from dreams_nas.profiling.profile import profile
from dreams_nas.space.search_space import load_search_space
from dreams_nas.targets.loading import load_placed


def run_profile(config: ProfileConfig, *, quiet: bool = False) -> LatencyTable:
    """Measure the deployment of a config and write `table.json` and `provenance.json` to its out.

    Raises:
        UserError: No such target, space or device, or sizes that do not fit.
    """
    space = load_search_space(config.space)
    target = load_placed(config)
    table = profile(target, space, config, quiet=quiet)
    save_table(table, config.out / "table.json")
    write_json(
        config.out / "provenance.json",
        provenance(
            "profile",
            config,
            config.seed,
            {"space": space.hash, "target": target.spec.shape_hash},
            table.header.deployment,
        ),
    )
    return table
