"""Studies of training in low precision, made by commands that resume after a kill. ``docs/studies.md`` has
their method, ``python -m studies`` their commands."""
