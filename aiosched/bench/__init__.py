"""One module for each published claim: ``aiosched bench NAME`` measures it, wherever you are.

A module ``NAME`` holds a click command ``command``. What they share is here: ``report`` (machine,
versions, rows, a table or one JSON object) and ``measure`` (rounds in turn, medians, spread).
"""
