"""``torchao.float8`` under its own names: programs that train with it run here (``names.as_torchao``)."""
