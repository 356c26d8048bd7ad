"""Tables of docs/*.md that follow from the committed results; each module registers those of a page or a few.

`docs/tables.py` writes them into the pages. `committed` reads the results, `writing` formats numbers.
"""

from importlib import import_module
from pkgutil import iter_modules

for module in iter_modules(__path__):
    import_module(f"{__name__}.{module.name}")
