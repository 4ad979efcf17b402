"""Every name that published integrations import from this package exists, as far as it belongs to this API level.

`integration_imports.json`: distribution -> module -> names, read from the published packages by `ast`. Names of other
API levels, and those that patch another implementation's insides, are not in the table.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

TABLE = json.loads((Path(__file__).parent / "integration_imports.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("integration", TABLE)
def test_what_an_integration_imports_exists(integration: str) -> None:
    missing = []
    for module, names in TABLE[integration].items():
        found = import_module(module)
        for name in names:
            if not hasattr(found, name):
                try:
                    import_module(f"{module}.{name}")
                except ModuleNotFoundError:
                    missing.append(f"{module}.{name}")
    assert not missing
