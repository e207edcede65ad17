"""What test files share: oracles, modules with random parameters, bad arguments, stand-ins for libraries."""
