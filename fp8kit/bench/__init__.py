"""``fp8kit bench``: the native library timed, its results checked; and what ``benchmarks`` times its peers
with.

``timing`` is the one way to take time, ``report`` what a run leaves behind, ``sizes`` what is measured. The
parts: ``layers``, ``kernels``, ``gemms``, ``skeleton`` (also attention alone), ``memory``, ``start``,
``breakeven``, ``casts``. Data are random, never zeros.
"""
