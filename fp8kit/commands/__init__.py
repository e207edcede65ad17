"""Subcommands of ``fp8kit``, one file each: ``add(commands)`` registers it with the parser of ``fp8kit.cli``."""
