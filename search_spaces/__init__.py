"""Search spaces that come with dreams-nas, one YAML file each (`dreams_nas.space` loads them)."""
