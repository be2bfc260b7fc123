"""Which hook belongs to which module: name of the module -> "module of ours:function"."""

TARGETS: dict[str, str] = {}
